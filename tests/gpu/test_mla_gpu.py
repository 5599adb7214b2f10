"""The MLA kernels on a real device, against float64: edges, masks held exactly, extremes, clamping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.decode_compare import assert_close, assert_lse_close, assert_rounded
from tests.gpu.decode_values import bits_of, values_of
from tests.gpu.device_checks import assert_reported
from tests.gpu.mla_cases import MlaCase, assemble_mla, mla_host, mla_means, mla_means_of, mla_reference_of, mla_request
from tests.gpu.mla_device import mla_on_device
from tests.gpu.mla_random import COLUMNS, HEADS, OUT_DTYPES, PAGE_SIZES, SEPARATE_COLUMNS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mla_backend")]

SMALL = MlaCase((300, 17, 0, 128), 512)
RAGGED = MlaCase((300, 17, 64, 128), 512, q_lens=(2, 1, 3, 2), max_q_len=4)
LENGTHS = (300, 5, 0, 64, 1, 16, 129, 65)
EDGES = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1023, 1024)
TYPES = {
    "bf16": {},
    "e4m3 cache": {"kv_dtype": "e4m3"},
    "e4m3": {"kv_dtype": "e4m3", "q_dtype": "e4m3"},
    "e4m3, portable": {"kv_dtype": "e4m3", "q_dtype": "e4m3", "portable": True},
}
SEPARATE = {"kv_dtype": "e4m3", "q_dtype": "e4m3", "separate_values": True}
MODES = {"default": {}, "invariant": {"batch_invariant": True}} | {n: TYPES[n] for n in ("e4m3", "e4m3, portable")}


def columns_of(columns: tuple[int, int]) -> dict[str, int]:
    """Latent and rope columns as fields of a case."""
    return dict(zip(("latent", "rope"), columns, strict=True))


def assert_case(runtime: Runtime, wanted: MlaCase, rng: np.random.Generator) -> None:
    with mla_on_device(runtime, wanted, rng) as case:
        workspace = case.dirty_workspace()
        case.run(workspace=workspace)
        case.assert_right()
        case.plan.check(workspace)
        case.assert_zeroed(workspace)
        case.arrays.assert_guards()


def assert_means(runtime: Runtime, wanted: MlaCase, rng: np.random.Generator) -> None:
    """Run on zero queries, and compare the output with the means, except for its rounding and that of parts."""
    with mla_on_device(runtime, wanted, rng, mla_means(wanted, rng)) as case:
        workspace = case.dirty_workspace()
        case.run(workspace=workspace)
        out, lse = case.result()
        want, want_lse, of_parts = mla_means_of(wanted, case.host)
        assert_rounded(wanted, out[: len(want)], want, of_parts)
        assert_lse_close(lse[: len(want)], want_lse)
        case.plan.check(workspace)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_edge_lengths_match_float64(runtime: Runtime, rng: np.random.Generator, page_size: int, types: str) -> None:
    wanted = MlaCase(EDGES, 1024, page_size=page_size, **TYPES[types])
    assert_case(runtime, wanted, rng)
    assert_case(runtime, replace(wanted, q_len=3, mask="tree", batch_invariant=True), rng)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("heads", [*HEADS, 2, 63, 65, 100, 127])
def test_every_head_count_matches_float64(
    runtime: Runtime, rng: np.random.Generator, heads: int, columns: tuple[int, int], types: str
) -> None:
    wanted = replace(SMALL, heads=heads, **columns_of(columns), **TYPES[types])
    assert_case(runtime, wanted, rng)
    assert_case(runtime, replace(wanted, q_len=3, sinks=True, mask="any"), rng)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(
    ("heads", "q_len"), [(1, 1), (7, 1), (8, 2), (9, 1), (15, 1), (16, 1), (3, 5), (1, 16), (17, 1), (16, 2), (11, 3)]
)
def test_few_rows_match_float64(
    runtime: Runtime, rng: np.random.Generator, heads: int, q_len: int, columns: tuple[int, int], types: str
) -> None:
    wanted = MlaCase((3000, 64, 0, 129, 1, 65), 4096, heads=heads, q_len=q_len, mask="tree")
    wanted = replace(wanted, **columns_of(columns), **TYPES[types])
    assert_case(runtime, wanted, rng)
    ragged = replace(wanted, q_lens=(q_len, 0, q_len, 1, q_len, q_len), max_q_len=q_len, page_size=32, sinks=True)
    assert_case(runtime, replace(ragged, scale=-0.3, out_dtype="fp16", strided=True, device_scales=True), rng)
    # More pieces than CTAs, so that a CTA goes from one to the next.
    many = tuple(int(n) for n in rng.integers(0, 200, size=300))
    assert_case(runtime, replace(wanted, lengths=many, max_seq_len=200, page_size=128), rng)


@pytest.mark.parametrize("q_len", range(1, 17))
def test_every_query_length_matches_float64(runtime: Runtime, rng: np.random.Generator, q_len: int) -> None:
    assert_case(runtime, replace(SMALL, q_len=q_len), rng)
    assert_case(runtime, replace(SMALL, q_len=q_len, heads=5, mask="tree", sinks=True), rng)
    assert_case(runtime, replace(SMALL, q_len=q_len, heads=128, mask="any", kv_dtype="e4m3"), rng)
    for types in ("e4m3", "e4m3, portable"):
        assert_case(runtime, replace(SMALL, q_len=q_len, heads=100, mask="tree", **TYPES[types]), rng)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_dtype_matches_float64(
    runtime: Runtime, rng: np.random.Generator, types: str, out_dtype: str, batch_invariant: bool
) -> None:
    wanted = MlaCase((3000, 70), 4096, out_dtype=out_dtype, batch_invariant=batch_invariant, **TYPES[types])
    assert_case(runtime, wanted, rng)
    assert_case(runtime, replace(wanted, q_len=2, device_scales=True, output_scale=1.7, strided=True), rng)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize(("q_len", "heads"), [(1, 1), (1, 64), (2, 32), (3, 5), (16, 4), (7, 9), (16, 128), (5, 31)])
@pytest.mark.parametrize("mask", ["none", "chain", "tree", "any"])
def test_rows_see_what_their_mask_says(
    runtime: Runtime, rng: np.random.Generator, types: str, q_len: int, heads: int, mask: str
) -> None:
    wanted = MlaCase(LENGTHS, 300, heads=heads, q_len=q_len, mask=mask, out_dtype="fp16", **TYPES[types])
    assert_means(runtime, wanted, rng)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("mask", ["none", "any"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_ragged_rows_see_what_their_mask_says(
    runtime: Runtime, rng: np.random.Generator, types: str, mask: str, batch_invariant: bool
) -> None:
    wanted = MlaCase(
        LENGTHS,
        300,
        heads=24,
        q_lens=(3, 0, 16, 1, 7, 16, 2, 5),
        max_q_len=16,
        mask=mask,
        spare_tokens=3,
        out_dtype="fp16",
        batch_invariant=batch_invariant,
        **TYPES[types],
    )
    assert_means(runtime, wanted, rng)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("columns", [columns for columns in COLUMNS if columns[1] < 64])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_other_columns_match_float64(
    runtime: Runtime, rng: np.random.Generator, columns: tuple[int, int], types: str, batch_invariant: bool
) -> None:
    wanted = MlaCase(EDGES, 1024, batch_invariant=batch_invariant, **columns_of(columns), **TYPES[types])
    for heads, q_len in ((16, 1), (128, 1), (5, 4), (64, 8)):
        for page_size, out_dtype in ((32, "fp16"), (64, "bf16"), (128, "e4m3")):
            one = replace(wanted, heads=heads, q_len=q_len, page_size=page_size, out_dtype=out_dtype, mask="tree")
            assert_case(runtime, replace(one, strided=page_size == 32, sinks=page_size == 64), rng)
    # Splits that CTAs merge, and more work tiles than CTAs.
    assert_case(runtime, replace(wanted, lengths=(20_000, 7, 3000), max_seq_len=20_000, heads=128), rng)
    assert_case(runtime, replace(wanted, lengths=(9000, 130), max_seq_len=9000, heads=16), rng)
    many = tuple(int(n) for n in rng.integers(0, 200, size=300))
    assert_case(runtime, replace(wanted, lengths=many, max_seq_len=200, heads=96), rng)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_values_in_memory_of_their_own_match_float64(
    runtime: Runtime, rng: np.random.Generator, page_size: int, batch_invariant: bool
) -> None:
    wanted = MlaCase(EDGES, 1024, page_size=page_size, batch_invariant=batch_invariant, **SEPARATE)
    for heads, q_len, strided in ((1, 1, False), (16, 1, True), (128, 1, False), (5, 4, True), (64, 16, False)):
        one = replace(wanted, heads=heads, q_len=q_len, strided=strided, mask="tree", sinks=strided, nested=strided)
        assert_case(runtime, one, rng)
        assert_means(runtime, replace(one, out_dtype="fp16"), rng)
    # Splits that CTAs merge, and more work tiles than CTAs.
    assert_case(runtime, replace(wanted, lengths=(20_000, 7, 3000), max_seq_len=20_000, heads=128), rng)
    many = tuple(int(n) for n in rng.integers(0, 200, size=300))
    assert_case(runtime, replace(wanted, lengths=many, max_seq_len=200, heads=96), rng)


@pytest.mark.parametrize("types", [*TYPES, "values elsewhere"])
@pytest.mark.parametrize("columns", [columns for columns in COLUMNS if columns[1]])
@pytest.mark.parametrize("strided", [False, True])
def test_rope_columns_in_memory_of_their_own_match_float64(
    runtime: Runtime, rng: np.random.Generator, columns: tuple[int, int], types: str, strided: bool
) -> None:
    options = {**TYPES, "values elsewhere": SEPARATE}[types]
    if types == "values elsewhere" and columns != SEPARATE_COLUMNS:
        return
    wanted = MlaCase(EDGES, 1024, strided=strided, separate_rope=True, **columns_of(columns), **options)
    for heads, q_len in ((1, 1), (16, 1), (17, 1), (128, 1), (5, 3), (5, 4), (64, 16), (127, 2)):
        one = replace(wanted, heads=heads, q_len=q_len, mask="tree", sinks=strided, batch_invariant=strided)
        assert_case(runtime, one, rng)
        assert_means(runtime, replace(one, out_dtype="fp16"), rng)
    # Splits that CTAs merge, rows of one request in several work tiles of a CTA, and more work tiles than CTAs.
    assert_case(runtime, replace(wanted, lengths=(20_000, 7, 3000), max_seq_len=20_000, heads=128), rng)
    assert_case(runtime, replace(wanted, lengths=(9000, 130), max_seq_len=9000, heads=64, batch_invariant=True), rng)
    many = tuple(int(n) for n in rng.integers(0, 200, size=300))
    assert_case(runtime, replace(wanted, lengths=many, max_seq_len=200, heads=96), rng)
    ragged = {"q_lens": tuple(int(n) for n in rng.integers(0, 9, size=300)), "max_q_len": 12, "mask": "any"}
    assert_case(runtime, replace(wanted, lengths=many, max_seq_len=200, heads=5, **ragged), rng)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rope_columns_give_the_same_bits_wherever_they_lie(
    runtime: Runtime, rng: np.random.Generator, types: str, batch_invariant: bool
) -> None:
    for heads, q_len in ((16, 1), (5, 4), (128, 2)):
        wanted = replace(SMALL, heads=heads, q_len=q_len, batch_invariant=batch_invariant, **TYPES[types])
        host, results = mla_host(wanted, rng), []
        for apart in (False, True):
            with mla_on_device(runtime, replace(wanted, separate_rope=apart), rng, host) as case:
                case.run()
                results.append(case.result())
        for joined, apart in zip(*results, strict=True):
            np.testing.assert_array_equal(joined, apart)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_one_very_long_request_matches_float64(
    runtime: Runtime, rng: np.random.Generator, types: str, batch_invariant: bool
) -> None:
    assert_case(runtime, MlaCase((65536,), 65536, batch_invariant=batch_invariant, **TYPES[types]), rng)


@pytest.mark.parametrize("types", ["bf16", "e4m3, portable"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_one_long_request_beside_short_ones_matches_float64(
    runtime: Runtime, rng: np.random.Generator, types: str, batch_invariant: bool
) -> None:
    lengths = (20_000, *(int(n) for n in rng.integers(1, 200, size=30)))
    wanted = MlaCase(lengths, 20_000, heads=8, batch_invariant=batch_invariant, q_len=2, **TYPES[types])
    assert_case(runtime, wanted, rng)


@pytest.mark.parametrize("types", ["bf16", "e4m3, portable"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_requests_than_ctas_match_float64(
    runtime: Runtime, rng: np.random.Generator, types: str, batch_invariant: bool
) -> None:
    lengths = tuple(int(n) for n in rng.integers(0, 70, size=600))
    wanted = MlaCase(lengths, 96, heads=4, page_size=32, batch_invariant=batch_invariant, **TYPES[types])
    assert_case(runtime, wanted, rng)
    q_lens = tuple(int(n) for n in rng.integers(0, 9, size=600))
    assert_case(runtime, replace(wanted, q_lens=q_lens, max_q_len=12, mask="any"), rng)


@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("batch", "mean"), [(60, 500), (150, 400), (200, 100)])
def test_ranges_of_short_and_long_requests_match_float64(
    runtime: Runtime, rng: np.random.Generator, batch: int, mean: int, heads: int, types: str
) -> None:
    lengths = tuple(min(3_000, int(n)) for n in rng.exponential(mean, size=batch))
    wanted = MlaCase(lengths, 3_000, heads=heads, **TYPES[types])
    assert_case(runtime, wanted, rng)
    q_lens = tuple(int(n) for n in rng.integers(0, 3, size=batch))
    assert_case(runtime, replace(wanted, q_lens=q_lens, max_q_len=2, mask="any"), rng)


@pytest.mark.parametrize("types", ["bf16", "e4m3, portable"])
def test_an_fp8_output_saturates(runtime: Runtime, rng: np.random.Generator, types: str) -> None:
    wanted = replace(SMALL, out_dtype="e4m3", output_scale=5000.0, **TYPES[types])
    with mla_on_device(runtime, wanted, rng) as case:
        case.run()
        out, lse = case.result()
        sizes = out & 0x7F
        assert (sizes <= 0x7E).all()
        assert (sizes == 0x7E).any()
        assert_close(wanted, (out, lse), case.expected, wanted.of_scores)


@pytest.mark.parametrize("types", ["bf16", "e4m3, portable"])
@pytest.mark.parametrize("scale", [2.0, -2.0, 0.0])
def test_large_logits_stay_finite(runtime: Runtime, rng: np.random.Generator, scale: float, types: str) -> None:
    # Products of 576 columns reach hundreds.
    wanted = replace(SMALL, scale=scale, sinks=True, q_len=2, with_lse=False, **TYPES[types])
    assert_case(runtime, wanted, rng)


@pytest.mark.parametrize("types", ["bf16", "e4m3, portable"])
def test_scales_on_the_device_are_read_at_each_launch(runtime: Runtime, rng: np.random.Generator, types: str) -> None:
    with mla_on_device(runtime, replace(SMALL, device_scales=True, **TYPES[types]), rng) as case:
        for scale, factor in ((0.1, 1.0), (0.05, -2.0)):
            case.driver.copy_to_device(case.options["softmax_scale"].pointer, np.array([scale], np.float32))
            case.driver.copy_to_device(case.options["output_scale"].pointer, np.array([factor], np.float32))
            case.poison()
            case.run()
            wanted = replace(case.case, scale=scale, output_scale=factor)
            assert_close(wanted, case.result(), mla_reference_of(wanted, case.host), wanted.of_scores)


def test_a_smaller_bound_and_other_scales_for_one_step(runtime: Runtime, rng: np.random.Generator) -> None:
    with mla_on_device(runtime, SMALL, rng) as case:
        case.run(max_seq_len=300, softmax_scale=0.05, output_scale=2.0)
        wanted = replace(SMALL, scale=0.05, output_scale=2.0)
        assert_close(wanted, case.result(), mla_reference_of(wanted, case.host))


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ((513, 17, 0, 128), "over max_seq_len"),
        ((2**31 - 1, 17, 0, 128), "over max_seq_len"),
        ((300, -5, 0, 128), "negative"),
        ((300, -(2**31), 0, 128), "negative"),
    ],
)
def test_lengths_are_clamped_and_reported(
    runtime: Runtime, rng: np.random.Generator, lengths: tuple[int, ...], words: str, mode: str
) -> None:
    clamped = tuple(min(max(n, 0), SMALL.max_seq_len) for n in lengths)
    with mla_on_device(runtime, replace(SMALL, lengths=clamped, **MODES[mode]), rng) as case:
        case.driver.copy_to_device(case.tensors[3].pointer, np.asarray(lengths, dtype=np.int32))
        assert_reported(case, words)
        case.assert_right()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("page", [1 << 30, -7, -1, 2**31 - 1, -(2**31), "past the last"])
def test_page_ids_outside_the_pool_are_never_followed(
    runtime: Runtime, rng: np.random.Generator, page: int | str, mode: str
) -> None:
    wanted = replace(SMALL, q_len=2, **MODES[mode])
    with mla_on_device(runtime, wanted, rng) as case:
        table = case.host.page_table.copy()
        table[0, 1] = table[1, 0] = len(case.host.pool) if isinstance(page, str) else page
        case.driver.copy_to_device(case.tensors[2].pointer, table)
        assert_reported(case, "page id")
        # The other requests are what they are.
        out, lse = case.result()
        want, want_lse = case.expected
        assert_close(wanted, (out[4:], lse[4:]), (want[4:], want_lse[4:]), wanted.of_scores)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "sums",
    [
        (0, 2, 1, 6, 8),  # decreasing
        (0, 5, 5, 6, 8),  # more than the bound
        (-3, 2, 3, 6, 8),  # before the first token
        (0, 2, 3, 6, 9),  # past the last token
        (0, 2, 3, 6, 2**31 - 1),
        (0, 2, 3, -(2**31), 8),
    ],
)
def test_query_sums_are_clamped_and_reported(
    runtime: Runtime, rng: np.random.Generator, sums: tuple[int, ...], mode: str
) -> None:
    with mla_on_device(runtime, replace(RAGGED, **MODES[mode]), rng) as case:
        cu = case.options["q_cu_seq_lens"].pointer
        case.driver.copy_to_device(cu, np.asarray(sums, dtype=np.int32))
        assert_reported(case, "q_cu_seq_lens|quer")
        # What was wrong leaves no trace.
        case.driver.copy_to_device(cu, case.host.q_cu_seq_lens)
        case.poison()
        case.run()
        case.plan.check(case.plan.prepare(0))
        case.assert_right()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 3e4, 1e30])
def test_queries_of_any_magnitude_beside_an_e4m3_cache(runtime: Runtime, rng: np.random.Generator, size: float) -> None:
    # Beyond what fp16 holds; the softmax scale brings the scores back.
    wanted = replace(SMALL, kv_dtype="e4m3", scale=192**-0.5 / size)
    host = mla_host(wanted, rng)
    q = bits_of("bf16", values_of("bf16", host.q) * np.float32(size))
    with mla_on_device(runtime, wanted, rng, replace(host, q=q)) as case:
        case.run()
        case.assert_right()


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-20, 2.0**20, 2.0**100])
@pytest.mark.parametrize(("heads", "batch_invariant"), [(16, False), (128, False), (128, True)])
def test_values_of_any_magnitude_in_parts(
    runtime: Runtime, rng: np.random.Generator, heads: int, batch_invariant: bool, size: float
) -> None:
    # Parts are fp16 on their way to each other. One request's values are as drawn; queries look at rope columns alone.
    wanted = MlaCase((3000, 2000), 3000, heads=heads, batch_invariant=batch_invariant)
    requests = [mla_request(wanted, rng, kv_len, 1) for kv_len in wanted.lengths]
    for request, factor in zip(requests, (1.0, size), strict=True):
        request.q[..., : wanted.latent] = 0
        values = request.kv[:, : wanted.latent]
        values[:] = bits_of("bf16", values_of("bf16", values) * np.float32(factor))
    with mla_on_device(runtime, wanted, rng, assemble_mla(wanted, requests, rng)) as case:
        case.run()
        case.assert_right()
