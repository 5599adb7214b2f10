"""The driver of vLLM's own tests: what is packed, whose backends they run, and what the report counts."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
from tests.integrations import absent_modules  # noqa: E402
from tests.integrations.vllm_steps import OF_THE_SERVER  # noqa: E402

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tools" / "vllm_tests" / "run.py"
DECODERS = """
import pytest
from vllm.transformers_utils.config import get_config

NON_CAUSAL_BACKENDS_TO_TEST = ["FLASH_ATTN"]

def _test_backend_correctness(spec, model, backends, causal=True):
    from cubin_runtime.errors import UsageError
    assert get_config(model, trust_remote_code=False).num_key_value_heads == 8
    (backend,) = backends
    assert backend.get_class().__name__ == "CubinRuntimeBackend"
    if not causal:
        raise UsageError("expected a causal step", argument="causal")
    assert spec != "wrong"

@pytest.mark.parametrize("spec", ["small", "wrong"])
def test_causal_backend_correctness(spec):
    _test_backend_correctness(spec, "meta-llama/Meta-Llama-3-8B", NON_CAUSAL_BACKENDS_TO_TEST)

def test_non_causal_backend_correctness():
    _test_backend_correctness("small", "meta-llama/Meta-Llama-3-8B", NON_CAUSAL_BACKENDS_TO_TEST, causal=False)

def test_of_another_function():
    pass
"""
DENSE_MLA = """
import pytest

BACKENDS_TO_TEST = SPEC_DECODE_BACKENDS = ["FLASHMLA"]
BACKEND_BLOCK_SIZES = {}

def test_backend_correctness():
    (backend,) = BACKENDS_TO_TEST
    assert backend.get_class().__name__ == "CubinRuntimeMlaBackend"
    assert BACKEND_BLOCK_SIZES[backend] in backend.get_class().get_supported_kernel_block_sizes()
    pytest.skip("no prefill")
"""
SPARSE_MLA = """
import pytest

@pytest.mark.parametrize("pages", [64])
@pytest.mark.parametrize("backend_cls", ["FLASHMLA_SPARSE", "FLASHINFER"])
def test_sparse_backend_decode_correctness(backend_cls, pages):
    assert backend_cls.__name__ == "CubinRuntimeSparseMlaBackend"
"""


def test_every_outcome_is_counted(tmp_path: Path) -> None:
    sources, staged = tmp_path / "vllm-1.0.tar.gz", tmp_path / "staged.tar.xz"
    texts = {"attention": DECODERS, "mla": DENSE_MLA, "sparse_mla": SPARSE_MLA}
    files = {f"test_{name}_backends.py": text for name, text in texts.items()} | {"utils.py": ""}
    with tarfile.open(sources, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"vllm-1.0/tests/v1/attention/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    subprocess.run([sys.executable, str(RUN), "stage", str(sources), str(staged)], check=True)
    command = [sys.executable, str(RUN), "run", str(staged), "--out", str(tmp_path), "--jobs", "2"]
    absent = Path(absent_modules.__file__)
    (tmp_path / absent.name).write_text(absent.read_text())
    (tmp_path / "sitecustomize.py").write_text(
        f"import atexit, absent_modules\nabsent = absent_modules.in_place_of(*{OF_THE_SERVER})\nabsent.__enter__()\n"
        "atexit.register(absent.__exit__, None, None, None)\n"
    )
    engine = [str(Path(entry).resolve()) for entry in os.environ["PYTHONPATH"].split(os.pathsep)]
    path = os.pathsep.join((str(tmp_path), str(ROOT), *engine))
    around = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert done.returncode == 1, done.stderr + logs
    report: dict[str, Any] = json.loads((tmp_path / "vllm_tests.json").read_text())
    assert report["tests"] == "vllm-1.0"
    assert report["functions"] == {
        "test_attention_backends.py: test_causal_backend_correctness": {"passed": 1, "failed": 1},
        "test_attention_backends.py: test_non_causal_backend_correctness": {"refused": 1},
        "test_mla_backends.py: test_backend_correctness": {"skipped": 1},
        "test_sparse_mla_backends.py: test_sparse_backend_decode_correctness": {"passed": 1},
    }, logs
    assert (report["collected"], report["sample"], report["ran"]) == (5, 5, 4)
    assert report["reasons"]["refused"] == {"causal: expected a causal step": 1}
    assert [failure["test"].rpartition("::")[2] for failure in report["failures"]] == ["[wrong]"]
