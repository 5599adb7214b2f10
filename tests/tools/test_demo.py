"""``make demo`` without a GPU: a story of a page, and details on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels_src.toolchain import ToolchainError, find_toolchain

DEMO = Path(__file__).parents[2] / "tools" / "demo.py"


def shown(tmp_path: Path, **settings: str) -> list[str]:
    try:
        find_toolchain()
    except ToolchainError as error:
        pytest.skip(str(error))
    known = {name: value for name, value in os.environ.items() if not name.startswith(("CUBIN_RUNTIME", "DEMO"))}
    environment = {**known, "XDG_CACHE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), **settings}
    done = subprocess.run([sys.executable, str(DEMO)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_story_is_a_page_that_begins_with_what_it_does_and_ends_with_what_to_try(tmp_path: Path) -> None:
    lines = shown(tmp_path)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("This demo takes two attention kernels")
    assert lines[-6] == "What to try next"
    assert sum(line.startswith(tuple("12345678")) for line in lines) == 8


def test_details_come_on_request(tmp_path: Path) -> None:
    lines = shown(tmp_path, DEMO="full")
    assert any("softmax_scale_log2" in line for line in lines)
    assert any("registers, 0 bytes spilled" in line for line in lines)
