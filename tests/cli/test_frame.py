from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import typer

from cubin_runtime import cli
from cubin_runtime._version import __version__
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
    """An application of one verb that logs one line at level INFO and one at DEBUG."""
    app = typer.Typer()
    logger = logging.getLogger("cubin_runtime")

    @app.command()
    def verb() -> None:
        logger.info("fetched \x1b[2J")
        logger.debug("detail")

    monkeypatch.setattr(cli, "app", app)
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
        "schema": 1,
        "verb": "error",
        "error": {"code": 3, "kind": "PinError", "message": "not pinned"},
    }


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["--nonsense"], ["inspect"], ["inspect", "a", "b"], ["list", "--head-dim", "x"]],
)
def test_what_the_parser_refuses_is_usage(arguments: list[str]) -> None:
    assert cli.main(arguments) == 2


def test_no_verb_is_usage_and_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "inspect" in "".join(capsys.readouterr())


def test_help_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "inspect" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"cubin-runtime {__version__}\n"


def test_starting_imports_nothing_heavy() -> None:
    heavy = "{'requests', 'elftools', 'rich.table', 'numpy', 'torch', 'ctypes'}"
    code = (
        "import sys; from cubin_runtime.cli import main; main(['--version']);"
        f"found = {heavy} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_version_is_shown_within_a_second() -> None:
    started = time.perf_counter()
    code = "from cubin_runtime.cli import main; main(['--version'])"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.perf_counter() - started < 1


def test_a_reader_that_leaves_early_does_not_change_the_exit_code() -> None:
    code = (
        "import sys; from cubin_runtime.cli import main, output\n"
        "import typer, cubin_runtime.cli as cli\n"
        "cli.app = typer.Typer()\n"
        "@cli.app.command()\n"
        "def verb() -> None:\n"
        "    for _ in range(100000): output.line('x' * 100)\n"
        "    output.finish([6])\n"
        "sys.exit(main([]))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    message = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), message) == (6, b"")


def test_the_log_is_silent_unless_asked_for(verb_that_logs, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([])
    assert capsys.readouterr().err == ""


def test_the_log_is_shown_from_the_level_asked_for(
    verb_that_logs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_LOG", "info")
    cli.main([])
    assert capsys.readouterr().err == "INFO cubin_runtime: fetched \\x1b[2J\n"


def test_an_unknown_log_level_is_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_LOG", "loud")
    assert cli.main(["list"]) == 2
