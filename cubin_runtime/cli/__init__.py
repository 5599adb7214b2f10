"""The command line: one file per family of verbs; each verb is one call into the package."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from importlib import import_module
from typing import Annotated

import typer

from .._version import __version__
from . import common_options as common
from . import completion, output
from .help_page import Verb

__all__ = ["app", "main"]

VERBS = {  # file -> the functions of its verbs
    "fetch": ("fetch", "where"),
    "verify": ("verify",),
    "pin": ("pin", "unpin"),
    "inspect": ("inspect",),
    "listing": ("list_",),
    "diff": ("diff",),
    "explain": ("explain",),
    "replay": ("replay",),
    "export": ("export", "mirror", "flashinfer_env"),
    "gc": ("gc", "usage"),
    "sign": ("keygen", "sign"),
    "doctor": ("doctor",),
    "json_schema": ("schema",),
}
_WRITE_FAILED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_TOO_FEW = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

app = typer.Typer(
    name="cubin-runtime",
    help="Fetch, verify, inspect and launch prebuilt attention kernels.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(value: bool) -> None:
    if value:
        output.line(f"cubin-runtime {__version__}")
        raise typer.Exit


def _show_completion(shell: completion.Shell | None) -> None:
    if shell is not None:
        for text in completion.script(shell).splitlines():
            output.line(text)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    show_completion: Annotated[
        completion.Shell | None,
        common.option(
            *("--show-completion", "Print the completion script of bash, zsh, fish or powershell, and exit.", "SHELL"),
            callback=_show_completion,
            is_eager=True,
        ),
    ] = None,
    verbose: common.Verbose = 0,
    quiet: common.Quiet = False,
    color: common.ColorOption = common.Color.AUTO,
    timeout: common.Timeout = None,
    retries: common.Retries = None,
    proxy: common.Proxy = None,
    ca_bundle: common.CaBundle = None,
    client_cert: common.ClientCert = None,
    token_file: common.TokenFiles = None,
) -> None:
    """Fetch, verify, inspect and launch prebuilt attention kernels. These options may also follow the verb."""
    common.apply(verbose, quiet, color, timeout, retries, proxy, ca_bundle, client_cert, token_file)
    _start_log()


for _file, _functions in VERBS.items():
    for _function in _functions:
        _name = _function.strip("_").replace("_", "-")
        app.command(_name, cls=Verb)(getattr(import_module(f"{__name__}.{_file}"), _function))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; never raises.

    0 ok, 1 a bug of this package, 2 usage, 3 not pinned, 4 missing, 5 corrupt, 6 extra, 7 no source delivered,
    8 store or standard output not writable, or not enough memory, 9 device or ABI refused, 130 interrupted (by Ctrl-C
    or SIGTERM). With ``--json`` an error is also one JSON object on the standard output. Without arguments it prints
    the help.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    output.prepare_streams()
    try:
        with _interrupted_by_sigterm():
            code = copy_context().run(_run, common.hoisted(_asked(words)) or ["--help"])
        output.flush()
    except output.OutputError as error:
        return _report(error, "OutputError", str(error), error.exit_code, words)
    return code


def _asked(words: list[str]) -> list[str]:
    """The arguments, ``help VERB`` as ``VERB --help``."""
    return [*words[1:2], "--help"] if words[:1] == ["help"] else words


def _run(words: list[str]) -> int:
    from ..errors import CubinRuntimeError

    output.EMITTED.set(False)
    try:
        completion.prepare()
        code = _code(app(args=words, prog_name="cubin-runtime", standalone_mode=False))
        # the parser's library turns an interrupt into this code and says nothing
        return _report_interrupt(words) if code == 130 else code
    except CubinRuntimeError as error:
        return _report(error, type(error).__name__, str(error), error.exit_code, words)
    except KeyboardInterrupt:
        return _report_interrupt(words)
    except SystemExit as exit_:
        return 0 if _reader_is_gone(exit_.__context__) else _code(exit_.code)
    except typer.Abort:
        return _report_interrupt(words)
    except Exception as error:
        return _report_other(error, words)


def _report_other(error: Exception, words: list[str]) -> int:
    """Report an error that is none of the package, and return its code; 1 for a bug."""
    if _was_interrupted(error):
        return _report_interrupt(words)
    if _reader_is_gone(error):
        return 0
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in _TOO_FEW:  # of a huge file, or by a limit
        shortage = getattr(error, "strerror", None) or "there is not enough memory"
        return _report(error, type(error).__name__, shortage, 8, words)
    if hasattr(error, "format_message"):  # the parser's own errors, whichever library typer builds on
        return _report(error, "UsageError", _parser_message(error), 2, words)
    if isinstance(error, OSError) and error.filename is None and error.errno in _WRITE_FAILED:
        # ours are told by name: what is left are the parser's library's own writes
        raise output.OutputError(f"the standard output cannot be written: {error.strerror}") from None
    output.traceback_lines()
    return _report(error, type(error).__name__, f"{error} (this is a bug; please report it)", 1, words)


def _report_interrupt(words: Sequence[str]) -> int:
    again = "; what came is in the store: run it again to continue" if "fetch" in words else ""
    return _report(None, "Interrupted", f"interrupted{again}", 130, words)


def _reader_is_gone(error: BaseException | None) -> bool:
    """Return whether the parser's library wrote a page or completions to a pipe that nobody reads any more."""
    gone = isinstance(error, BrokenPipeError)
    if gone:
        output.stop_writing()
    return gone


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether an error came up while an interrupt was handled, as of threads or workers that it cut short."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM do in the block what Ctrl-C does; the first process of a container would ignore it otherwise."""
    import signal

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _start_log() -> None:
    """Show the package's log on the standard error stream from the level in ``CUBIN_RUNTIME_LOG`` on."""
    level = common.GIVEN.get().get("CUBIN_RUNTIME_LOG", os.environ.get("CUBIN_RUNTIME_LOG", "")).strip().upper()
    if not level:
        return
    import logging

    if level not in _LOG_LEVELS:
        from ..errors import UsageError

        raise UsageError(f"CUBIN_RUNTIME_LOG={level.lower()!r}: expected one of {', '.join(_LOG_LEVELS).lower()}")

    class Escaping(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return output.escape(super().format(record))

    handler = logging.StreamHandler()
    handler.setFormatter(Escaping("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("cubin_runtime")
    logger.handlers = [handler]
    logger.setLevel(level)


def _verbs() -> set[str]:
    return {command.name or "" for command in app.registered_commands}


def _code(value: object) -> int:
    return value if isinstance(value, int) else 0 if value is None else 1


def _parser_message(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    hint = f"; see '{context.command_path} --help'" if context is not None else ""
    message = str(error.format_message())  # type: ignore[attr-defined]
    return (message.rstrip(".") or "no verb given") + hint


def _report(error: Exception | None, kind: str, message: str, code: int, words: Sequence[str]) -> int:
    output.error_line(message)
    for note in getattr(error, "__notes__", ()):
        output.error_line(note)
    if "--json" in words and not output.EMITTED.get():
        verb = next((word for word in words if word in _verbs()), "none")
        output.emit_json(verb, {}, [output.error_object(code, kind, message)])
    return code
