from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.mla.select import COLUMNS, MlaShape, invariant_splits, select_mla_decode
from tests.kernels.mla_examples import KERNELS, OTHER_COLUMNS, PORTABLE, WIDE
from tests.launch.examples import H100, device

SHAPE = MlaShape("bf16", 512, heads=128, batch=64, max_seq_len=4096)


@pytest.mark.parametrize(
    ("heads", "q_len", "rows"),
    [(16, 1, 16), (8, 1, 16), (1, 16, 16), (5, 3, 16), (17, 1, 64), (16, 2, 64), (11, 3, 64), (64, 1, 64)],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_few_rows_have_a_kernel_of_their_own(heads: int, q_len: int, rows: int, ragged: bool) -> None:
    chosen = select_mla_decode(KERNELS, replace(SHAPE, heads=heads, q_len=q_len, ragged=ragged), H100)
    assert chosen.kernel.traits["rows"] == rows
    assert chosen.row_tiles == -(-heads * q_len // rows)


@pytest.mark.parametrize(("heads", "rows", "together"), [(16, 16, 1), (32, 16, 2), (33, 64, 1)])
def test_beside_an_e4m3_cache_two_row_tiles_are_few(heads: int, rows: int, together: int) -> None:
    kernels = [replace(kernel, traits={**kernel.traits, "dtype": "e4m3"}) for kernel in KERNELS]
    chosen = select_mla_decode(kernels, replace(SHAPE, dtype="e4m3", heads=heads), H100)
    assert (chosen.kernel.traits["rows"], chosen.cta_group_size) == (rows, together)


@pytest.mark.parametrize("heads", [1, 16])
def test_under_batch_invariant_query_tokens_do_not_decide(heads: int) -> None:
    shapes = [replace(SHAPE, heads=heads, q_len=n, batch_invariant=True) for n in (1, 2, 16)]
    assert {select_mla_decode(KERNELS, shape, H100).kernel.traits["rows"] for shape in shapes} == {64}


def test_without_a_kernel_for_few_rows_the_others_take_them() -> None:
    assert select_mla_decode(WIDE, replace(SHAPE, heads=16), H100).kernel.traits["rows"] == 64


def test_a_pair_never_has_more_splits_than_the_kernels_can_merge() -> None:
    large = replace(H100, multiprocessors=600)
    chosen = select_mla_decode(KERNELS, replace(SHAPE, heads=128, batch=1, max_seq_len=1 << 20), large)
    assert chosen.ctas // chosen.cta_group_size == CONSTANTS.mla_max_splits


@pytest.mark.parametrize(
    ("max_seq_len", "ctas"),
    [(1024, 16), (4096, 32), (8192, 48), (1 << 14, 48), (1 << 15, 48), (1 << 16, 64), (1 << 17, 64)],
)
def test_a_single_request_of_few_rows_has_few_splits_whatever_its_bound(max_seq_len: int, ctas: int) -> None:
    assert select_mla_decode(KERNELS, replace(SHAPE, heads=16, batch=1, max_seq_len=max_seq_len), H100).ctas == ctas


def test_the_latent_width_decides() -> None:
    assert select_mla_decode(KERNELS, replace(SHAPE, latent=256), H100).kernel.traits["latent"] == 256


@pytest.mark.parametrize("q_dtype", ["bf16", "e4m3"])
def test_the_type_of_the_queries_decides_beside_an_e4m3_cache(q_dtype: str) -> None:
    narrow = [
        replace(kernel, name=f"{taken}_{kernel.name}", traits={**kernel.traits, "dtype": "e4m3", "q_dtypes": taken})
        for taken in ("bf16", "e4m3")
        for kernel in KERNELS
    ]
    chosen = select_mla_decode([*KERNELS, *narrow], replace(SHAPE, dtype="e4m3", q_dtype=q_dtype), H100)
    assert (chosen.kernel.traits["dtype"], chosen.kernel.traits["q_dtypes"]) == ("e4m3", q_dtype)


def test_queries_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(UsageError, match="queries are bf16"):
        select_mla_decode(KERNELS, replace(SHAPE, q_dtype="e4m3"), H100)


def test_the_grid_is_a_multiple_of_the_row_tiles_together() -> None:
    chosen = select_mla_decode(KERNELS, replace(SHAPE, batch=7, max_seq_len=100_000), H100)
    assert chosen.ctas % chosen.cta_group_size == 0


@pytest.mark.parametrize(("batch", "groups"), [(64, 64), (128, 64), (16, 64), (33, 66), (100, 66)])
def test_work_ranges_end_with_output_tiles_if_few_groups_idle(batch: int, groups: int) -> None:
    chosen = select_mla_decode(KERNELS, replace(SHAPE, batch=batch), H100)
    assert chosen.ctas // chosen.cta_group_size == groups


def test_one_team_in_twelve_may_idle() -> None:
    assert select_mla_decode(KERNELS, replace(SHAPE, heads=64, batch=121), H100).ctas == 121
    assert select_mla_decode(KERNELS, replace(SHAPE, heads=64, batch=120), H100).ctas == 132


def test_a_team_of_few_tiles_has_one_tile_and_of_many_two() -> None:
    ctas = [select_mla_decode(KERNELS, replace(SHAPE, batch=1, max_seq_len=n * 64), H100).ctas for n in (4, 64)]
    assert ctas == [8, 64]


def test_a_team_of_few_rows_has_as_many_tiles() -> None:
    ctas = [
        select_mla_decode(KERNELS, replace(SHAPE, heads=16, batch=1, max_seq_len=n * 64), H100).ctas for n in (4, 64)
    ]
    assert ctas == [4, 32]


@pytest.mark.parametrize(("q_len", "together"), [(1, 2), (2, 4), (3, 3), (16, 4)])
def test_no_cta_of_a_team_idles(q_len: int, together: int) -> None:
    assert select_mla_decode(KERNELS, replace(SHAPE, q_len=q_len), H100).cta_group_size == together


def test_one_row_tile_has_a_team_of_one() -> None:
    assert select_mla_decode(KERNELS, replace(SHAPE, heads=16), H100).cta_group_size == 1


def test_batch_invariant_splits_do_not_depend_on_the_batch() -> None:
    shapes = [replace(SHAPE, batch=batch, batch_invariant=True) for batch in (1, 7, 200)]
    assert len({select_mla_decode(KERNELS, shape, H100).splits for shape in shapes}) == 1


@pytest.mark.parametrize(("max_seq_len", "splits"), [(1, 1), (1024, 1), (1025, 2), (49 * 64, 4), (100_000, 4)])
def test_batch_invariant_splits_are_bounded_by_the_longest_request(max_seq_len: int, splits: int) -> None:
    shape = replace(SHAPE, max_seq_len=max_seq_len, batch_invariant=True)
    assert select_mla_decode(KERNELS, shape, H100).splits == splits


@pytest.mark.parametrize(
    ("heads", "batch", "slack", "spread", "start"),
    [(128, 64, 24, 12, 4), (128, 100, 24, 0, 4), (128, 48, 16, 8, 0), (128, 20, 4, 2, 0), (16, 132, 20, 10, 2)],
)
def test_with_a_request_for_each_group_its_start_counts(
    heads: int, batch: int, slack: int, spread: int, start: int
) -> None:
    chosen = select_mla_decode(KERNELS, replace(SHAPE, heads=heads, batch=batch), H100)
    assert (chosen.slack_tiles, chosen.spread_tiles, chosen.start_tiles) == (slack, spread, start)


@pytest.mark.parametrize("batch", [1, 48, 200])
def test_under_batch_invariance_the_start_of_a_request_counts_nothing(batch: int) -> None:
    chosen = select_mla_decode(KERNELS, replace(SHAPE, batch=batch, batch_invariant=True), H100)
    assert (chosen.slack_tiles, chosen.spread_tiles, chosen.start_tiles) == (0, 0, 0)


def test_without_batch_invariant_the_grid_cuts_the_pairs() -> None:
    assert select_mla_decode(KERNELS, SHAPE, H100).splits == 0


def test_splits_never_fall_with_the_tiles() -> None:
    counts = [invariant_splits(tiles) for tiles in range(1, 2000)]
    assert counts == sorted(counts)
    assert all(count <= tiles for tiles, count in enumerate(counts, 1))


def test_a_device_without_such_kernels_is_refused_with_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"compute capability 10\.0: mla_latent512_rows64_sm90a: built for sm_90a"):
        select_mla_decode(KERNELS, SHAPE, device(10, 0))


@pytest.mark.parametrize(("latent", "rope"), [(512, 0), (256, 32), (128, 32), (512, 64)])
def test_latent_and_rope_columns_decide(latent: int, rope: int) -> None:
    chosen = select_mla_decode([*OTHER_COLUMNS, *KERNELS], replace(SHAPE, latent=latent, rope=rope), H100)
    assert (chosen.kernel.traits["latent"], chosen.kernel.traits["rope"]) == (latent, rope)


def test_no_two_pairs_of_latent_and_rope_columns_make_rows_of_one_width() -> None:
    assert len({latent + rope for latent, rope in COLUMNS}) == len(COLUMNS)


def test_another_number_of_rope_columns_is_refused() -> None:
    with pytest.raises(UsageError, match="rope is 64"):
        select_mla_decode(KERNELS, replace(SHAPE, rope=32), H100)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype is bf16"):
        select_mla_decode(KERNELS, replace(SHAPE, dtype="e4m3"), H100)


E4M3 = replace(SHAPE, dtype="e4m3", q_dtype="e4m3")
OF_HOPPER = [replace(k, traits={**k.traits, "dtype": "e4m3", "q_dtypes": "e4m3"}) for k in KERNELS]


@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("latent", [512, 256])
@pytest.mark.parametrize(("heads", "batch_invariant"), [(16, False), (128, False), (128, True)])
def test_sm12x_has_the_portable_kernel(latent: int, minor: int, heads: int, batch_invariant: bool) -> None:
    shape = replace(E4M3, latent=latent, heads=heads, batch_invariant=batch_invariant)
    chosen = select_mla_decode([*OF_HOPPER, *PORTABLE], shape, device(12, minor))
    assert chosen.kernel.name == f"mla_portable_latent{latent}_sm120"
    assert "built for sm_120, built, not run; " in chosen.reason


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kernels", [[*OF_HOPPER, *PORTABLE], [*PORTABLE, *OF_HOPPER]], ids=["last", "first"])
def test_a_kernel_for_the_device_alone_precedes_a_portable_one(
    kernels: list[NativeKernel], heads: int, batch_invariant: bool
) -> None:
    chosen = select_mla_decode(kernels, replace(E4M3, heads=heads, batch_invariant=batch_invariant), H100)
    assert chosen.kernel.sm == "90a"


def test_the_portable_kernel_runs_on_hopper_too() -> None:
    assert select_mla_decode(PORTABLE, E4M3, H100).kernel.name == "mla_portable_latent512_sm90"


@pytest.mark.parametrize(
    ("types", "words"),
    [({"dtype": "bf16", "q_dtype": "bf16"}, "dtype is e4m3"), ({"q_dtype": "bf16"}, "queries are e4m3")],
)
def test_without_a_kernel_for_its_dtypes_sm120_names_its_kernels_alone(types: dict[str, str], words: str) -> None:
    said = f"capability 12.0: mla_portable_latent512_sm120: {words}; mla_portable_latent256_sm120: "
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        select_mla_decode([*OF_HOPPER, *PORTABLE], replace(E4M3, **types), device(12, 0))
    assert "sm90" not in str(caught.value)
