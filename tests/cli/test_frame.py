from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cubin_runtime import cli
from cubin_runtime._version import __version__
from cubin_runtime.cli import main, options, output
from cubin_runtime.config import Network
from cubin_runtime.errors import (
    CorruptError,
    CubinRuntimeError,
    DriverError,
    ExtraError,
    MissingError,
    PinError,
    SourceError,
    StoreError,
    UsageError,
)
from tests.artifacts.children import PACKAGE_ROOT
from tests.artifacts.fleet import COMMAND_LINE, start_python, wait_until
from tests.artifacts.releases import Release, make_release
from tests.artifacts.serving import hang, serving

AGAIN = "interrupted; what came is in the store: run it again to continue"


@pytest.fixture
def verb_that_raises(monkeypatch: pytest.MonkeyPatch):
    """Put a verb ``fail`` into a fresh application; it raises what the test hands over."""

    def install(error: BaseException) -> None:
        app = typer.Typer()

        @app.callback()
        def root() -> None:
            pass

        @app.command("fail")
        def fail(json: bool = typer.Option(False, "--json")) -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)

    return install


@pytest.fixture
def verb_that_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One more verb ``say`` that logs one line at level INFO and one at DEBUG, and notes a third."""
    logger = logging.getLogger("cubin_runtime")
    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))

    @cli.app.command("say")
    def say() -> None:
        logger.info("fetched \x1b[2J")
        logger.debug("detail")
        output.note_line("by the way")

    monkeypatch.delenv("CUBIN_RUNTIME_LOG", raising=False)
    monkeypatch.setattr(logger, "handlers", [])
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("u"), 2),
        (PinError("p"), 3),
        (MissingError("m"), 4),
        (CorruptError("c"), 5),
        (ExtraError("e"), 6),
        (SourceError("s"), 7),
        (StoreError("s"), 8),
        (DriverError("d"), 9),
        (CubinRuntimeError("b"), 1),
        (RuntimeError("bug"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(verb_that_raises, error: BaseException, code: int) -> None:
    verb_that_raises(error)
    assert cli.main(["fail"]) == code


def test_an_exit_code_that_a_verb_chose_is_kept(verb_that_raises) -> None:
    verb_that_raises(typer.Exit(6))
    assert cli.main(["fail"]) == 6


def test_a_failure_prints_its_message_alone(verb_that_raises, capsys: pytest.CaptureFixture[str]) -> None:
    verb_that_raises(MissingError("k.cubin is not there"))
    cli.main(["fail"])
    assert capsys.readouterr() == ("", "error: k.cubin is not there\n")


def test_a_bug_prints_its_traceback(verb_that_raises, capsys: pytest.CaptureFixture[str]) -> None:
    verb_that_raises(RuntimeError("boom"))
    cli.main(["fail"])
    assert "Traceback" in capsys.readouterr().err


def test_a_message_cannot_steer_the_terminal(verb_that_raises, capsys: pytest.CaptureFixture[str]) -> None:
    verb_that_raises(MissingError("name\x1b]0;title\x07"))
    cli.main(["fail"])
    assert capsys.readouterr().err == "error: name\\x1b]0;title\\x07\n"


def test_with_json_a_failure_is_one_object_on_the_standard_output(
    verb_that_raises, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_that_raises(PinError("not pinned"))
    cli.main(["fail", "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "schema": 2,
        "verb": "fail",
        "errors": [{"code": 3, "kind": "PinError", "message": "not pinned"}],
    }


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["--nonsense"], ["inspect"], ["inspect", "a", "b"], ["list", "--head-dim", "x"]],
)
def test_what_the_parser_refuses_is_usage(arguments: list[str]) -> None:
    assert cli.main(arguments) == 2


def test_the_bare_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "inspect" in capsys.readouterr().out


def test_help_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "inspect" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-V"]) == cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"cubin-runtime {__version__}\n" * 2


def test_starting_imports_nothing_heavy() -> None:
    heavy = "{'requests', 'rich.table', 'numpy', 'torch', 'ctypes'}"
    code = (
        "import sys; from cubin_runtime.cli import main; main(['--version']);"
        f"found = {heavy} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_version_is_shown_within_a_second() -> None:
    """A second of the processor's time, which other processes do not use up."""
    code = "import sys, time; from cubin_runtime.cli import main; main(['--version']); print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(done.stdout.split()[-1]) < 1


def test_a_reader_that_leaves_early_does_not_change_the_exit_code() -> None:
    code = (
        "import sys; from cubin_runtime.cli import main, output\n"
        "import typer, cubin_runtime.cli as cli\n"
        "cli.app = typer.Typer()\n"
        "@cli.app.callback()\n"
        "def root() -> None: pass\n"
        "@cli.app.command()\n"
        "def verb() -> None:\n"
        "    for _ in range(100000): output.line('x' * 100)\n"
        "    output.finish([6])\n"
        "sys.exit(main(['verb']))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    message = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), message) == (6, b"")


INFO = "INFO cubin_runtime: fetched \\x1b[2J\n"
DEBUG = "DEBUG cubin_runtime: detail\n"
NOTE = "by the way\n"


@pytest.mark.parametrize(
    ("level", "words", "said"),
    [
        ("", ["say"], NOTE),
        ("info", ["say"], INFO + NOTE),
        ("", ["-v", "say"], INFO + NOTE),
        ("", ["say", "--verbose"], INFO + NOTE),
        ("error", ["say", "-vv"], INFO + DEBUG + NOTE),
        ("", ["say", "-q"], ""),
        ("info", ["say", "--quiet"], INFO),
    ],
)
def test_the_log_is_shown_from_the_level_asked_for(
    verb_that_logs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_LOG", level)
    assert cli.main(words) == 0
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-q", "list", "-v"], "--quiet and --verbose"),
        (["list", "--timeout", "0"], "CUBIN_RUNTIME_TIMEOUT='0.0'"),
        (["list", "--retries", "x"], "'--retries'"),
        (["list", "--token-file", "host"], "expected HOST=FILE"),
        (["list", "--color", "blue"], "blue"),
    ],
)
def test_common_options_that_make_no_sense_are_usage(
    capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert cli.main(words) == 2
    assert reason in capsys.readouterr().err


def test_common_options_set_what_the_environment_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Network] = []
    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
    monkeypatch.setenv("CUBIN_RUNTIME_RETRIES", "7")

    @cli.app.command("look")
    def look() -> None:
        seen.append(options.make_config(tmp_path).network)

    files = ["--ca-bundle", str(tmp_path / "ca"), "--client-cert", str(tmp_path / "me")]
    tokens = ["--token-file", f"one={tmp_path}/1", "--token-file", f"two={tmp_path}/2"]
    assert cli.main(["look", "--timeout", "3", "--retries=1", "--proxy", "http://p:1", *files, *tokens]) == 0
    assert cli.main(["look"]) == 0
    assert seen == [
        Network(
            timeout=3.0,
            retries=1,
            proxy="http://p:1",
            ca_bundle=tmp_path / "ca",
            client_cert=tmp_path / "me",
            tokens=(("one", f"@{tmp_path}/1"), ("two", f"@{tmp_path}/2")),
        ),
        Network(retries=7),
    ]


@pytest.mark.parametrize(("words", "colored"), [([], False), (["--color", "always"], True), (["--color=never"], False)])
def test_errors_are_coloured_where_asked_for(
    capsys: pytest.CaptureFixture[str], words: list[str], colored: bool
) -> None:
    assert cli.main(["where", "unknown", *words]) == 3
    assert ("\x1b[31merror:" in capsys.readouterr().err) is colored


def test_no_summary_of_a_verb_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_every_verb_has_a_help(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert cli.main(["gc", word]) == 0
    assert "--older-than" in capsys.readouterr().out


def test_a_shell_can_complete_verbs() -> None:
    variables = {"_CUBIN_RUNTIME_COMPLETE": "complete_bash", "COMP_WORDS": "cubin-runtime fe", "COMP_CWORD": "1"}
    code = "from cubin_runtime.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["fetch"]


def test_an_unknown_log_level_is_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_LOG", "loud")
    assert cli.main(["list"]) == 2


# -- standard streams that cannot be written, and other ways in which an environment is odd


COMMAND = f"{sys.executable} -c 'import sys; from cubin_runtime.cli import main; sys.exit(main(sys.argv[1:]))'"


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The line, in which ``@`` stands for the command."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **variables}
    return subprocess.run(line.replace("@", COMMAND), shell=True, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("arguments", ["--version", "--help", "list", "list --json", "list nothing --json"])
def test_a_standard_output_that_is_full_is_code_8_and_one_line(arguments: str) -> None:
    done = shell(f"@ {arguments} > /dev/full")
    assert done.returncode == 8
    assert done.stderr.splitlines()[-1] == "error: the standard output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [("@ --version >&-", 0), ("@ --help >&-", 0), ("@ list >&-", 0), ("@ list nothing >&- 2>&-", 3), ("@ list <&-", 0)],
)
def test_closed_streams_do_not_change_the_exit_code(line: str, code: int) -> None:
    done = shell(line)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_told_is_not_told_on_the_standard_output(stream: str) -> None:
    done = shell(f"@ nonsense {stream}")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_file_never_takes_the_number_of_a_closed_standard_stream(release: Release, store: Path) -> None:
    done = shell(f"@ fetch made-1.0 --source {release.root} >&- 2>&-")
    assert done.returncode == 0
    assert main(["verify", "made-1.0", "--complete"]) == 0


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1"])
def test_characters_that_the_terminal_lacks_are_escaped(environment: Path, encoding: str) -> None:
    made = make_release(environment, {"kernel-\u2713.cubin": b"kernel"})
    done = shell(f"@ list made-1.0 --pins {made.pin_file} --source {made.root}", PYTHONIOENCODING=encoding)
    assert (done.returncode, "kernel-\\u2713.cubin" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    "arguments",
    [
        "list made-1.0 --store",
        "list made-1.0 --pins",
        "list made-1.0 --source",
        "verify made-1.0 --tree",
        "export made-1.0 --out",
        "mirror made-1.0 --out",
        "inspect",
    ],
)
def test_the_home_of_an_unknown_user_is_usage(release: Release, arguments: str) -> None:
    assert main([*arguments.split(), "~no-such-user/x.zip"]) == 2


def test_a_current_folder_that_is_gone_is_no_bug(release: Release, tmp_path: Path) -> None:
    for arguments, code in {
        "list": 0,
        "doctor": 0,
        f"fetch made-1.0 --source {release.root}": 0,
        "fetch made-1.0 --store here": 2,
        "export made-1.0 --out here.zip": 2,
        "inspect here": 3,
    }.items():
        done = shell(f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir ../gone; @ {arguments}")
        assert (arguments, done.returncode, "Traceback" in done.stderr) == (arguments, code, False)


def test_sigterm_interrupts(release: Release) -> None:
    with serving(release.root) as server:
        server.fault(".cubin", hang)
        child = start_python(COMMAND_LINE, "fetch", "made-1.0", "--source", server.url)
        wait_until(lambda: server.count(".cubin") > 0)
        child.terminate()
        _, errors = child.communicate(timeout=90)
    assert (child.returncode, errors) == (130, f"error: {AGAIN}\n")


def test_sigterm_is_the_callers_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    main(["--version"])
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--help"], {}),
        (["fetch", "--help"], {}),
        (["list"], {}),
        ([], {"_CUBIN_RUNTIME_COMPLETE": "complete_bash", "COMP_WORDS": "cubin-runtime f", "COMP_CWORD": "1"}),
    ],
)
def test_a_reader_that_has_gone_is_no_error(environment: Path, words: list[str], variables: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", COMMAND_LINE, *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env={**os.environ, **variables}, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
