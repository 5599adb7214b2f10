"""The runner of FlashInfer's tests, on a made-up FlashInfer and tests of its kind; and its references."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools.flashinfer_tests.parallel import for_ranks, merged
from tools.flashinfer_tests.run import summary
from tools.flashinfer_tests.sampling import sampled
from tools.flashinfer_tests.stage import main as stage

RUN = Path(__file__).parents[2] / "tools" / "flashinfer_tests" / "run.py"
PACKAGE = {
    "flashinfer/__init__.py": "from . import cascade, decode, utils\nfrom .jit import core\n",
    "flashinfer/cascade.py": "def merge_state(v_a, s_a, v_b, s_b): raise RuntimeError('the peer ran')\n",
    "flashinfer/decode.py": "class BatchDecodeWithPagedKVCacheWrapper: pass\n"
    "def trtllm_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, **more): raise RuntimeError('it ran')\n",
    "flashinfer/cute_dsl/__init__.py": "import cutlass\n",
    "flashinfer/cute_dsl/utils.py": "",
    "flashinfer/utils.py": "def get_compute_capability(_): return (7, 5)\ndef is_sm12x_supported(_): return False\n",
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/core.py": "class JitSpec:\n    def build_and_load(self): raise RuntimeError('it compiles')\n",
}
TESTS = """
import flashinfer, pytest
from tests.test_helpers.names import WORDS
from flashinfer.utils import get_compute_capability, is_sm12x_supported

pytestmark = pytest.mark.skipif(get_compute_capability("cuda")[0] not in [12], reason="needs SM120")

def test_passes():
    assert get_compute_capability("cuda")[0] == 10 and is_sm12x_supported("cuda")
    with pytest.raises(ValueError): flashinfer.cascade.merge_state(1, 2, 3, 4)

def test_is_refused():
    flashinfer.cascade.merge_state(1, 2, 3, 4)

def test_is_refused_in_other_words():
    with pytest.raises(ValueError, match=WORDS): flashinfer.cascade.merge_state(1, 2, 3, 4)

def test_fails():
    assert 1 == 2

def test_is_skipped():
    if get_compute_capability("cuda") == (10, 7): raise AssertionError
    pytest.skip("no such option")

def test_compiles():
    flashinfer.jit.core.JitSpec().build_and_load()

def test_stops_at_a_wrapper():
    with pytest.raises(ValueError): flashinfer.cascade.merge_state(1, 2, 3, 4)
    flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper(None, backend="trtllm-gen")

def test_calls_nothing_of_ours(): pass

@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (2, 1)])
def test_trtllm_batch_decode_mla_preallocated_out(tokens, batch):
    with pytest.raises(ValueError): pass

tries = []

def test_finds_memory_the_second_time():
    with pytest.raises(ValueError): flashinfer.cascade.merge_state(1, 2, 3, 4)
    tries.append(1)
    if len(tries) < 2: raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

def test_never_finds_memory(): raise RuntimeError("CUDA error: out of memory")

@pytest.mark.parametrize("backend", ["cute-dsl", "trtllm-native", "trtllm-gen", "xqa"])
def test_decodes_on_another_backend(backend):
    from flashinfer.cute_dsl.utils import is_cute_dsl_arch_supported
    from unittest.mock import patch
    import torch
    assert is_cute_dsl_arch_supported(10, 0)
    function, seen = flashinfer.decode.trtllm_batch_decode_with_kv_cache, []
    with patch.object(function, "called", lambda *args, **kwargs: seen.append((args, kwargs))):
        for _ in range(2): function(None, None, torch.full((4,), 7), backend=backend)
    (first, _), (second, given) = seen
    assert first[2] is second[2] and not first[2].any()
    assert given == {"backend": "xqa" if backend == "xqa" else "auto"}
"""


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of the made-up package and tests, packed as the real ones are."""
    wheel, repository = tmp_path / "flashinfer_python-0.0.1-py3-none-any.whl", tmp_path / "repository"
    with zipfile.ZipFile(wheel, "w") as opened:
        for name, text in PACKAGE.items():
            opened.writestr(name, text)
        opened.writestr("flashinfer/data/kernel.cu", "left out")
    for name in ("test_xqa.py", "test_trtllm_gen_block_sparse_decode.py", "test_other.py"):
        (repository / "tests" / "attention").mkdir(parents=True, exist_ok=True)
        (repository / "tests" / "attention" / name).write_text(TESTS)
    (repository / "tests" / "test_helpers").mkdir()
    (repository / "tests" / "test_helpers" / "names.py").write_text("WORDS = 'other words'\n")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v0.0.1"]):
        subprocess.run([*git, *arguments], check=True)
    into = tmp_path / "staged.tar.xz"
    monkeypatch.setattr(sys, "argv", ["stage", str(wheel), str(repository), "--tag", "v0.0.1", "--into", str(into)])
    stage()
    return into


@pytest.mark.torch
def test_every_outcome_is_counted(staged: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    command = [sys.executable, str(RUN), str(staged), "--out", str(tmp_path / "out"), "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report: dict[str, Any] = json.loads((tmp_path / "out" / "flashinfer_tests.json").read_text())
    counts = report["files"]["tests/attention/test_xqa.py"]
    assert {name: counts[name] for name in ("passed", "refused", "failed", "skipped", "untouched")} == {
        "passed": 7,
        "refused": 2,
        "failed": 2,
        "skipped": 4,
        "untouched": 1,
    }
    assert (report["tests"], report["collected"], report["ran"], list(report["files"])) == (
        "v0.0.1",
        16,
        12,
        ["tests/attention/test_xqa.py"],
    )
    assert [failure["test"].split("::")[1] for failure in report["failures"]] == [
        "test_fails",
        "test_trtllm_batch_decode_mla_preallocated_out[2-1]",
    ]
    assert counts["with the backend made auto"] == 3
    assert "assert 1 == 2" in report["failures"][0]["traceback"]
    assert report["reasons"]["failed"]["Failed: DID NOT RAISE ValueError"] == 1
    assert set(report["reasons"]["skipped"]) == {
        "no such option",
        "needs compiled kernels of FlashInfer",
        "out of memory",
        "expects errors about counters that native kernels do without",
    }
    assert done.returncode == 1


def test_a_sample_has_as_many_of_each_function_as_there_are() -> None:
    items = [f"a[{n}]" for n in range(3)] + [f"b[{n}]" for n in range(100)] + [f"c[{n}]" for n in range(50)]
    chosen = sampled(items, 63, 7, lambda item: item[0])
    assert [sum(item.startswith(group) for item in chosen) for group in "abc"] == [3, 30, 30]
    assert chosen == sorted(chosen, key=items.index)
    assert chosen == sampled(items, 63, 7, lambda item: item[0]) != sampled(items, 63, 8, lambda item: item[0])
    assert sampled(items, 1000, 7, lambda item: item[0]) == items


def test_tests_of_which_the_time_took_the_turn_are_not_counted_as_run() -> None:
    records = [{"test": "f::a", "outcome": "not run"}, {"test": "f::b", "outcome": "passed"}]
    found = summary(records)
    assert (found["ran"], found["total"]["not run"]) == (1, 1)


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("causal", "window"), [(True, -1), (True, 5), (False, -1)])
def test_the_paged_reference_is_attention(
    layout: str, causal: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tools.flashinfer_tests.references import PagedPrefill

    torch.manual_seed(0)
    lengths, q_lens, page = [21, 8], [3, 8], 8
    cache, pages = torch.randn(5, 2, page, 2, 16), [[4, 0, 2], [3]]
    q = torch.randn(sum(q_lens), 4, 16)
    wrapper = PagedPrefill(q, layout)
    starts, indices = torch.tensor([0, 3, 4]), torch.tensor([4, 0, 2, 3])
    wrapper.plan(
        torch.tensor([0, 3, 11]),
        starts,
        indices,
        torch.tensor([5, 8]),
        4,
        2,
        16,
        page,
        causal=causal,
        window_left=window,
    )
    given = cache.transpose(2, 3) if layout == "HND" else cache
    out, lse = wrapper.run(q, given, return_lse=True)
    begin = 0
    for length, q_len, table in zip(lengths, q_lens, pages, strict=True):
        k, v = (cache[table, which].flatten(0, 1)[:length].repeat_interleave(2, dim=1) for which in (0, 1))
        place = torch.arange(q_len)[:, None] + length - q_len
        keys = torch.arange(length)[None]
        seen = (~torch.tensor(causal) | (keys <= place)) & (torch.tensor(window < 0) | (keys >= place - window))
        rows = q[begin : begin + q_len]
        bias = torch.where(seen, 0.0, -math.inf)
        one = torch.nn.functional.scaled_dot_product_attention(
            rows.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=bias
        )
        torch.testing.assert_close(out[begin : begin + q_len], one.transpose(0, 1))
        scores = torch.einsum("qhd,khd->qhk", rows, k) / 4 + bias[:, None]
        torch.testing.assert_close(lse[begin : begin + q_len], torch.logsumexp(scores, -1) / math.log(2))
        begin += q_len


def test_groups_of_parallel_attention_fit_the_number_of_processes() -> None:
    written = '@parametrize("ulysses_size,ring_size", [(4, 1), (1, 4), (2, 2)])\n@parametrize("n", [4])'
    assert for_ranks(written, 2) == '@parametrize("ulysses_size,ring_size", [(1, 2), (2, 1)])\n@parametrize("n", [4])'
    assert for_ranks(written, 4) == written


def test_a_test_passed_if_it_did_on_every_rank() -> None:
    ranks = [
        {"outcomes": {"a": "passed", "b": "passed"}, "reasons": {}, "cubins": {"k": "1"}, "commit": "c"},
        {"outcomes": {"a": "passed", "b": "failed"}, "reasons": {"b": "why"}, "cubins": {}, "commit": "c"},
    ]
    ended = {"a": "passed", "b": "failed"}
    expected = {"outcomes": ended, "reasons": {"b": "why"}, "cubins": {"k": "1"}, "commit": "c"}
    assert merged(ranks) == expected
    assert merged(ranks[::-1])["outcomes"] == ended
