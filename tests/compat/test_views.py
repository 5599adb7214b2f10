"""Views that arguments are turned into: an FP4 output's rows of scales, a table of one column, latent caches, pools."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cubin_runtime.compat import flashinfer
from cubin_runtime.compat.flash_attn.tensors import column
from cubin_runtime.compat.flashinfer.outputs import output_of
from cubin_runtime.compat.flashinfer.xqa import _without_head
from cubin_runtime.errors import UsageError
from cubin_runtime.tensor import view_of
from tests.attention.host_tensors import memory_of_host_tensors
from tests.attention.trtllm_calls import MadeUpMemory

E4M3 = "float8_e4m3fn"
TOKENS, ROWS = 4, 130
tensor = MadeUpMemory().tensor


def fp4_output(first: int) -> Any:
    """The output of ``TOKENS`` tokens whose scales begin at row ``first`` of ``ROWS``."""
    out = flashinfer.FP4Tensor(tensor("uint8", TOKENS, 32, 64), tensor(E4M3, ROWS, 256), first)
    given = {"out_dtype": "nvfp4", "query": tensor(E4M3, TOKENS, 32, 128), "fp4_scale": 1.0, "o_sf_vec_size": None}
    runtime = SimpleNamespace(memory=MadeUpMemory())
    return output_of(SimpleNamespace(out=out, runtime=runtime, **given), (TOKENS, 32, 128), "bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 1, ROWS - TOKENS])
def test_scales_of_an_fp4_output_may_begin_at_any_row_with_room(first: int) -> None:
    scales = fp4_output(first).block_scales
    assert scales is not None
    assert (scales.first_token, scales.block) == (first, 16)


@pytest.mark.parametrize("first", [-1, ROWS - TOKENS + 1, ROWS + TOKENS])
def test_scales_of_an_fp4_output_lie_within_their_rows(first: int) -> None:
    with pytest.raises(UsageError, match=f"out.scale_start_index={first}: expected 4 rows from it within 130"):
        fp4_output(first)


def test_a_table_of_one_column_is_a_view_of_a_vector() -> None:
    view = column(replace(tensor("int32", 4), strides=(3,)), "cache_batch_idx")
    assert (view.shape, view.strides) == ((4, 1), (3, 1))


def test_a_latent_cache_of_several_heads_keeps_them() -> None:
    for shape in ((100, 2, 64, 576), (100, 2, 1, 576), (100, 64, 576)):
        view = tensor("bfloat16", *shape)
        assert _without_head(view, 64) is view
    for shape in ((100, 1, 64, 576), (100, 64, 1, 576)):
        assert _without_head(tensor("bfloat16", *shape), 64).shape == (100, 64, 576)


@pytest.mark.torch
@pytest.mark.parametrize("halves", [1, 2])
def test_a_pool_of_torch_is_divided_into_keys_and_values(halves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    memory_of_host_tensors(monkeypatch)
    caches: list[Any] = []
    monkeypatch.setattr("cubin_runtime.compat.flashinfer.page.append_kv", lambda *given, **_: caches.extend(given[2:4]))
    pool = torch.zeros(2, halves, 16, 8, 128, dtype=torch.bfloat16)
    new, numbers = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    flashinfer.append_paged_kv_cache(new, new, numbers, numbers, pool, numbers, numbers[:2], numbers[:1])
    # With one half, values are keys.
    addresses = [view_of(cache, "cache").pointer - pool.data_ptr() for cache in caches]
    assert addresses == [0, (halves - 1) * 2 * 16 * 8 * 128]
    assert {tuple(cache.shape) for cache in caches} == {(2, 16, 8, 128)}
