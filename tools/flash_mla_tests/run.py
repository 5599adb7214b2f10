"""FlashMLA's own decode tests on our names: sparse and dense, a seeded sample, several processes, one JSON.

    python tools/flash_mla_tests/run.py stage REPOSITORY STAGED [--commit HEAD]
    python tools/flash_mla_tests/run.py run STAGED --out OUT [--sample 1500] [--seed 0] [--jobs 6] [--seconds 120]

``REPOSITORY`` is a clone of FlashMLA, with or without a work tree. Nothing of it belongs into this repository.
``OUT/flash_mla_tests.json`` says for each group of tests how many passed, failed or were refused, why, and which
failed. The exit status is 1 if a test failed or fewer than ``--at-least`` ran. Tests for which memory did not suffice
beside the other processes run again, alone, at the end. ``--collect`` lists the sample.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLASHINFER = HERE.parent / "flashinfer_tests"
sys.path.insert(0, str(FLASHINFER))  # whose modules have the names of ours

import run as flashinfer_run  # type: ignore[import-not-found]  # noqa: E402

NAME = "flash_mla_tests"
FILES = (
    *("test_flash_mla_dense_decoding.py", "test_flash_mla_sparse_decoding.py", "lib.py", "quant.py", "ref.py"),
    *(f"kernelkit/{name}.py" for name in ("__init__", "bench", "compare", "generate", "precision", "utils")),
)
NO_MEMORY = "out of memory"
ALONE = 30  # seconds for the tests that run again


def main() -> int:
    """Stage the tests, or run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    staging = verbs.add_parser("stage")
    staging.add_argument("repository", type=Path)
    staging.add_argument("staged", type=Path)
    staging.add_argument("--commit", default="HEAD")
    running = verbs.add_parser("run")
    flashinfer_run.add_options(running, sample=1500, at_least=1000, jobs=6, seconds=120)
    given = parser.parse_args()
    return stage(given) if given.verb == "stage" else run(given)


def stage(given: argparse.Namespace) -> int:
    """Pack the test files of a commit."""
    from stage import add, git

    commit = git(given.repository, "rev-parse", given.commit).decode().strip()
    with tarfile.open(given.staged, "w:xz") as archive:
        add(archive, "staged.json", json.dumps({"tests": commit}).encode())
        for path in FILES:
            add(archive, path, git(given.repository, "show", f"{commit}:tests/{path}"))
    return 0


def run(given: argparse.Namespace) -> int:
    """Run the tests and write the report."""
    sys.path.append(str(ROOT / "benchmarks"))
    from gpu_environment import gpu_environment

    given.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    command = [sys.executable, str(HERE / "cases.py")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with tarfile.open(given.staged) as opened:
            opened.extractall(folder, filter="data")

        def run_jobs(jobs: int, until: float, **settings: Any) -> list[int]:
            around = {"collect": given.collect, **settings}
            return list(
                flashinfer_run.run_jobs(
                    argparse.Namespace(**vars(given) | {"jobs": jobs}),
                    folder,
                    until,
                    NAME,
                    command,
                    lambda own: environment(folder, own | around),
                    grace=20,
                )
            )

        def records() -> list[dict[str, Any]]:
            return [record for path in folder.glob("records-*") for record in flashinfer_run.read(path)]

        statuses = run_jobs(given.jobs, began + given.seconds)
        first = records()
        short = [record["case"] for record in first if record.get("outcome") == NO_MEMORY]
        if short:
            for path in folder.glob("records-*"):
                path.unlink()
            statuses += run_jobs(1, time.time() + ALONE, only=short)
            first = [record for record in first if record.get("outcome") != NO_MEMORY] + records()
        staged = json.loads((folder / "staged.json").read_text())
    without_gpu = flashinfer_run.device_name() == "none"
    report: dict[str, Any] = {"environment": {} if without_gpu else gpu_environment(), **staged}
    report |= {"jobs": given.jobs, "seed": given.seed, "seconds": round(time.time() - began, 1), **summary(first)}
    return int(flashinfer_run.written(given, NAME, report, statuses))


def environment(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The environment of a process: the tests from ``folder``, our package from here."""
    variables = {"OMP_NUM_THREADS": "1", "FLASH_MLA_TESTS": json.dumps(settings)}
    return dict(flashinfer_run.around(FLASHINFER, ROOT, folder, **variables))


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by group of tests, why tests were refused, and the failures."""
    result: dict[str, Any] = flashinfer_run.summary(records)
    result["groups"] = result.pop("files")
    return result


if __name__ == "__main__":
    sys.exit(main())
