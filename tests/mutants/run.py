"""Run the stored mutations: ``make mutants``, or ``run.py --only TEXT`` for those whose file or name has it.

``--dry`` runs no test and only says which mutations do not apply.

``mutants.toml`` names for each a file, a text that occurs in it exactly once, what replaces it, and the tests that
must fail then, with ``torch = true`` where they need torch. Each runs in a copy of the package; the exit code is 1 if
one is not noticed or does not apply.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import tomli

ROOT = Path(__file__).parents[2]
COPIED = ("cubin_runtime", "kernels_src", "tests", "pyproject.toml")
SECONDS = 600
GOLDEN = "tests/golden/test_golden.py::test_the_driver_receives_what_was_recorded"


@dataclass(frozen=True)
class Mutant:
    """One mutation; ``tests`` is a file of tests, or ``golden[FAMILY-PART]`` for a part of the golden launches."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    torch: bool = False

    def mutated(self) -> str:
        """The text of the file with the mutation.

        Raises:
            ValueError: the old text is not there, or more than once.
        """
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"the old text occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def stored() -> list[Mutant]:
    """All mutations of ``mutants.toml``."""
    return [Mutant(**entry) for entry in tomli.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]]


def passes(copy: Path, tests: str, torch: bool) -> bool:
    """Whether the tests pass in a copy of the project, where they need torch in the environment that has it."""
    named = tests.replace("golden[", f"{GOLDEN}[")
    python = str(ROOT / ".venv-torch/bin/python") if torch else sys.executable
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", named]
    # A byte-compiled file is known by its time in seconds and its size, which a mutation may both keep.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{named}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def outcome(mutant: Mutant, copy: Path) -> str:
    """What came of one mutation in a copy that is not mutated before or after."""
    try:
        text = mutant.mutated()
    except (OSError, ValueError) as error:
        return f"does not apply: {error}"
    (copy / mutant.file).write_text(text)
    try:
        return "NOT NOTICED" if passes(copy, mutant.tests, mutant.torch) else "noticed"
    finally:
        shutil.copy(ROOT / mutant.file, copy / mutant.file)


def unfit(mutant: Mutant) -> str:
    """Why a mutation cannot be run, or nothing."""
    try:
        mutant.mutated()
    except (OSError, ValueError) as error:
        return f"{mutant.file}: {mutant.name}: does not apply: {error}"
    there = mutant.tests.startswith("golden[") or (ROOT / mutant.tests).is_file()
    return "" if there else f"{mutant.file}: {mutant.name}: no tests {mutant.tests}"


def report(bad: Iterable[str], good: str) -> int:
    """Print what is bad, else ``good``; the exit code."""
    found = list(bad)
    print("\n".join(found) or good)
    return int(bool(found))


def main() -> int:
    """Run them and say what came of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the name or file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry", action="store_true", help="only try whether they apply")
    given = parser.parse_args()
    chosen = [mutant for mutant in stored() if given.only in f"{mutant.file} {mutant.name}"]
    if given.dry:
        return report(filter(None, map(unfit, chosen)), f"{len(chosen)} mutations apply")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(given.jobs):
            for name in COPIED:
                take = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                (Path(folder) / str(job)).mkdir(exist_ok=True)
                take(ROOT / name, Path(folder) / str(job) / name)
            copies.put(Path(folder) / str(job))

        def run(mutant: Mutant | tuple[str, bool]) -> str:
            copy, begin = copies.get(), time.monotonic()
            try:
                if isinstance(mutant, tuple):
                    return "" if passes(copy, *mutant) else f"{mutant[0]}: fails without any mutation"
                said = outcome(mutant, copy)
            finally:
                copies.put(copy)
            print(f"{time.monotonic() - begin:5.1f} s  {said}: {mutant.file}: {mutant.name}", flush=True)
            return "" if said == "noticed" else f"{said}: {mutant.file}: {mutant.name}"

        bad = list(filter(None, pool.map(run, sorted({(mutant.tests, mutant.torch) for mutant in chosen}))))
        bad = bad or list(filter(None, pool.map(run, chosen)))
    return report(bad, f"{len(chosen)} mutations, all noticed")


if __name__ == "__main__":
    raise SystemExit(main())
