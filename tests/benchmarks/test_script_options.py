"""The GPU scripts parse their options with torch alone: the defaults can be read, and the help is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Only measuring needs triton.
RUN = """
import runpy, sys, types
testing = types.ModuleType("triton.testing")
testing.do_bench = testing.do_bench_cudagraph = None
sys.modules |= {"triton": types.ModuleType("triton"), "triton.testing": testing}
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "script",
    ["gpu_decode", "gpu_mla", "gpu_sparse_mla", "gpu_prefill", "gpu_engine_regime", "gpu_method_check"],
)
def test_a_script_says_its_options_and_how_many_rounds_it_takes(script: str) -> None:
    arguments = [str(BENCHMARKS), str(BENCHMARKS / f"{script}.py"), "--help"]
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "of a sequence (5)" in " ".join(done.stdout.split())
