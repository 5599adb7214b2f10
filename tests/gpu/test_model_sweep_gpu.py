"""No causal model of transformers is wrong on our kernels, or ends in an error that is not ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SECONDS = 200


def test_every_causal_model_is_right_or_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "CUBIN_RUNTIME_CACHE": os.environ.get("CUBIN_RUNTIME_CACHE", str(tmp_path / "store"))}
    out = Path(os.environ.get("CUBIN_RUNTIME_GPU_OUT", tmp_path))
    options = ["--out", str(out.resolve()), "--seconds", str(SECONDS), "--workers", "8"]
    command = [sys.executable, "-m", "tests.gpu.model_sweep", *options]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=SECONDS + 90)
    models = json.loads((out / "transformers_models.json").read_text())["models"]
    bad = {kind: row["status"] for kind, row in models.items() if row["status"] in ("wrong", "failed", "not reached")}
    assert not bad
    assert sum(row["status"] == "right" for row in models.values()) > 150
