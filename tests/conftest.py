from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from cubin_runtime.testing import StandIn

with suppress(ImportError):  # the tests in tests/gpu run without it
    from hypothesis import HealthCheck, settings

    # How long an example takes says more about the machine's load than about the code.
    settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any load")


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at thousands of collected tests again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Give each reason to skip one line per folder: thousands of tests need a GPU."""
    for report in terminalreporter.stats.get("skipped", ()):
        file, _, reason = report.longrepr
        report.longrepr = (str(Path(file).parent), None, reason)


@pytest.fixture(autouse=True)
def _fast_paths_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a plan's second call on: what tests call once more is then no full path."""
    monkeypatch.setattr(import_module("cubin_runtime.attention.fast_path.operator_function"), "FULL_RUNS", 1)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that an ordinary user can reach, which pytest's own are not; what is made in it is readable too."""
    place = Path(tempfile.mkdtemp(prefix="cubin-runtime-test-"))
    place.chmod(0o755)
    before = os.umask(0o022)
    yield place
    os.umask(before)
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def no_configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, for tests that must not read the pins of whoever runs them."""
    return tmp_path_factory.mktemp("no-configuration")


@pytest.fixture
def standin(cubin_standin: StandIn) -> StandIn:
    """The plugin's stand-in."""
    return cubin_standin
