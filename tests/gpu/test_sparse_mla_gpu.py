"""Sparse MLA decode on a device against float64: lists with holes, lengths, formats of rows, graphs, bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, TensorView, plan_mla_decode
from cubin_runtime.testing.compare import assert_attention_close
from tests.attention.append_reference import merge_states_reference
from tests.gpu.decode_values import normal_bits
from tests.gpu.device_checks import assert_all_pass, assert_reported, assert_right_twice
from tests.gpu.graph_replays import replay_over
from tests.gpu.seeds import SEED
from tests.gpu.sparse_mla_cases import (
    FORMS,
    HOLES,
    LATENT,
    SparseMlaCase,
    SparseMlaHost,
    random_sparse_mla_case,
    sparse_mla_host,
    sparse_mla_reference,
)
from tests.gpu.sparse_mla_device import sparse_mla_on_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mla_backend")]

CHUNKS, CASES = 12, 30
PLAIN = SparseMlaCase()
# Heads of a kernel each, with as many query tokens as PLAIN has.
HEADS = (16, 32, 64)
# Formats of rows, with heads of a kernel each.
KERNELS = [("scaled_e4m3", heads) for heads in HEADS] + [("bf16", 16), ("bf16_nope", 16)]


def assert_case(runtime: Runtime, case: SparseMlaCase, rng: np.random.Generator) -> None:
    with sparse_mla_on_device(runtime, case, rng) as device:
        assert_right_twice(device)


@pytest.mark.parametrize("cache", list(FORMS))
@pytest.mark.parametrize("heads", [1, 2, 7, 8, 15, 16, 17, 32, 33, 64, 100, 128])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_head_count_matches_float64(
    runtime: Runtime, rng: np.random.Generator, cache: str, heads: int, batch_invariant: bool
) -> None:
    case = replace(PLAIN, cache=cache, heads=heads, sinks=heads % 2 == 0, holes="random")
    assert_case(runtime, replace(case, batch_invariant=batch_invariant), rng)
    assert_case(runtime, replace(case, width=3000, tokens=2, batch_invariant=batch_invariant), rng)


@pytest.mark.parametrize(("cache", "heads"), KERNELS)
@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_holes_anywhere_are_left_out(
    runtime: Runtime, rng: np.random.Generator, cache: str, heads: int, holes: str, batch_invariant: bool
) -> None:
    lens = (0, 1, 63, 64, 65, 127, 128, 129, 1999, 2000)
    case = SparseMlaCase(10, heads - 3, 2000, cache, lens, holes, batch_invariant=batch_invariant)
    assert_case(runtime, case, rng)
    assert_case(runtime, replace(case, lens=None, sinks=True, lse_sink=False, lse_base="e"), rng)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 8191, 32768])
def test_every_width_matches_float64(runtime: Runtime, rng: np.random.Generator, width: int) -> None:
    for heads in HEADS:
        assert_case(runtime, replace(PLAIN, width=width, heads=heads, holes="random"), rng)
    assert_case(runtime, replace(PLAIN, width=width, tokens=1, cache="bf16", batch_invariant=True), rng)


@pytest.mark.parametrize("tokens", [1, 2, 31, 64, 132, 133, 300])
@pytest.mark.parametrize(("cache", "heads"), KERNELS)
def test_every_token_count_matches_float64(
    runtime: Runtime, rng: np.random.Generator, tokens: int, cache: str, heads: int
) -> None:
    assert_case(runtime, replace(PLAIN, tokens=tokens, heads=heads, width=400, cache=cache, holes="tail"), rng)


def test_thousands_of_query_tokens_match_float64(runtime: Runtime, rng: np.random.Generator) -> None:
    assert_case(runtime, replace(PLAIN, tokens=4096, width=100, heads=20), rng)


@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("view", ["pages", "one head after", "one head before", "rows"])
@pytest.mark.parametrize("page_size", [1, 64, 48])
@pytest.mark.parametrize("heads", HEADS)
def test_every_form_of_the_cache_matches_float64(
    runtime: Runtime, rng: np.random.Generator, out_dtype: str, view: str, page_size: int, heads: int
) -> None:
    case = replace(PLAIN, heads=heads, out_dtype=out_dtype, view=view, page_size=page_size, byte_dtype="float8_e4m3fn")
    assert_case(runtime, replace(case, strided=True, device_scales=True, output_scale=-0.7), rng)
    if view != "rows" and page_size != 48 and heads == 16:
        assert_case(runtime, replace(case, page_gap=5, cache="bf16"), rng)


@pytest.mark.parametrize("spread", [0, 6, 12])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_scales_of_any_size(
    runtime: Runtime, rng: np.random.Generator, spread: int, batch_invariant: bool, heads: int
) -> None:
    # Queries look at rope columns alone: with such scales, a few latent columns would decide all scores.
    case = replace(PLAIN, heads=heads, spread=spread, blind=True, width=2048, batch_invariant=batch_invariant)
    assert_case(runtime, case, rng)
    assert_case(runtime, replace(case, tokens=40, width=200), rng)


@pytest.mark.parametrize("exponent", [-90, -30, 30, 90])
@pytest.mark.parametrize("heads", HEADS)
def test_one_row_of_other_magnitude(runtime: Runtime, rng: np.random.Generator, exponent: int, heads: int) -> None:
    case = replace(PLAIN, heads=heads, blind=True, width=1024, pool=64, out_dtype="bf16")
    host = sparse_mla_host(case, rng)
    scales = np.exp2(np.full(LATENT // 128, exponent)).astype(np.float32).view(np.uint8)
    slot = int(host.indices[0, 700])
    host.memory[slot // 64, slot % 64, LATENT : LATENT + 16] = scales
    with sparse_mla_on_device(runtime, case, rng, host) as device:
        assert_right_twice(device)


@pytest.mark.parametrize("scale", [2.0, -2.0])
@pytest.mark.parametrize(("cache", "heads"), KERNELS)
def test_large_logits_stay_finite(
    runtime: Runtime, rng: np.random.Generator, scale: float, cache: str, heads: int
) -> None:
    case = replace(PLAIN, scale=scale, heads=heads, cache=cache, sinks=True, with_lse=False, spread=0)
    assert_case(runtime, case, rng)


@pytest.mark.parametrize(("cache", "heads"), KERNELS)
def test_slots_outside_the_cache_are_holes_and_reported(
    runtime: Runtime, rng: np.random.Generator, cache: str, heads: int
) -> None:
    case = replace(PLAIN, cache=cache, heads=heads, outside=True, holes="random")
    with sparse_mla_on_device(runtime, case, rng) as device:
        assert_reported(device, "page id outside the pool")
        device.assert_right()


@pytest.mark.parametrize(("length", "words"), [(301, "over"), (2**31 - 1, "over"), (-1, "negative")])
def test_lengths_are_clamped_and_reported(runtime: Runtime, rng: np.random.Generator, length: int, words: str) -> None:
    with sparse_mla_on_device(runtime, replace(PLAIN, lens=(length, 7, 0, 300, 64)), rng) as device:
        assert_reported(device, words)
        device.assert_right()


def test_a_slot_that_occurs_twice_counts_twice(runtime: Runtime, rng: np.random.Generator) -> None:
    host = sparse_mla_host(replace(PLAIN, width=64), rng)
    host.indices[:, 32:] = host.indices[:, :1]
    with sparse_mla_on_device(runtime, replace(PLAIN, width=64), rng, host) as device:
        assert_right_twice(device)


@pytest.mark.parametrize("heads", HEADS)
def test_neighbouring_lists_of_draft_tokens(runtime: Runtime, rng: np.random.Generator, heads: int) -> None:
    """Requests with 1 to 8 query tokens whose lists mostly agree."""
    lens = [1, 8, 3, 1, 5]
    case = replace(PLAIN, tokens=sum(lens), heads=heads, width=700)
    host = sparse_mla_host(case, rng)
    starts = np.repeat(np.cumsum([0, *lens[:-1]]), lens)
    host.indices[:, :600] = host.indices[starts][:, :600]
    with sparse_mla_on_device(runtime, case, rng, host) as device:
        assert_right_twice(device)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cases_match_float64(runtime: Runtime, chunk: int) -> None:
    indices = range(chunk * CASES, (chunk + 1) * CASES)
    assert_all_pass(indices, lambda index: run_random(runtime, index), lambda index: drawn(index)[0])


def run_random(runtime: Runtime, index: int) -> None:
    case, rng = drawn(index)
    with sparse_mla_on_device(runtime, case, rng) as device:
        assert_right_twice(device)


def drawn(index: int) -> tuple[SparseMlaCase, np.random.Generator]:
    rng = np.random.default_rng((SEED, index))
    return random_sparse_mla_case(rng), rng


@pytest.mark.parametrize(("cache", "heads"), KERNELS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_replays_follow_lists_lengths_and_rows(
    runtime: Runtime, rng: np.random.Generator, cache: str, heads: int, batch_invariant: bool
) -> None:
    case = replace(PLAIN, tokens=6, heads=heads, width=900, cache=cache, lens=(900,) * 6, sinks=True)
    case = replace(case, batch_invariant=batch_invariant)
    contents = [
        sparse_mla_host(replace(case, lens=lens, holes=holes), rng)
        for lens, holes in (
            ((0, 1, 64, 65, 899, 900), "random"),
            ((900,) * 6, "most"),
            ((0,) * 6, "none"),
            ((5, 900, 3, 0, 700, 128), "tail"),
        )
    ]
    with sparse_mla_on_device(runtime, case, rng) as device:
        replay_over(runtime.driver, device, contents)


@pytest.mark.parametrize("cache", list(FORMS))
@pytest.mark.parametrize("heads", [8, 16, 24, 40, 128])
def test_a_query_token_has_the_same_bits_in_every_batch(
    runtime: Runtime, rng: np.random.Generator, cache: str, heads: int
) -> None:
    case = SparseMlaCase(9, heads, 2048, cache, holes="random", batch_invariant=True, sinks=True, pool=512)
    case = replace(case, lens=(*map(int, rng.integers(0, 2049, 8)), 1500))
    host = sparse_mla_host(case, rng)
    results: set[tuple[bytes, bytes]] = set()
    for order in ([8], [8, 0], [0, 1, 2, 8, 3], [*range(9)], [0] * 200 + [8]):
        part = _of_tokens(host, order)
        own = replace(case, tokens=len(order), lens=tuple(part.lens))
        with sparse_mla_on_device(runtime, own, rng, part) as device:
            device.run()
            out, lse = device.result()
            at = order.index(8)
            results.add((out[at].tobytes(), lse[at].tobytes()))
    assert len(results) == 1


def test_a_wider_list_with_the_same_length_has_the_same_bits(runtime: Runtime, rng: np.random.Generator) -> None:
    case = replace(PLAIN, tokens=2, width=1000, lens=(1000, 900), batch_invariant=True)
    host = sparse_mla_host(case, rng)
    wide = replace(host, indices=np.pad(host.indices, ((0, 0), (0, 3000)), constant_values=5))
    results = set()
    for own in (host, wide):
        with sparse_mla_on_device(runtime, replace(case, width=own.indices.shape[1]), rng, own) as device:
            device.run()
            results.add(device.result_bytes())
    assert len(results) == 1


def _of_tokens(host: SparseMlaHost, order: list[int]) -> SparseMlaHost:
    return replace(host, q=host.q[order], indices=host.indices[order], lens=host.lens[order])


@pytest.mark.parametrize(("tokens", "length"), [(3, 64), (132, 1000), (132, 4096)])
def test_a_list_of_all_keys_has_the_bits_of_dense_decode_if_neither_is_split(
    runtime: Runtime, rng: np.random.Generator, tokens: int, length: int
) -> None:
    # A power of two, since it is rounded before it is multiplied with log2(e), and dense decode's after that.
    case = SparseMlaCase(tokens, 16, length, "bf16", pool=length, page_size=64, scale=2.0**-4)
    host = sparse_mla_host(case, rng)
    host.indices[:] = np.arange(length)
    rows = normal_bits("bf16", rng, (*host.memory.shape[:2], case.columns))
    host.memory[:] = rows.view(np.uint8)
    with sparse_mla_on_device(runtime, case, rng, host) as device:
        assert [selection.cluster_size for selection in device.plan.selections] == [1]
        device.run()
        sparse = device.result_bytes()
        device.assert_right()
        device.poison()
        q, cache, _, out, lse = device.tensors
        pages = np.tile(np.arange(-(-length // 64), dtype=np.int32), (tokens, 1))
        table = TensorView.contiguous(device.arrays.upload(pages), "int32", pages.shape)
        lens = TensorView.contiguous(device.arrays.upload(np.full(tokens, length, np.int32)), "int32", (tokens,))
        dense: Any = {"max_seq_len": length, "softmax_scale": case.scale, "runtime": runtime}
        plan = plan_mla_decode(q, cache, table, lens, out, lse, **dense)
        plan.run(q, cache, table, lens, out, lse)
        runtime.driver.synchronize(0)
        assert device.result_bytes() == sparse


def test_ranks_that_have_parts_of_the_rows_merge(runtime: Runtime, rng: np.random.Generator) -> None:
    """Each of 8 ranks holds every eighth row; the others are holes of its lists."""
    case = replace(PLAIN, tokens=4, width=1024, sinks=True, lse_sink=False, out_dtype="fp16")
    host = sparse_mla_host(case, rng)
    outs, lses = [], []
    for rank in range(8):
        own = replace(host, indices=np.where(host.indices % 8 == rank, host.indices, -1), sinks=None)
        with sparse_mla_on_device(runtime, replace(case, sinks=False), rng, own) as device:
            device.run()
            out, lse = device.result()
            outs.append(out.view(np.float16).astype(np.float64))
            lses.append(lse)
    merged, _ = merge_states_reference(np.stack(outs, 1), np.stack(lses, 1), sinks=host.sinks, lse_base="2")
    assert_attention_close(merged, sparse_mla_reference(case, host)[0], dtype="float16", kv_dtype="float8_e4m3fn")
