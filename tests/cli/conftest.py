from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.releases import Release, make_release

RunJson = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def without_pins_of_the_user(no_configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(no_configuration))


@pytest.fixture(autouse=True)
def without_logs_of_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line sets a handler for its process, on the error stream of the test that ran it."""
    monkeypatch.setattr(logging.getLogger("cubin_runtime"), "handlers", [])


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No setting from outside; store, configuration and home below a folder of the test's own."""
    for name in ("SOURCES", "OFFLINE", "PINS", "PIN_KEYS", "LOG"):
        monkeypatch.delenv(f"CUBIN_RUNTIME_{name}", raising=False)
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE", str(tmp_path / "store"))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    return tmp_path


@pytest.fixture
def release(environment: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """A made-up release that is pinned for the command line."""
    made = make_release(environment)
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(made.pin_file))
    return made


@pytest.fixture
def store(environment: Path) -> Path:
    return environment / "store"


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> RunJson:
    """Run a verb with ``--json`` and give its code and object."""
    from cubin_runtime.cli import main

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main([*map(str, arguments), "--json"])
        shown: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, shown

    return run
