"""FlashInfer's own attention tests on our functions: a seeded sample, several processes, one JSON.

    python tools/flashinfer_tests/run.py STAGED --out OUT [--sample 2800] [--seed 0] [--jobs 12] [--seconds 540]

``STAGED`` is what ``stage.py`` wrote. ``OUT/flashinfer_tests.json`` says for each test file how many passed, failed,
were refused or skipped, why, and which failed. The exit status is 1 if a test failed or fewer than ``--at-least`` ran.
``--collect`` lists the sample without a GPU; ``--only TEXT`` is pytest's ``-k``. The processes share the device, and
run alone in turn at the end those tests for which its memory did not suffice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "flashinfer_tests"
RAN = ("passed", "failed", "refused", "untouched")


def main() -> int:
    """Run the tests and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, sample=2800, at_least=2000, jobs=12, seconds=540)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with tarfile.open(given.staged) as opened:
            opened.extractall(folder, filter="data")
        # Their helpers are in ``tests`` too, and a folder without this file gives way to our package of that name.
        (folder / "tests" / "__init__.py").touch()
        began = time.time()
        # Any file: whoever runs tests holds its lock.
        turn = {"turn": str(folder / "staged.json")}
        statuses = run_jobs(
            given,
            folder,
            began + given.seconds,
            NAME,
            pytest_command(given, "tests/attention"),
            lambda own: environment(folder, own | turn),
        )
        staged = json.loads((folder / "staged.json").read_text())
        records = [record for path in folder.glob("records-*") for record in read(path)]
    report = {
        **staged,
        "gpu": device_name(),
        "jobs": given.jobs,
        "seed": given.seed,
        "seconds": round(time.time() - began, 1),
        **summary(records),
    }
    return written(given, NAME, report, statuses)


def add_options(parser: argparse.ArgumentParser, *, sample: int, at_least: int, jobs: int, seconds: float) -> None:
    """Add the arguments of a run, with these defaults."""
    parser.add_argument("staged", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=sample)
    parser.add_argument("--at-least", type=int, default=at_least)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=jobs)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--only", default="")
    parser.add_argument("--collect", action="store_true")


def written(given: argparse.Namespace, name: str, report: dict[str, Any], statuses: list[int]) -> int:
    """Write the report to ``OUT/name.json`` and print it; the exit status of the run."""
    (given.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "failures"}, indent=1))
    for failure in report["failures"][:20]:
        print(f"FAILED {failure['test']}\n    {failure['reason'][:300]}")
    if given.collect:
        return int(any(statuses))
    return int(bool(report["failures"]) or report["ran"] < given.at_least)


def device_name() -> str:
    """The first GPU; "none" where there is no driver, as when tests are only collected."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


def pytest_command(given: argparse.Namespace, tests: str) -> list[str]:
    """The command of a process that runs ``tests`` with the plug-in beside the tool."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "--noconftest"]
    command += ["-c", os.devnull, "--rootdir", ".", "--tb", "short", *(["-k", given.only] if given.only else [])]
    return [*command, *(["--collect-only"] if given.collect else []), tests]


def run_jobs(
    given: argparse.Namespace,
    folder: Path,
    until: float,
    name: str,
    command: list[str],
    environment_of: Callable[[dict[str, Any]], dict[str, str]],
    grace: float = 45,
) -> list[int]:
    """Run ``command`` in processes side by side, logging to ``OUT/name-JOB.log``; their exit statuses.

    ``environment_of`` gives a process its environment for its settings. ``grace``: seconds for the last tests to end;
    what then hangs is ended.
    """
    jobs = []
    for job in range(given.jobs):
        settings = {
            "job": job,
            "jobs": given.jobs,
            "sample": given.sample,
            "seed": given.seed,
            "until": until,
            "records": str(folder / f"records-{job}"),
        }
        log = (given.out / f"{name}-{job}.log").open("w")
        jobs.append(
            subprocess.Popen(command, cwd=folder, env=environment_of(settings), stdout=log, stderr=subprocess.STDOUT)
        )
    statuses = []
    for process in jobs:
        try:
            statuses.append(process.wait(max(1.0, until + grace - time.time())))
        except subprocess.TimeoutExpired:
            process.kill()
            statuses.append(process.wait())
    return statuses


def environment(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The environment of a process: FlashInfer and its tests from ``folder``, our package from here."""
    return {
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_LOGLEVEL": "0",
        **around(
            HERE,
            ROOT,
            folder,
            folder / "site",
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"),
            FLASHINFER_WORKSPACE_BASE=str(folder),
            FLASHINFER_TESTS=json.dumps(settings),
        ),
    }


def around(*paths: Path, **variables: str) -> dict[str, str]:
    """This process's environment with ``variables``, and ``paths`` in front of PYTHONPATH."""
    found = [*map(str, paths), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(found), **variables}


def run_staged(
    given: argparse.Namespace,
    name: str,
    command: list[str],
    environment_of: Callable[[Path, dict[str, Any]], dict[str, str]],
    summary_of: Callable[[list[dict[str, Any]]], dict[str, Any]],
    prepare: Callable[[Path], None] = lambda _: None,
) -> int:
    """Run the tests of ``given.staged`` with ``command`` and write the report; the exit status of the run.

    ``prepare`` completes the folder into which they are unpacked, which ``environment_of`` gets with the settings of a
    process.
    """
    sys.path.append(str(ROOT / "benchmarks"))
    from gpu_environment import gpu_environment

    given.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with tarfile.open(given.staged) as opened:
            opened.extractall(folder, filter="data")
        prepare(folder)
        until = began + given.seconds
        statuses = run_jobs(given, folder, until, name, command, partial(environment_of, folder), grace=20)
        records = [record for path in folder.glob("records-*") for record in read(path)]
        staged = json.loads((folder / "staged.json").read_text())
    report: dict[str, Any] = {"environment": {} if device_name() == "none" else gpu_environment(), **staged}
    report |= {"jobs": given.jobs, "seed": given.seed, "seconds": round(time.time() - began, 1), **summary_of(records)}
    return written(given, name, report, statuses)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of one process; the last may have been cut off."""
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def summary(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts by file, why tests were refused or skipped, and the failures."""
    files: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {"failed": Counter(), "refused": Counter(), "skipped": Counter()}
    failures, collected, sample = [], 0, 0
    for record in records:
        if "test" not in record:
            collected, sample = record["collected"], record["sample"]
            continue
        counts = files.setdefault(record["test"].split("::")[0], Counter())
        counts[record["outcome"]] += 1
        if "translated" in record:  # by plug-ins that count it
            counts["with the backend made auto"] += bool(record["translated"])
        if record["outcome"] in reasons:
            reasons[record["outcome"]][re.sub(r"\d+", "N", record["reason"].split("\n\n")[0])[:160]] += 1
        if record["outcome"] == "failed":
            failures.append(record)
    total = sum(files.values(), Counter[str]())
    return {
        "collected": collected,
        "sample": sample,
        "ran": sum(total[outcome] for outcome in RAN),
        "total": dict(total),
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
        "reasons": {name: dict(counts.most_common(40)) for name, counts in reasons.items()},
        "failures": failures,
    }


if __name__ == "__main__":
    sys.exit(main())
