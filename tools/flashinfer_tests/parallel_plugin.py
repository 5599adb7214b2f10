"""A pytest plug-in of one rank: writes how its tests ended, and which of our kernels they launched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from row_origin import commit

OUTCOMES: dict[str, str] = {}
REASONS: dict[str, str] = {}
CUBINS: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of a test's call, or of what failed around it."""
    if report.when == "call" or report.outcome != "passed":
        OUTCOMES[report.nodeid.rpartition("::")[2]] = report.outcome
    if report.outcome != "passed":
        REASONS[report.nodeid.rpartition("::")[2]] = str(report.longrepr)[-500:]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Write the record of this rank until now: another rank that fails ends this one."""
    from cubin_runtime.attention import default_runtime

    CUBINS.update({launch.kernel: launch.sha256 for launch in default_runtime().driver.last_launches()})
    write()


def pytest_sessionfinish() -> None:
    """Write the record of this rank."""
    write()


def write() -> None:
    """Write the record."""
    record = {"outcomes": OUTCOMES, "reasons": REASONS, "cubins": CUBINS, "commit": commit()}
    Path(os.environ["PARALLEL_RECORDS"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(record))
