"""The published trtllm-gen release, got once as a wheel and used as a source in place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.artifacts.cubins.cubin import parse_cubin
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins.pin import Pin
from cubin_runtime.artifacts.tables.consistency import TRTLLM_PARAMETER_BYTES, trtllm_disagreements
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH, KernelTable, parse_header

PIN = "trtllm-gen-0.6.13"
REQUIREMENT = "flashinfer-cubin==0.6.13"
WHEEL = "flashinfer_cubin-0.6.13-py3-none-any.whl"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cubin-runtime-test"
PROCESSES = 2
COUNTS = pytest.StashKey[dict[str, object]]()


@dataclass
class RowsReport:
    """The result of comparing every cubin with its row."""

    cubins: int = 0
    architectures: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)

    def add(self, other: RowsReport) -> None:
        self.cubins += other.cubins
        self.architectures += other.architectures
        self.disagreements += other.disagreements


def open_library(wheel: Path, store: Path) -> Library:
    return Library(Config(store=store, sources=(str(wheel),), offline=True, lazy_fetch=False))


def hold_rows(wheel: Path, store: Path, share: int) -> RowsReport:
    """Compare every ``PROCESSES``-th row with its cubin; runs in a process of its own."""
    library = open_library(wheel, store)
    pin = library.pins.get(PIN)
    header = library.load(pin.path.child(HEADER_PATH), fetch=False)
    report = RowsReport()
    for row in parse_header(header.data).rows[share::PROCESSES]:
        artifact = library.load(pin.path.child(row.file), fetch=False)
        cubin = parse_cubin(artifact.data)
        found = trtllm_disagreements(
            row,
            artifact.data,
            cubin,
            manifest_sha256=artifact.sha256,
            parameter_bytes=TRTLLM_PARAMETER_BYTES,
        )
        report.cubins += 1
        report.architectures[str(cubin.architecture)] += 1
        report.disagreements += [f"{row.symbol}: {one}" for one in found]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ask for these tests by name of the marker; a plain run must not get 458 MB."""
    if "release" not in (config.option.markexpr or ""):
        skip = pytest.mark.skip(reason="checks a 458 MB release: run `make test-release`")
        for item in items:
            if item.get_closest_marker("release"):
                item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(COUNTS, {})
    if counts:
        terminalreporter.section(f"release {PIN}")
        for name, value in counts.items():
            terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="session")
def counts(request: pytest.FixtureRequest) -> dict[str, object]:
    """What is printed at the end."""
    return request.config.stash[COUNTS]


def downloaded(requirement: str, file: str) -> Path:
    """A published wheel, downloaded once; a half-written one is never seen under its name."""
    kept = CACHE / file
    if not kept.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="download-") as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder]
            subprocess.run([*command, requirement], check=True)
            os.replace(Path(folder, file), kept)
    return kept


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The published cubins."""
    return downloaded(REQUIREMENT, WHEEL)


@pytest.fixture(scope="session")
def flashinfer_wheel() -> Callable[[str], Path]:
    """The wheel of a version of FlashInfer, which is read and never installed."""

    def of(version: str) -> Path:
        return downloaded(f"flashinfer-python=={version}", f"flashinfer_python-{version}-py3-none-any.whl")

    return of


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that stays empty: the wheel is used in place."""
    return tmp_path_factory.mktemp("release") / "store"


@pytest.fixture(scope="session")
def library(wheel: Path, store: Path) -> Library:
    return open_library(wheel, store)


@pytest.fixture(scope="session")
def pin(library: Library) -> Pin:
    return library.pins.get(PIN)


@pytest.fixture(scope="session")
def table(library: Library, pin: Pin) -> KernelTable:
    return parse_header(library.load(pin.path.child(HEADER_PATH), fetch=False).data)


@pytest.fixture(scope="session")
def rows_report(wheel: Path, store: Path) -> RowsReport:
    """Every cubin compared with its row, on two processes."""
    report = RowsReport()
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        for part in pool.map(hold_rows, [wheel] * PROCESSES, [store] * PROCESSES, range(PROCESSES)):
            report.add(part)
    return report
