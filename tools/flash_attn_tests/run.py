"""FlashAttention-3's own forward tests on our names: a seeded sample, several processes, one JSON.

    python tools/flash_attn_tests/run.py stage REPOSITORY STAGED [--commit HEAD] [--site FOLDER]
    python tools/flash_attn_tests/run.py run STAGED --out OUT [--sample 2000] [--seed 0] [--jobs 6] [--seconds 120]

``REPOSITORY`` is a clone of flash-attention, with or without a work tree; ``--site`` a folder with einops, where the
machine with the GPU lacks it. Nothing of it belongs into this repository. ``OUT/flash_attn_tests.json`` says for each
test function how many passed, failed or were refused, why, and which failed. The exit status is 1 if a test failed or
fewer than ``--at-least`` ran. ``--collect`` lists the sample, ``--only TEXT`` is pytest's ``-k``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLASHINFER = HERE.parent / "flashinfer_tests"
sys.path.insert(0, str(FLASHINFER))  # whose modules have the names of ours

import run as flashinfer_run  # type: ignore[import-not-found]  # noqa: E402

NAME = "flash_attn_tests"
TEST = "test_flash_attn.py"
FILES = {
    f"hopper/{TEST}": TEST,
    "hopper/test_util.py": "test_util.py",
    "hopper/padding.py": "padding.py",
    "flash_attn/layers/rotary.py": "flash_attn/layers/rotary.py",
    "flash_attn/ops/triton/rotary.py": "flash_attn/ops/triton/rotary.py",
}
PACKAGES = ("flash_attn", "flash_attn/layers", "flash_attn/ops", "flash_attn/ops/triton")
RAN = ("passed", "passed in part", "failed", "refused")


def main() -> int:
    """Stage the tests, or run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    staging = verbs.add_parser("stage")
    staging.add_argument("repository", type=Path)
    staging.add_argument("staged", type=Path)
    staging.add_argument("--commit", default="HEAD")
    staging.add_argument("--site", type=Path)
    running = verbs.add_parser("run")
    flashinfer_run.add_options(running, sample=2000, at_least=1000, jobs=6, seconds=120)
    given = parser.parse_args()
    return stage(given) if given.verb == "stage" else run(given)


def stage(given: argparse.Namespace) -> int:
    """Pack the test files of a commit."""
    from stage import add, git, without_caches

    commit = git(given.repository, "rev-parse", given.commit).decode().strip()
    with tarfile.open(given.staged, "w:xz") as archive:
        add(archive, "staged.json", json.dumps({"tests": commit}).encode())
        for path, to in FILES.items():
            add(archive, to, git(given.repository, "show", f"{commit}:{path}"))
        for package in PACKAGES:
            add(archive, f"{package}/__init__.py", b"")
        if given.site:
            archive.add(given.site, ".", filter=without_caches)
    return 0


def run(given: argparse.Namespace) -> int:
    """Run the tests and write the report."""
    command = flashinfer_run.pytest_command(given, TEST)
    return int(flashinfer_run.run_staged(given, NAME, command, environment, summary))


def environment(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The environment of a process: the tests from ``folder``, our package from here."""
    variables = {"OMP_NUM_THREADS": "1", "FLASH_ATTENTION_DISABLE_BACKWARD": "TRUE"}
    variables["FLASH_ATTN_TESTS"] = json.dumps(settings)
    return dict(flashinfer_run.around(HERE, FLASHINFER, ROOT, folder, **variables))


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by test function, why tests were refused or skipped, and the failures."""
    for record in records:
        if "test" in record:  # the function in the place of the file
            record["test"] = record["test"].partition("::")[2].replace("[", "::[", 1)
    result: dict[str, Any] = flashinfer_run.summary(records)
    result["functions"] = result.pop("files")
    for counts in result["functions"].values():
        counts["with 16-bit queries for e4m3"] = counts.pop("with the backend made auto", 0)
    result["total"]["with 16-bit queries for e4m3"] = result["total"].pop("with the backend made auto", 0)
    parts = [record for record in records if record.get("outcome") == "passed in part"]
    in_part = Counter(re.sub(r"\d+", "N", record["reason"])[:160] for record in parts)
    result["reasons"]["passed in part"] = dict(in_part.most_common(40))
    result["ran"] = sum(result["total"].get(outcome, 0) for outcome in RAN)
    return result


if __name__ == "__main__":
    sys.exit(main())
