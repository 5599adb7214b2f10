"""The project's own files agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PINNED_TOOLS = r"(?:ruff|clang-format)==[\d.]+"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def prerequisites(path: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the check with only ``path`` to find programs in."""
    return subprocess.run(
        ["/bin/sh", str(ROOT / "tools" / "prerequisites.sh"), *arguments],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with little more than a shell has."""
    for program in ("uname", "id", "python3"):
        found = next(Path(d, program) for d in os.environ["PATH"].split(":") if Path(d, program).exists())
        (tmp_path / program).symlink_to(found)
    return tmp_path


def test_the_hooks_use_the_versions_of_the_dev_extra() -> None:
    hooks = set(re.findall(PINNED_TOOLS, read(".pre-commit-config.yaml")))
    assert hooks == set(re.findall(PINNED_TOOLS, read("pyproject.toml")))


def test_ci_runs_the_commands_that_contributing_names() -> None:
    steps = re.findall(r"^step (make .+)$", read(".ci/run"), re.MULTILINE)
    named = " ".join(read("CONTRIBUTING.md").split())
    assert steps
    assert [step for step in steps if f"`{step}`" not in named] == []


def test_every_target_of_the_makefile_is_explained_in_contributing() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", read("Makefile"), re.MULTILINE)
    shown = set(targets) - {"help", "prerequisites"}
    assert [target for target in shown if f"`make {target}`" not in read("CONTRIBUTING.md")] == []


def test_a_machine_with_everything_passes_in_silence() -> None:
    done = prerequisites(os.environ["PATH"], "python3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_lacks_is_named_with_one_line_that_installs_it(bare_path: Path) -> None:
    done = prerequisites(bare_path, "no-such-python")
    assert done.returncode == 1
    assert "'no-such-python' is not found" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "apt-get" in line]
    assert line.endswith("apt-get install -y git make python3 python3-venv gcc g++")


def test_the_missing_packages_alone_can_be_asked_for(bare_path: Path) -> None:
    done = prerequisites(bare_path, "--packages", "no-such-python")
    assert (done.returncode, done.stdout) == (0, "git make python3 python3-venv gcc g++\n")
