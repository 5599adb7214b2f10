"""The operator ``sparse_mla_decode``: what it sends and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, TensorView, plan_sparse_mla_decode, sparse_mla_decode
from cubin_runtime.attention.backends import BackendError
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.problem import LOG2_E
from cubin_runtime.kernels.native.sparse_mla.params import SPARSE_MLA_DECODE
from cubin_runtime.launch.driver_api import INVALID_CLUSTER_SIZE
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200
from tests.attention.sparse_mla_examples import HEADS, PAGE, PAGES, TOKENS, WIDTH, cache, sparse_call, view


def sent(standin: StandIn) -> dict[str, Any]:
    """The parameters of the last launch."""
    return SPARSE_MLA_DECODE.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


def planned(runtime: Runtime, **changes: Any) -> dict[str, Any]:
    """The parameters of a plan's only launch."""
    (launch,) = plan_sparse_mla_decode(**sparse_call(**changes), runtime=runtime, device_facts=H200).launch_plans()
    return dict(launch.values)


def test_tensors_and_numbers_arrive(stub_runtime: Runtime, standin: StandIn) -> None:
    lens, lse = view("int32", TOKENS, at=0x7F0000003000), view("float32", TOKENS, HEADS, at=0x7F0000004000)
    sinks = view("float32", HEADS, at=0x7F0000005000)
    given = sparse_call(topk_lens=lens, lse=lse, sinks=sinks)
    assert sparse_mla_decode(**given, output_scale=-2.0, runtime=stub_runtime) is given["out"]
    seen = sent(standin)
    for name, tensor in given.items():
        if name != "softmax_scale":
            assert seen[name] == tensor.pointer
    assert (seen["batch"], seen["heads"], seen["width"], seen["rows"]) == (TOKENS, HEADS, WIDTH, PAGES * PAGE)
    assert (seen["softmax_scale"], seen["output_scale"]) == (pytest.approx(0.1), -2.0)
    assert (seen["softmax_scale_device"], seen["splits"], seen["lse_sink"], seen["lse_from_log2"]) == (0, 0, 1, 1.0)


def test_scales_on_the_device_are_read_there(stub_runtime: Runtime, standin: StandIn) -> None:
    scale = view("float32", 1, at=0x7F0000005000)
    sparse_mla_decode(**sparse_call(softmax_scale=scale), output_scale=scale, runtime=stub_runtime)
    seen = sent(standin)
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (scale.pointer, scale.pointer)
    assert (seen["softmax_scale"], seen["output_scale"]) == (1.0, 1.0)


def test_the_log_sum_exp_has_the_base_and_sink_that_are_asked_for(stub_runtime: Runtime) -> None:
    seen = planned(stub_runtime, lse_base="e", lse_sink=False)
    assert (seen["lse_from_log2"], seen["lse_sink"]) == (pytest.approx(1 / LOG2_E), 0)


def tokens_of(tokens: int, width: int, heads: int = 16) -> dict[str, Any]:
    return sparse_call(
        q=view("bfloat16", tokens, heads, 576),
        out=view("bfloat16", tokens, heads, 512),
        indices=view("int32", tokens, width, at=0x7F0000002000),
    )


_PAGED = (PAGE * 656, 656)
CACHES: dict[str, tuple[TensorView, tuple[int, int, int]]] = {
    "pages": (cache("uint8", PAGES, PAGE, 656), (656, 656, 0)),
    "one head after": (cache("float8_e4m3fn", PAGES, PAGE, 1, 656), (656, 656, 0)),
    "one head before": (cache("uint8", PAGES, 1, PAGE, 656), (656, 656, 0)),
    "rows": (cache("uint8", 5000, 656), (656, 656, 0)),
    "pages of one row": (cache("uint8", PAGES, 1, 656), (656, 656, 0)),
    "gaps between pages": (
        replace(cache("uint8", PAGES, PAGE, 656), strides=(65 * 656, 656, 1)),
        (65 * 656, 656, 6),
    ),
    "gaps between rows": (
        replace(cache("uint8", PAGES, PAGE, 656), strides=(PAGE * 672, 672, 1)),
        (672, 672, 0),
    ),
    "pages of any size without gaps": (cache("uint8", PAGES, 48, 656), (656, 656, 0)),
}


@pytest.mark.parametrize("form", CACHES)
def test_rows_are_found_in_every_form_of_the_cache(stub_runtime: Runtime, form: str) -> None:
    own, place = CACHES[form]
    seen = planned(stub_runtime, kv_cache=own)
    assert (seen["page_bytes"], seen["row_bytes"], seen["page_size_log2"]) == place


@pytest.mark.parametrize(
    ("dtype", "columns", "kernel"),
    [("uint8", 656, "scaled_e4m3"), ("bfloat16", 576, "bf16"), ("bfloat16", 512, "bf16_nope")],
)
def test_rows_choose_the_kernel(stub_runtime: Runtime, dtype: str, columns: int, kernel: str) -> None:
    given = sparse_call(columns=512 if columns == 512 else 576, kv_cache=cache(dtype, PAGES, PAGE, columns))
    plan = plan_sparse_mla_decode(**given, runtime=stub_runtime, device_facts=H200)
    assert plan.selections[0].kernel.symbol == f"sparse_mla_decode_{kernel}_latent512"


@pytest.mark.parametrize(
    ("heads", "rows", "row_tiles", "group"),
    [(1, 16, 1, 1), (16, 16, 1, 1), (17, 32, 1, 1), (32, 32, 1, 1), (33, 64, 1, 1), (64, 64, 1, 1), (128, 64, 2, 2)],
)
def test_heads_are_cut_into_the_fewest_rows_that_hold_them(
    stub_runtime: Runtime, heads: int, rows: int, row_tiles: int, group: int
) -> None:
    plan = plan_sparse_mla_decode(**tokens_of(64, 2048, heads), runtime=stub_runtime, device_facts=H200)
    (selection,) = plan.selections
    assert selection.kernel.traits["rows"] == rows
    assert (selection.row_tiles, selection.cta_group_size, selection.ctas % group) == (row_tiles, group, 0)


@pytest.mark.parametrize(("heads", "row_tiles", "group"), [(17, 2, 2), (48, 3, 3), (64, 4, 4), (80, 5, 1), (128, 8, 4)])
def test_heads_over_rows_of_bf16_are_cut_into_tiles_of_16(
    stub_runtime: Runtime, heads: int, row_tiles: int, group: int
) -> None:
    given = sparse_call(heads, kv_cache=cache("bfloat16", PAGES, PAGE, 576))
    (selection,) = plan_sparse_mla_decode(**given, runtime=stub_runtime, device_facts=H200).selections
    assert (selection.row_tiles, selection.cta_group_size, selection.ctas % group) == (row_tiles, group, 0)


@pytest.mark.parametrize(
    ("tokens", "heads", "rows"), [(33, 32, 16), (34, 32, 32), (7, 64, 16), (8, 64, 64), (3, 128, 16), (4, 128, 64)]
)
def test_few_tokens_take_tiles_of_16_unless_bits_must_not_depend_on_them(
    stub_runtime: Runtime, tokens: int, heads: int, rows: int
) -> None:
    given = sparse_call(
        q=view("bfloat16", tokens, heads, 576),
        out=view("bfloat16", tokens, heads, 512),
        indices=view("int32", tokens, 2048, at=0x7F0000002000),
    )
    for batch_invariant, expected in ((False, rows), (True, 32 if heads == 32 else 64)):
        plan = plan_sparse_mla_decode(**given, batch_invariant=batch_invariant, runtime=stub_runtime, device_facts=H200)
        assert plan.selections[0].kernel.traits["rows"] == expected


@pytest.mark.parametrize(
    ("tokens", "size", "clusters"),
    [
        (1, 16, 1),
        (7, 16, 7),
        (8, 8, 8),
        (15, 8, 15),
        (16, 4, 16),
        (30, 4, 30),
        (31, 2, 31),
        (66, 2, 66),
        (67, 1, 67),
        (256, 1, 128),
    ],
)
def test_an_output_tile_has_as_large_a_cluster_as_finds_a_place(
    stub_runtime: Runtime, tokens: int, size: int, clusters: int
) -> None:
    plan = plan_sparse_mla_decode(**tokens_of(tokens, 2048), runtime=stub_runtime, device_facts=H200)
    (launch,) = plan.launches
    assert launch.plan.grid == (size, clusters, 1)
    assert launch.plan.attributes.cluster == ((size, 1, 1) if size > 1 else None)
    assert launch.plan.attributes.nonportable_cluster is (size > 8)
    assert sum(region.nbytes for region in launch.regions if region.name != "status") == 0


def test_clusters_are_portable_where_no_gpc_surely_holds_a_larger_one(stub_runtime: Runtime) -> None:
    smaller = replace(H200, multiprocessors=131)
    plan = plan_sparse_mla_decode(**tokens_of(1, 2048), runtime=stub_runtime, device_facts=smaller)
    assert plan.launches[0].plan.grid == (8, 1, 1)


@pytest.mark.parametrize(("room", "refusal", "size"), [(7, None, 16), (0, None, 8), (7, INVALID_CLUSTER_SIZE, 8)])
def test_clusters_are_portable_in_a_context_without_room_for_larger_ones(
    stub_runtime: Runtime, standin: StandIn, room: int, refusal: int | None, size: int
) -> None:
    standin.describe("H200", H200.capability, 132, 228 << 10, 50 << 20, room)
    if refusal is not None:
        standin.fail("cuOccupancyMaxActiveClusters", refusal)
    sparse_mla_decode(**tokens_of(1, 2048), runtime=stub_runtime)
    assert len(standin.calls("cuOccupancyMaxActiveClusters")) == 1
    (launched,) = standin.calls("cuLaunchKernelEx")
    assert (launched.seen["cluster"], launched.seen["grid"]) == (f"{size},1,1", f"{size},1,1")


def test_no_more_clusters_run_than_find_a_place(stub_runtime: Runtime) -> None:
    for multiprocessors, clusters in ((1, 1), (132, 132)):
        device = replace(H200, multiprocessors=multiprocessors)
        many = tokens_of(16500, 64, 128) | {"kv_cache": cache("bfloat16", PAGES, PAGE, 576)}
        plan = plan_sparse_mla_decode(**many, runtime=stub_runtime, device_facts=device)
        assert plan.launches[0].plan.grid == (1, clusters, 1)


def test_short_lists_are_not_merged(stub_runtime: Runtime) -> None:
    plan = plan_sparse_mla_decode(**tokens_of(16, 64), runtime=stub_runtime, device_facts=H200)
    assert plan.selections[0].cluster_size == 1


def test_neither_tokens_nor_width_decide_the_parts_of_a_list_under_batch_invariance(stub_runtime: Runtime) -> None:
    for tokens, width, heads in itertools.product((1, 16, 64, 300), (64, 2048, 32768), (16, 32)):
        given = tokens_of(tokens, width, heads)
        plan = plan_sparse_mla_decode(**given, batch_invariant=True, runtime=stub_runtime, device_facts=H200)
        (selection,) = plan.selections
        assert selection.splits == 4
        assert selection.cluster_size in ((2, 4) if heads == 16 else (4,))


def test_splits_of_wide_tiles_follow_from_the_width_under_batch_invariance(stub_runtime: Runtime) -> None:
    for width, splits in ((64, 1), (512, 1), (513, 2), (2048, 4), (32768, 4)):
        given = tokens_of(TOKENS, width, heads=64)
        plan = plan_sparse_mla_decode(**given, batch_invariant=True, runtime=stub_runtime, device_facts=H200)
        assert (plan.selections[0].splits, plan.selections[0].slack_tiles) == (splits, 0)


def test_only_lists_that_are_split_have_scratch_under_batch_invariance(stub_runtime: Runtime) -> None:
    # Of each split of 64 rows: fp16 outputs of 512 columns, and 10 numbers of each row.
    of_split = 64 * (2 * 512 + 4 * 10)
    for width, nbytes in ((512, 0), (513, 100 * 2 * (4 + 2 * of_split)), (2048, 100 * 2 * (4 + 4 * of_split))):
        given = tokens_of(100, width, heads=128)
        plan = plan_sparse_mla_decode(**given, batch_invariant=True, runtime=stub_runtime, device_facts=H200)
        assert sum(region.nbytes for region in plan.regions if region.name != "status") == nbytes


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "rank of q": ({"q": view("bfloat16", TOKENS, 576)}, r"q: shape \(7, 576\), expected \[tokens, heads, columns\]"),
    "dtype of q": ({"q": view("float16", TOKENS, HEADS, 576)}, "q: dtype float16, expected bfloat16"),
    "columns": ({"q": view("bfloat16", TOKENS, HEADS, 512)}, "q: 512 columns per head, expected 576"),
    "V4": ({"kv_cache": cache("uint8", PAGES, PAGE, 584)}, "kv_cache: rows of 584 bytes, expected 656.*DeepSeek V4"),
    "e4m3 of one scale": ({"kv_cache": cache("float8_e4m3fn", PAGES, PAGE, 576)}, "kv_cache: rows of 576 bytes"),
    "bf16 width": ({"kv_cache": cache("bfloat16", PAGES, PAGE, 320)}, "kv_cache: rows of 320 bfloat16"),
    "fp16 cache": ({"kv_cache": cache("float16", PAGES, PAGE, 576)}, "kv_cache: dtype float16"),
    "rank of the cache": ({"kv_cache": cache("uint8", 2, 2, PAGE, 656)}, "kv_cache: shape .* with a dimension of 1"),
    "odd rows": (
        {"kv_cache": replace(cache("uint8", PAGES, PAGE, 656), strides=(PAGE * 664, 664, 1))},
        "kv_cache: strides .*, expected multiples of 16 elements",
    ),
    "pages of odd size with gaps": (
        {"kv_cache": replace(cache("uint8", PAGES, 48, 656), strides=(49 * 656, 656, 1))},
        "kv_cache: page size 48 with gaps between pages, expected a power of two",
    ),
    "lists": ({"indices": view("int32", TOKENS + 1, WIDTH)}, r"indices: shape .*, expected \[7, width\]"),
    "long lists": ({"indices": view("int32", TOKENS, 32769)}, "indices: shape .* a width of 1 to 32768"),
    "dtype of lists": ({"indices": view("int64", TOKENS, WIDTH)}, "indices: dtype int64, expected int32"),
    "lengths": ({"topk_lens": view("int32", 3)}, r"topk_lens: shape \(3,\), expected \(7,\)"),
    "out": ({"out": view("bfloat16", TOKENS, HEADS, 576)}, r"out: shape .*, expected \(7, 16, 512\)"),
    "lse": ({"lse": view("float32", HEADS, TOKENS)}, r"lse: shape .*, expected \(7, 16\)"),
    "sinks": ({"sinks": view("float32", 3)}, r"sinks: shape .*, expected \(16,\)"),
    "scale": ({"softmax_scale": view("float32", 2)}, "softmax_scale: shape .*, expected one element"),
    "base": ({"lse_base": "10"}, "lse_base='10': expected '2' or 'e'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_breaks_a_rule_is_refused(stub_runtime: Runtime, standin: StandIn, name: str) -> None:
    changes, words = REFUSALS[name]
    with pytest.raises(UsageError, match=words):
        sparse_mla_decode(**sparse_call(**changes), runtime=stub_runtime)
    assert not standin.calls("cuLaunchKernelEx")


_BF16_ROWS = {"kv_cache": cache("bfloat16", PAGES, PAGE, 576)}


@pytest.mark.parametrize(
    ("tokens", "width", "heads", "changes"),
    [
        ((1 << 20) - 1, 64, 16, {}),
        ((1 << 17) - 1, 64, 128, _BF16_ROWS),
        (100_000, 32768, 128, _BF16_ROWS),
        (100_000, 32768, 128, {}),
        ((1 << 22) - 1, 32768, 64, {}),
    ],
)
def test_as_many_query_tokens_are_taken_as_kernels_can_number_tiles(
    stub_runtime: Runtime, tokens: int, width: int, heads: int, changes: dict[str, Any]
) -> None:
    many = tokens_of(tokens, width, heads) | changes
    plan = plan_sparse_mla_decode(**many, runtime=stub_runtime, device_facts=H200)
    assert plan.launch_plans()[0].values["batch"] == tokens


@pytest.mark.parametrize(
    ("tokens", "width", "heads", "changes"),
    [(1 << 20, 64, 16, {}), (1 << 17, 64, 128, _BF16_ROWS), (1 << 22, 32768, 64, {})],
)
def test_more_tiles_than_kernels_can_number_are_refused(
    stub_runtime: Runtime, tokens: int, width: int, heads: int, changes: dict[str, Any]
) -> None:
    many = tokens_of(tokens, width, heads) | changes
    with pytest.raises(UsageError, match=rf"{tokens} query tokens of {heads} heads .*: \d+ tiles, expected fewer than"):
        plan_sparse_mla_decode(**many, runtime=stub_runtime, device_facts=H200)


def test_more_heads_than_128_are_refused(stub_runtime: Runtime) -> None:
    with pytest.raises(UsageError, match="q: 129 heads, expected 1 to 128"):
        plan_sparse_mla_decode(**sparse_call(129), runtime=stub_runtime, device_facts=H200)


def test_a_scale_must_be_there(stub_runtime: Runtime) -> None:
    with pytest.raises(UsageError, match="softmax_scale: None, expected a number"):
        sparse_mla_decode(**{**sparse_call(), "softmax_scale": None}, runtime=stub_runtime)


def test_other_devices_have_no_kernel(stub_runtime: Runtime) -> None:
    facts = replace(H200, capability=(10, 0))
    with pytest.raises(BackendError, match=r"sparse_mla_decode on .*measured on 9\.0"):
        plan_sparse_mla_decode(**sparse_call(), runtime=stub_runtime, device_facts=facts)
