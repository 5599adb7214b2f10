from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.prefill.select import ContextShape, select_context_attention, select_context_launches
from tests.kernels.context_examples import KERNELS
from tests.launch.examples import H100, device

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
SHAPE = ContextShape("bf16", "bf16", 128, group=4, kv_heads=8, batch=1, tokens=8192, max_seq_len=8192)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("soft_cap", [False, True])
@pytest.mark.parametrize("e4m3", [False, True])
def test_dtypes_head_dim_and_soft_cap_decide_the_kernel(dtype: str, head_dim: int, soft_cap: bool, e4m3: bool) -> None:
    kv_dtype = "e4m3" if e4m3 else dtype
    shape = replace(SHAPE, dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim, soft_cap=soft_cap)
    traits = select_context_attention(KERNELS, shape, H100).kernel.traits
    names = ("dtype", "kv_dtype", "head_dim", "soft_cap")
    assert tuple(traits[name] for name in names) == (dtype, kv_dtype, head_dim, soft_cap)


@pytest.mark.parametrize("q_len", [1, 7, 64, 500, 1000, 3001])
@pytest.mark.parametrize("keys", [1, 40, 500, 1000, 5000])
@pytest.mark.parametrize("splits", [0, 3])
def test_key_tiles_are_those_of_each_row_tile(q_len: int, keys: int, splits: int) -> None:
    shape = replace(SHAPE, batch=3, tokens=3 * q_len, max_seq_len=keys)
    chosen = replace(select_context_attention(KERNELS, shape, H100), splits=splits)
    rows, tile = int(chosen.kernel.traits["rows"]) // chosen.packed, int(chosen.kernel.traits["tile_tokens"])
    ends = [keys - q_len + min(first + rows, q_len) for first in range(0, q_len, rows)]
    tiles = [math.ceil(max(0, end) / tile) for end in ends]
    each = max(sum(tiles) * 3 * shape.head_packs / chosen.ctas, max(tiles))
    assert chosen.key_tiles(shape) == (math.ceil(max(tiles) / splits) if splits else each)


def test_the_longest_prompt_is_planned_without_a_list_of_its_tiles() -> None:
    most = (1 << 31) - 1
    shape = replace(SHAPE, tokens=most, max_seq_len=most)
    assert select_context_attention(KERNELS, shape, H100).key_tiles(shape) > 1 << 40


def test_twice_as_many_keys_of_half_the_size_stay_in_l2() -> None:
    shape = replace(SHAPE, kv_dtype="e4m3", max_seq_len=16384, tokens=16384)
    assert (shape.section_packs(132, 128), replace(shape, kv_dtype="bf16").section_packs(132, 128)) == (8, 4)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("soft_cap", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_only_batch_invariant_takes_segments(head_dim: int, soft_cap: bool, batch_invariant: bool) -> None:
    shape = replace(SHAPE, head_dim=head_dim, soft_cap=soft_cap, batch_invariant=batch_invariant)
    chosen = select_context_attention(KERNELS, shape, H100)
    assert chosen.kernel.traits["segments"] == batch_invariant
    assert ("segments of 512 keys, as in decode" in chosen.reason) == batch_invariant


@pytest.mark.parametrize("head_dim", [192, 256])
def test_other_head_dims_have_no_segments(head_dim: int) -> None:
    chosen = select_context_attention(KERNELS, replace(SHAPE, head_dim=head_dim, batch_invariant=True), H100)
    assert (chosen.kernel.traits["segments"], "segments" in chosen.reason) == (False, False)


def test_a_release_without_segments_is_refused_by_batch_invariant() -> None:
    kernels = [kernel for kernel in KERNELS if not kernel.traits.get("segments")]
    with pytest.raises(UsageError, match="it has no segments"):
        select_context_attention(kernels, replace(SHAPE, batch_invariant=True), H100)


@pytest.mark.parametrize(
    ("group", "packed"), [(1, 1), (2, 2), (3, 1), (4, 4), (5, 1), (6, 2), (7, 1), (12, 4), (16, 16), (48, 16), (64, 64)]
)
def test_as_many_heads_are_packed_as_is_a_power_of_two_that_divides_the_group(group: int, packed: int) -> None:
    shape = replace(SHAPE, group=group)
    assert shape.packed == packed
    assert shape.head_packs * packed == group * 8


def test_every_row_tile_of_ragged_requests_is_counted() -> None:
    # 8 requests of 1 token each take a row tile each, the last one all that is left.
    chosen = select_context_attention(KERNELS, replace(SHAPE, batch=9, tokens=8 + 320), H100)
    assert chosen.row_tiles >= 8 + 320 * 4 // 128


@pytest.mark.parametrize(("tokens", "ctas"), [(1, 8), (8192, 132)])
def test_the_grid_is_one_cta_per_multiprocessor_or_fewer(tokens: int, ctas: int) -> None:
    assert select_context_attention(KERNELS, replace(SHAPE, tokens=tokens), H100).ctas == ctas


@pytest.mark.parametrize(("max_seq_len", "packs"), [(1024, 8), (8192, 8), (16384, 4), (1 << 20, 1)])
def test_keys_of_interleaved_head_packs_fit_into_l2_if_work_tiles_are_many(max_seq_len: int, packs: int) -> None:
    shape = replace(SHAPE, max_seq_len=max_seq_len, tokens=max_seq_len)
    assert select_context_attention(KERNELS, shape, H100).section_packs == packs


@pytest.mark.parametrize(
    ("kv_heads", "tokens", "packs"),
    # MHA whose head packs have few work tiles: all interleaved, or about equal sections, or what L2 holds.
    [(16, 2048, 16), (16, 8192, 16), (16, 16384, 8), (128, 8192, 16), (128, 2048, 22)],
)
def test_sections_have_work_tiles_enough_that_ctas_end_together(kv_heads: int, tokens: int, packs: int) -> None:
    shape = replace(SHAPE, head_dim=192, group=1, kv_heads=kv_heads, tokens=tokens, max_seq_len=tokens)
    assert select_context_attention(KERNELS, shape, H100).section_packs == packs


def test_the_selection_says_what_it_does() -> None:
    facts = dict(select_context_attention(KERNELS, SHAPE, H100).facts(SHAPE))
    assert facts["row tiles"] == "at most 257 of 128 rows: 32 tokens x 4 heads"
    assert facts["order"] == "longest request first; 8 of 8 head packs interleaved"
    assert facts["predicted"].startswith("887.4 us on an H200: ")


def test_the_prediction_is_near_what_was_measured() -> None:
    measured = json.loads((RESULTS / "prefill_single.json").read_text())
    heads = {64: (4, 8), 128: (4, 8), 192: (1, 16), 256: (4, 4)}
    compared = 0
    for row in measured["rows"]:
        if found := re.fullmatch(r"causal D (\d+) S (\d+)", row["case"]):
            head_dim, length = map(int, found.groups())
            group, kv_heads = heads[head_dim]
            sizes = {
                "head_dim": head_dim,
                "group": group,
                "kv_heads": kv_heads,
                "tokens": length,
                "max_seq_len": length,
            }
            shape = replace(SHAPE, batch=1, **sizes)
            predicted = select_context_attention(KERNELS, shape, H100).predicted_us(shape)
            assert predicted == pytest.approx(row["us"]["ours"], rel=0.15), row["case"]
            compared += 1
    assert compared == 12


def test_one_long_work_tile_is_predicted_whole() -> None:
    shape = replace(SHAPE, batch=1, tokens=1, max_seq_len=1 << 17)
    assert select_context_attention(KERNELS, shape, H100).key_tiles(shape) == 1 << 10


def test_another_device_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"no context attention kernel for bf16 queries over bf16 keys, head_dim 128 on compute capability 8\.0",
    ):
        select_context_attention(KERNELS, SHAPE, device(8, 0))


def test_a_release_without_such_kernels_is_named() -> None:
    with pytest.raises(UsageError, match="the release has none"):
        select_context_attention((), SHAPE, H100)


def names_of_launches(**sizes: object) -> list[str]:
    shape = replace(SHAPE, kv_dtype="e4m3", **sizes)
    return [selection.kernel.name for selection in select_context_launches(KERNELS, shape, H100)]


CONVERTED = ["convert_e4m3_cache_to_bf16_sm90a", "context_bf16_d128_sm90a"]
DIRECT = ["context_bf16_over_e4m3_d128_sm90a"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, CONVERTED),
        ({"tokens": 1024, "max_seq_len": 1 << 16}, CONVERTED),
        ({"tokens": 128, "max_seq_len": 1 << 14, "splittable": False}, CONVERTED),
        # Few row tiles read a key: the bytes that a conversion writes cost more than to convert it for each.
        ({"batch": 8, "tokens": 8 * 512, "kv_heads": 32, "group": 1}, DIRECT),
        ({"batch": 32, "tokens": 32 * 8, "kv_heads": 32, "group": 1, "max_seq_len": 1 << 14}, DIRECT),
        ({"batch": 64, "tokens": 64}, DIRECT),
        # A launch more costs as much as it saves.
        ({"tokens": 256, "max_seq_len": 256}, DIRECT),
        # The copy of 1 GiB would be too large, that of 512 MiB is not.
        ({"tokens": 8192, "max_seq_len": 1 << 18}, DIRECT),
        ({"tokens": 8192, "max_seq_len": 1 << 17}, CONVERTED),
        ({"convertible": False}, DIRECT),
        ({"max_seq_len": 0}, DIRECT),
    ],
)
def test_a_cache_is_converted_before_where_that_takes_less_time(sizes: dict[str, object], expected: list[str]) -> None:
    assert names_of_launches(**sizes) == expected


def test_a_16_bit_cache_is_not_converted() -> None:
    (only,) = select_context_launches(KERNELS, SHAPE, H100)
    assert only == select_context_attention(KERNELS, SHAPE, H100)


CHUNK = replace(SHAPE, tokens=16, q_len=16, max_seq_len=1 << 14)  # of a long context: 8 work tiles of 128 key tiles


def splits_of(shape: ContextShape, kernels: Sequence[NativeKernel] = KERNELS) -> int:
    return select_context_launches(kernels, shape, H100)[0].splits


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ({}, 16),
        ({"tokens": 64, "q_len": 64}, 8),
        ({"kv_heads": 1, "max_seq_len": 1 << 17}, 64),
        ({"batch": 4, "tokens": 64}, 4),
        # Row tiles that fill the GPU; one that has as few by the tokens of all requests alone.
        ({"tokens": 512, "q_len": 512}, 0),
        ({"batch": 16, "tokens": 256}, 0),
        ({"batch": 8, "tokens": 128}, 2),
        ({"batch": 8, "tokens": 128, "q_len": 0}, 0),
        # A padded batch: its tokens have rows in the parts, whether they are of a request or not.
        ({"tokens": 64, "q_len": 16}, 8),
        ({"tokens": 4096, "q_len": 16}, 0),
        # A merge costs more than it saves.
        ({"max_seq_len": 256}, 0),
        ({"max_seq_len": 0}, 0),
        ({"splittable": False}, 0),
        ({"batch_invariant": True}, 0),
        ({"soft_cap": True}, 16),
    ],
)
def test_keys_are_split_where_few_row_tiles_see_many(sizes: dict[str, object], splits: int) -> None:
    assert splits_of(replace(CHUNK, **sizes)) == splits


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 300])
def test_a_cache_of_e4m3_is_split_as_one_of_16_bits(head_dim: int, tokens: int) -> None:
    shape = replace(CHUNK, head_dim=head_dim, tokens=tokens, q_len=tokens)
    assert splits_of(replace(shape, kv_dtype="e4m3")) == splits_of(shape)


def test_the_parts_are_those_of_a_wave_and_are_merged() -> None:
    attention, merge = select_context_launches(KERNELS, CHUNK, H100)
    assert attention.kernel.traits["split_keys"]
    assert attention.grid(CHUNK) == (8, 16, 1)
    assert (merge.splits, merge.room) == (16, 132 * 128)
    assert dict(attention.facts(CHUNK))["row tiles"].endswith("; keys in 16 parts")
    assert attention.key_tiles(CHUNK) == 8
    assert dict(merge.facts(CHUNK))["merged"] == "16 parts of each row"


def test_a_release_without_kernels_that_split_keys_does_not() -> None:
    kernels = [kernel for kernel in KERNELS if not kernel.traits.get("split_keys")]
    assert splits_of(CHUNK, kernels) == 0


def test_a_conversion_says_what_it_does() -> None:
    shape = replace(SHAPE, kv_dtype="e4m3", copied=(1, 5000))
    conversion, attention = select_context_launches(KERNELS, shape, H100)
    assert conversion.grid(shape) == (16, 40, 1)
    assert dict(attention.facts(shape))["predicted"].startswith("887.4 us on an H200: 10.0 + 504.2 x 1.74")
    assert conversion.ctas == 640
    assert dict(conversion.facts(shape))["converted"] == "at most 1 x 5000 tokens of 8 KV heads to bf16"
    assert conversion.reason.startswith("attention over 16 bits is predicted to take ")


def test_predictions_over_e4m3_are_near_what_was_measured() -> None:
    measured = json.loads((RESULTS / "context_e4m3.json").read_text())
    sizes = {"prompt of 8192": {}, "4 prompts of 2048": {"batch": 4, "max_seq_len": 2048}}
    compared = 0
    for row in measured["rows"]:
        case, us = (row["case"], row["head_dim"]), row["us"]
        assert us["e4m3"] < 1.08 * us["e4m3, in the kernel"], case
        if row["case"] in sizes and row["dtype"] == "bfloat16" and not row["batch_invariant"]:
            shape = replace(SHAPE, kv_dtype="e4m3", head_dim=row["head_dim"], **sizes[row["case"]])
            conversion, attention = select_context_launches(KERNELS, shape, H100)
            predicted = conversion.predicted_us(shape) + attention.predicted_us(shape)
            assert predicted == pytest.approx(us["e4m3"], rel=0.2), case
            direct = select_context_attention(KERNELS, shape, H100).predicted_us(shape)
            assert direct == pytest.approx(us["e4m3, in the kernel"], rel=0.25), case
            compared += 1
    assert compared == 8
