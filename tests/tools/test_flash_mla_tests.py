"""The driver of FlashMLA's own tests: what is packed, and what the report counts, over made-up tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).resolve().parents[2] / "tools" / "flash_mla_tests" / "run.py"
PARAMETERS = """
import dataclasses
import flash_mla
from cubin_runtime.errors import UsageError

@dataclasses.dataclass
class Parameters:
    {fields}

    def to_test_param(self): return self
"""
DENSE = (
    PARAMETERS.format(fields="h_kv: int = 1; s_q: int = 1; is_causal: bool = False; test_performance: bool = True")
    + """
def test_flash_mla(t):
    assert flash_mla.get_mla_metadata() and not t.test_performance
    if t.h_kv > 1: raise UsageError("heads", argument="k_cache")
    assert t.s_q == 1, "differs"

def main(dtype):
    several = [Parameters(h_kv=heads) for heads in (2, 3)]
    for t in [Parameters(), *several, Parameters(s_q=2, is_causal=True)]: test_flash_mla(t)
"""
)
SPARSE = (
    PARAMETERS.format(fields="d_qk: int = 576; extra_topk: int = None; num_runs: int = 10; seed: int = -1")
    + """
import torch

tries = []

def test_flash_mla(p):
    if p.d_qk == 512: raise UsageError("rows of 584 bytes", argument="kv_cache")
    tries.append(p)
    if p.seed == 1 and len(tries) > 1: raise torch.OutOfMemoryError("CUDA out of memory")
    print("printed")
    return type("Result", (), {"is_correct": p.num_runs == 0 and p.seed != 2})

def gen_testcase():
    return [Parameters(), Parameters(), Parameters(), Parameters(d_qk=512), Parameters(d_qk=512, extra_topk=64)]
"""
)


@pytest.mark.torch
def test_every_outcome_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    repository, staged = tmp_path / "repository", tmp_path / "staged.tar.xz"
    (repository / "tests" / "kernelkit").mkdir(parents=True)
    for name in ("lib", "quant", "ref", *(f"kernelkit/{part}" for part in ("__init__", "bench", "compare"))):
        (repository / "tests" / f"{name}.py").touch()
    for name in ("generate", "precision", "utils"):
        (repository / "tests" / "kernelkit" / f"{name}.py").touch()
    (repository / "tests" / "test_flash_mla_dense_decoding.py").write_text(DENSE)
    (repository / "tests" / "test_flash_mla_sparse_decoding.py").write_text(SPARSE)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    subprocess.run([sys.executable, str(RUN), "stage", str(repository), str(staged)], check=True)
    command = [sys.executable, str(RUN), "run", str(staged), "--out", str(tmp_path), "--jobs", "1"]
    around = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    assert done.returncode == 1, done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "flash_mla_tests.json").read_text())
    assert report["groups"] == {
        "dense": {"passed": 1, "failed": 1},
        "dense, several KV heads": {"refused": 2},
        "sparse, MODEL1 rows": {"refused": 1},
        "sparse, MODEL1 rows with an extra cache": {"refused": 1},
        "sparse, V3.2 rows": {"passed": 2, "failed": 1},
    }
    assert (report["collected"], report["sample"], report["ran"]) == (9, 9, 9)
    assert report["reasons"]["refused"] == {"k_cache: heads": 2, "kv_cache: rows of N bytes": 2}
    assert [failure["printed"] for failure in report["failures"]] == ["printed\n", ""]
