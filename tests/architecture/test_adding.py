"""What docs/contributing/adding.md says of adding a kernel family or an optional tensor, kept true by patches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels_src.kernel_cache import VARIABLE, kernel_cache

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "contributing" / "adding.md").read_text()
PIN = "cubin_runtime/artifacts/pins/pins.toml"  # of the release with the new kernel, which no toy gets
# Files, the pin included, and changes in the package: the most that there may be.
MOST_FILES = {"kernel_family": 10, "optional_tensor": 3}
MOST_HUNKS = {"optional_tensor": 9}


def touched(patch: Path) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE))


def files_of(section: str) -> set[str]:
    """All files that the change touches, the pin among them."""
    return touched(HERE / f"{section}.patch") | {PIN}


def hunks_of(section: str) -> int:
    return len(re.findall(r"^@@ ", (HERE / f"{section}.patch").read_text(), re.MULTILINE))


def listed(section: str) -> set[str]:
    """The files of a list in the page, with the toy's name in place of FAMILY."""
    text = PAGE.split(f"<!-- files: {section} -->")[1].split("<!-- end -->")[0]
    return {
        name.replace("FAMILY", "toy").replace("OPERATOR", "toy_decode") for name in re.findall(r"`(\S+/\S+)`", text)
    }


@pytest.mark.parametrize("section", MOST_FILES)
def test_only_the_listed_files_are_touched(section: str) -> None:
    assert touched(HERE / f"{section}.patch") == listed(section)


@pytest.mark.parametrize("section", MOST_FILES)
def test_few_files_are_touched(section: str) -> None:
    assert len(files_of(section)) == MOST_FILES[section]


@pytest.mark.parametrize("section", MOST_HUNKS)
def test_few_places_change(section: str) -> None:
    assert hunks_of(section) == MOST_HUNKS[section]


@pytest.mark.parametrize("section", MOST_FILES)
def test_what_the_patch_adds_runs(section: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for folder in ("cubin_runtime", "kernels_src", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(HERE / f"{section}.patch")], cwd=copy, check=True)
    command = [sys.executable, "-m", "tests.architecture.run_added", section, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(copy), VARIABLE: str(kernel_cache().folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=copy)
    assert done.returncode == 0, done.stderr
