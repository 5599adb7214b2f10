"""The stored mutations fit the code of today; ``make mutants`` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_stored_mutation_applies() -> None:
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--dry"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
