"""What a plan of an MLA decode and its steps do with each tensor and option."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import (
    BackendError,
    ClampedInputError,
    MlaDecodePlan,
    Runtime,
    TensorView,
    mla_decode,
    plan_mla_decode,
)
from cubin_runtime.errors import UsageError, WorkspaceError
from cubin_runtime.kernels.native.device_models import describe_device
from cubin_runtime.launch.workspace import SemaphoreWorkspace, workspace_size
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200
from tests.attention.latent_examples import BATCH, COLUMNS, HEADS, PAGE, PAGES, PARAMS, latent_call, ragged_call, view
from tests.attention.trtllm_calls import MadeUpMemory

BF16, E4M3 = "bfloat16", "float8_e4m3fn"
LOG2_E = math.log2(math.e)
MASK = view("uint16", BATCH, 3, 2)
SINKS = view("float32", HEADS, pointer=0x7F0000007100)
SCALE = view("float32", 1, pointer=0x7F0000007200)
FACTOR = view("float32", 1, pointer=0x7F0000007300)
LSE = view("float32", BATCH, HEADS, pointer=0x7F0000007400)


def make_plan(runtime: Runtime, given: dict[str, Any] | None = None, **options: Any) -> MlaDecodePlan:
    asked = {"max_seq_len": 1000, "softmax_scale": 0.5, "runtime": runtime}
    return plan_mla_decode(**{**asked, **(given or latent_call()), **options})


def values(planner: Runtime, given: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The parameters as planned for an H200."""
    return dict(make_plan(planner, given, device_facts=H200, **options).launch_plans()[0].values)


def run(plan: MlaDecodePlan, given: dict[str, Any] | None = None, **options: Any) -> None:
    plan.run(**{"workspace": plan.prepare(0), **(given or latent_call()), **options})


def sent(standin: StandIn, index: int = -1) -> dict[str, Any]:
    """The parameters of a launch, as they arrived."""
    return PARAMS.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[index].seen["parameter0"]))


@pytest.mark.parametrize(
    ("dtypes", "dtype", "codes"),
    [
        ((BF16, BF16, "float16"), "bf16", (0, 1)),
        ((E4M3, BF16, BF16), "e4m3", (0, 0)),
        ((E4M3, BF16, E4M3), "e4m3", (0, 2)),
        ((E4M3, E4M3, BF16), "e4m3", (2, 0)),
    ],
)
@pytest.mark.parametrize("latent", [512, 256])
def test_dtypes_and_widths_reach_kernel_and_parameters(
    planner: Runtime, dtypes: tuple[str, str, str], dtype: str, codes: tuple[int, int], latent: int
) -> None:
    plan = make_plan(planner, latent_call(dtypes=dtypes, latent=latent), device_facts=H200)
    traits, given = plan.selections[0].kernel.traits, plan.launch_plans()[0].values
    assert (traits["dtype"], traits["latent"]) == (dtype, latent)
    assert (given["q_type"], given["out_type"]) == codes
    assert given["softmax_scale_log2"] == pytest.approx(0.5 * LOG2_E)


@pytest.mark.parametrize(("latent", "rope"), [(512, 0), (256, 32), (128, 32)])
@pytest.mark.parametrize("heads", [16, 128])
def test_rows_without_rope_columns_and_narrow_ones(planner: Runtime, latent: int, rope: int, heads: int) -> None:
    plan = make_plan(planner, latent_call(heads=heads, latent=latent, rope=rope), device_facts=H200)
    traits, given = plan.selections[0].kernel.traits, plan.launch_plans()[0].values
    assert (traits["latent"], traits["rope"]) == (latent, rope)
    # A box may be wider than what is left of a row: TMA fills it with zeros.
    assert (given["kv_map"].dims[0], given["kv_map"].box[0]) == (latent + rope, 64)
    assert (given["q_head_stride"], given["out_head_stride"]) == (latent + rope, latent)


def test_the_output_has_the_latent_columns(planner: Runtime) -> None:
    with pytest.raises(UsageError, match=r"out: shape .*expected \(4, 16, 256\)"):
        make_plan(planner, latent_call(latent=256, rope=32, out=view("bfloat16", 4, HEADS, 288)), device_facts=H200)


NARROW = {"dtypes": (E4M3, E4M3, BF16)}
VALUES = view(E4M3, PAGES, PAGE, 512, pointer=0x7F0020000000)


@pytest.mark.parametrize(
    "values", [VALUES, view(E4M3, PAGES, 1, PAGE, 512), replace(VALUES, strides=(PAGE * 576, 576, 1))]
)
def test_values_in_memory_of_their_own(planner: Runtime, values: TensorView) -> None:
    plan = make_plan(planner, latent_call(**NARROW, v_cache=values), device_facts=H200)
    (launch,) = plan.launch_plans()
    assert (plan.selections[0].kernel.traits["separate_values"], launch.layout.name) == (
        True,
        "PagedMlaDecodeValuesParams",
    )
    maps = launch.values["kv_map"], launch.values["v_map"]
    assert [(spec.dims, spec.strides[0]) for spec in maps] == [
        ((n, PAGE, PAGES), values.strides[-2] if n == 512 else n) for n in (576, 512)
    ]


def test_without_them_the_values_are_the_first_columns_of_their_keys(planner: Runtime) -> None:
    plan = make_plan(planner, latent_call(**NARROW), device_facts=H200)
    assert "separate_values" not in plan.selections[0].kernel.traits


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (latent_call(**NARROW, v_cache=view(E4M3, PAGES, PAGE, 576)), r"v_cache: shape .*expected \(100, 64, 1, 512\)"),
        (latent_call(**NARROW, v_cache=view(E4M3, PAGES + 1, PAGE, 512)), "v_cache: shape"),
        (
            latent_call(**NARROW, v_cache=view(BF16, PAGES, PAGE, 512)),
            "v_cache: dtype bfloat16, expected float8_e4m3fn",
        ),
        (latent_call(**NARROW, v_cache=replace(VALUES, device=1)), "v_cache: on device 1"),
        (latent_call(**NARROW, v_cache=replace(VALUES, pointer=0x1008)), "v_cache: address 0x1008"),
        (latent_call(v_cache=VALUES), "values are the first columns of their keys"),
        (latent_call(**NARROW, latent=256, v_cache=view(E4M3, PAGES, PAGE, 256)), "values are the first columns"),
    ],
)
def test_other_values_are_refused(planner: Runtime, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(planner, given, device_facts=H200)


ROPE = view(BF16, BATCH, HEADS, 64, pointer=0x7F0000500000)


def apart(*tokens: int, latent: int = 512, rope: int = 64, dtype: str = BF16, **more: Any) -> dict[str, Any]:
    """A call with the rope columns of the queries in memory of their own."""
    lead = tokens or (BATCH,)
    queries = {"q": view(dtype, *lead, HEADS, latent), "q_rope": view(dtype, *lead, HEADS, rope)}
    kv = BF16 if dtype == BF16 else E4M3
    return latent_call(*tokens, latent=latent, rope=rope, dtypes=(kv, dtype, BF16), **{**queries, **more})


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 64), (256, 32), (128, 32)])
def test_rope_columns_of_queries_in_memory_of_their_own(planner: Runtime, latent: int, rope: int) -> None:
    given = values(planner, apart(latent=latent, rope=rope))
    assert (given["q_token_stride"], given["q_head_stride"]) == (HEADS * latent, latent)
    assert (given["q_rope_token_stride"], given["q_rope_head_stride"]) == (HEADS * rope, rope)


def test_rope_columns_have_strides_of_their_own(planner: Runtime) -> None:
    rope = replace(view(BF16, BATCH, 3, HEADS, 64), strides=(3 * HEADS * 192, HEADS * 192, 192, 1))
    queries = replace(view(BF16, BATCH, 3, HEADS, 512), strides=(3 * 512, 512, BATCH * 3 * 512, 1))
    given = values(planner, apart(BATCH, 3, q=queries, q_rope=rope))
    assert (given["q_rope_token_stride"], given["q_rope_head_stride"]) == (HEADS * 192, 192)
    assert (given["q_token_stride"], given["q_head_stride"]) == (512, BATCH * 3 * 512)


def test_without_them_the_strides_are_those_of_the_queries(planner: Runtime) -> None:
    given = values(planner)
    assert (given["q_rope_token_stride"], given["q_rope_head_stride"]) == (HEADS * 576, 576)


def test_rope_columns_beside_values_in_memory_of_their_own(planner: Runtime) -> None:
    given = values(planner, apart(dtype=E4M3, v_cache=VALUES))
    assert (given["v_map"].dims[0], given["q_rope_head_stride"]) == (512, 64)


def test_rope_columns_are_sent(stub_runtime: Runtime, standin: StandIn) -> None:
    given = apart(q_rope=ROPE)
    run(make_plan(stub_runtime, given), given)
    run(make_plan(stub_runtime))
    assert [sent(standin, at)["q_rope"] for at in (-2, -1)] == [ROPE.pointer, 0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (apart(q=view(BF16, BATCH, HEADS, 576)), "q: 576 columns per head with q_rope, expected 512, the latent ones"),
        (apart(q_rope=view(BF16, BATCH, HEADS, 32)), r"q_rope: shape \(4, 16, 32\), expected \(4, 16, 64\)"),
        (apart(q_rope=view(BF16, BATCH, 1, HEADS, 64)), r"q_rope: shape \(4, 1, 16, 64\), expected \(4, 16, 64\)"),
        (apart(q_rope=view(E4M3, BATCH, HEADS, 64)), "q_rope: dtype float8_e4m3fn, expected bfloat16, like q"),
        (apart(dtype=E4M3, q_rope=ROPE), "q_rope: dtype bfloat16, expected float8_e4m3fn, like q"),
        (apart(q_rope=replace(ROPE, device=1)), "q_rope: on device 1, q is on device 0"),
        (apart(q_rope=replace(ROPE, pointer=0x1008)), "q_rope: address 0x1008, .*multiple of 16"),
        (apart(q_rope=replace(ROPE, strides=(HEADS * 65, 65, 1))), "q_rope: strides .* multiples of 8"),
        (apart(q_rope=replace(ROPE, strides=(HEADS * 128, 128, 2))), "q_rope: last stride 2, expected 1"),
        (
            apart(BATCH, 3, q_rope=replace(view(BF16, BATCH, 3, HEADS, 64), strides=(8192, 1024, 64, 1))),
            "q_rope: strides .*expected one stride between all tokens",
        ),
        (
            latent_call(rope=0, q_rope=ROPE),
            "q_rope: given with rows of 512 columns, which are latent, expected None",
        ),
        (latent_call(q_rope=ROPE), "q: 576 columns per head with q_rope"),
    ],
)
def test_other_rope_columns_are_refused(planner: Runtime, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(planner, given, device_facts=H200)


def test_one_token_a_request(planner: Runtime) -> None:
    given = values(planner)
    sizes = ("batch", "tokens", "q_len", "heads", "page_size_log2", "num_pages", "max_seq_len")
    assert [given[name] for name in sizes] == [BATCH, BATCH, 1, HEADS, 6, PAGES, 1000]
    assert (given["q_token_stride"], given["q_head_stride"]) == (HEADS * 576, 576)
    assert (given["out_token_stride"], given["out_head_stride"]) == (HEADS * 512, 512)


def test_tokens_of_a_request_are_seen_as_tokens(planner: Runtime) -> None:
    given = values(planner, latent_call(BATCH, 3, lse=view("float32", BATCH, 3, HEADS)))
    assert (given["batch"], given["tokens"], given["q_len"]) == (BATCH, 12, 3)
    assert (given["lse_token_stride"], given["lse_head_stride"]) == (HEADS, 1)


def test_ragged_tokens(planner: Runtime) -> None:
    given = values(planner, ragged_call(7), max_q_len=5)
    assert (given["batch"], given["tokens"], given["q_len"]) == (BATCH, 7, 5)


@pytest.mark.parametrize("shape", [(PAGES, PAGE, 576), (PAGES, 1, PAGE, 576)])
def test_both_forms_of_the_cache_are_one(planner: Runtime, shape: tuple[int, ...]) -> None:
    spec = values(planner, latent_call(kv_cache=view("bfloat16", *shape)))["kv_map"]
    assert (spec.dims, spec.strides) == ((576, PAGE, PAGES), (1152, 1152 * PAGE))


def test_strides_of_the_cache_are_taken_as_they_are(planner: Runtime) -> None:
    wide = replace(latent_call()["kv_cache"], strides=(PAGE * 1280 + 640, 640, 1))
    spec = values(planner, latent_call(kv_cache=wide))["kv_map"]
    assert spec.strides == (1280, (PAGE * 1280 + 640) * 2)


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize(("dtypes", "heads"), [((BF16, BF16, BF16), 128), ((E4M3, BF16, BF16), 16)])
def test_page_sizes(planner: Runtime, dtypes: tuple[str, str, str], heads: int, page: int) -> None:
    call = latent_call(dtypes=dtypes, heads=heads, kv_cache=view(dtypes[0], PAGES, page, 576))
    plan = make_plan(planner, call, max_seq_len=256, device_facts=H200)
    given, tile = plan.launch_plans()[0].values, plan.selections[0].kernel.traits["tile_tokens"]
    assert 1 << given["page_size_log2"] == page
    assert given["kv_map"].box[1] == min(page, tile)


@pytest.mark.parametrize("heads", [1, 5, 8, 16, 32, 64, 100, 128])
def test_head_counts(planner: Runtime, heads: int) -> None:
    assert values(planner, latent_call(heads=heads))["heads"] == heads


@pytest.mark.parametrize("invariant", [False, True])
def test_fixed_splits_are_asked_for_by_batch_invariant(planner: Runtime, invariant: bool) -> None:
    assert (values(planner, batch_invariant=invariant)["splits"] > 0) == invariant


def test_workspaces_of_fixed_splits_hold_every_part(planner: Runtime) -> None:
    plan = make_plan(planner, latent_call(BATCH, 9), batch_invariant=True, device_facts=H200)
    rows = BATCH * plan.selections[0].row_tiles * int(plan.selections[0].kernel.traits["rows"])
    assert plan.workspace_bytes >= rows * plan.selections[0].splits * 512 * 2


def test_the_plan_describes_every_field_with_its_meaning(planner: Runtime) -> None:
    rows = {row.name: row for row in make_plan(planner, device_facts=H200).describe()[0]}
    assert (rows["heads"].value, rows["num_pages"].value) == (HEADS, PAGES)
    assert all(row.meaning for row in rows.values())


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (latent_call(heads=129), {}, "q: 129 heads, expected 1 to 128"),
        (
            latent_call(dtypes=(BF16, "float16", BF16)),
            {},
            "q: dtype float16, expected bfloat16 with bfloat16 caches",
        ),
        (
            latent_call(dtypes=("float16", BF16, BF16)),
            {},
            "kv_cache: dtype float16, expected bfloat16 or float8_e4m3fn",
        ),
        (
            latent_call(dtypes=(BF16, E4M3, BF16)),
            {},
            "q: dtype float8_e4m3fn, expected bfloat16 with bfloat16 caches",
        ),
        (latent_call(dtypes=(BF16, BF16, "float32")), {}, "out: dtype float32"),
        (latent_call(latent=128), {}, "kv_cache: rows of 192 columns, expected one of 576, 320, 512, 288 or 160"),
        (latent_call(kv_cache=view("bfloat16", PAGES, PAGE, 64)), {}, "kv_cache: rows of 64 columns"),
        (latent_call(kv_cache=view("bfloat16", PAGES, PAGE, 320)), {}, "q: 576 columns per head, expected 320"),
        (latent_call(kv_cache=view("bfloat16", PAGES, 8, 576)), {}, "kv_cache: page size 8, expected one of 16, 32"),
        (latent_call(kv_cache=view("bfloat16", PAGES, 48, 576)), {}, "kv_cache: page size 48, expected one of 16, 32"),
        (latent_call(kv_cache=view("bfloat16", PAGES, 2, PAGE, 576)), {}, "kv_cache: shape .*expected .pages, page"),
        (latent_call(kv_cache=view("bfloat16", PAGES, PAGE, 576, pointer=8)), {}, "kv_cache: address 0x8"),
        (latent_call(q=view("bfloat16", 4, HEADS, 576, pointer=0x1008)), {}, "q: address 0x1008, .*multiple of 16"),
        (latent_call(out=view("bfloat16", 4, HEADS, 512, pointer=0x1008)), {}, "out: address 0x1008"),
        (latent_call(out=view("bfloat16", 4, HEADS, 576)), {}, r"out: shape .*expected \(4, 16, 512\)"),
        (latent_call(4, 17), {}, "q: 17 tokens per request, expected 1 to 16"),
        (latent_call(5), {}, r"seq_lens: shape \(4,\), expected \(5,\)"),
        (latent_call(), {"max_q_len": 2}, "max_q_len=2: expected only with q_cu_seq_lens"),
        (ragged_call(), {}, "max_q_len: None with q_cu_seq_lens"),
        (ragged_call(), {"max_q_len": 17}, "max_q_len=17: expected 1 to 16"),
        (ragged_call(q_cu_seq_lens=view("int64", 5)), {"max_q_len": 4}, "q_cu_seq_lens: dtype int64"),
        (
            ragged_call(q_cu_seq_lens=view("int32", 6)),
            {"max_q_len": 4},
            r"q_cu_seq_lens: shape \(6,\), expected \(5,\)",
        ),
        (
            ragged_call(q_cu_seq_lens=replace(view("int32", 5), device=1)),
            {"max_q_len": 4},
            "q_cu_seq_lens: on device 1, q is on device 0",
        ),
        (latent_call(page_table=view("int32", 3, COLUMNS)), {}, r"page_table: shape .*expected \[4, columns\]"),
        (latent_call(), {"max_seq_len": 1025}, "max_seq_len=1025: expected 0 to 1024"),
        (latent_call(), {"softmax_scale": None}, "softmax_scale: None"),
        (latent_call(), {"softmax_scale": math.nan}, "softmax_scale=nan"),
        (latent_call(sinks=view("float32", HEADS + 1)), {}, "sinks: shape"),
        (latent_call(mask=MASK), {}, "mask: shape"),
        (latent_call(), {"backend": "fast"}, "backend='fast': expected auto or one of native"),
    ],
)
def test_what_is_wrong_is_named(planner: Runtime, given: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(planner, given, device_facts=H200, **options)


@pytest.mark.parametrize("sm", [80, 100])
def test_other_devices_are_told_what_there_is(planner: Runtime, sm: int) -> None:
    words = r"mla_decode on .*no backend supports it \(native: measured on 9\.0, built for 12\.0, 12\.1\)"
    with pytest.raises(BackendError, match=words):
        make_plan(planner, device_facts=describe_device(sm))


@pytest.mark.parametrize("sm", [120, 121])
def test_the_kernels_of_sm120_are_taken_by_name_with_a_warning(planner: Runtime, sm: int) -> None:
    given, device = latent_call(dtypes=(E4M3, E4M3, BF16)), describe_device(sm)
    with pytest.raises(BackendError, match="backend 'native' has kernels for it that have never been run"):
        make_plan(planner, given, device_facts=device)
    with pytest.warns(UserWarning, match="mla_decode: backend 'native' was built for .* but never run there") as told:
        plan = make_plan(planner, given, device_facts=device, backend="native")
    assert told[0].filename == __file__
    assert plan.selections[0].kernel.name == "mla_portable_latent512_sm120"


@pytest.mark.filterwarnings("ignore:mla_decode. backend 'native' was built")
@pytest.mark.parametrize(("kv", "why"), [(BF16, "dtype is e4m3"), (E4M3, "queries are e4m3")])
def test_sm120_takes_no_bf16(planner: Runtime, kv: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"mla_portable_latent512_sm120: {why}"):
        make_plan(planner, latent_call(dtypes=(kv, BF16, BF16)), device_facts=describe_device(120), backend="native")


def test_a_step_sends_its_tensors(stub_runtime: Runtime, standin: StandIn) -> None:
    given = latent_call(
        BATCH, 3, lse=view("float32", BATCH, 3, HEADS), mask=MASK, sinks=SINKS, softmax_scale=SCALE, output_scale=FACTOR
    )
    run(make_plan(stub_runtime, given), given)
    seen = sent(standin)
    tensors = ("q", "page_table", "seq_lens", "out", "mask", "sinks")
    assert [seen[name] for name in tensors] == [given[name].pointer for name in tensors]
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (SCALE.pointer, FACTOR.pointer)
    assert seen["softmax_scale_log2"] == pytest.approx(LOG2_E)


def test_caches_of_one_form_share_a_plan(stub_runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(stub_runtime)
    for pointer in (0x7F0010000000, 0x7F0020000000):
        run(plan, latent_call(kv_cache=view("bfloat16", PAGES, PAGE, 576, pointer=pointer)))
    addresses = [call.seen["address"] for call in standin.calls("cuTensorMapEncodeTiled")]
    assert addresses == [hex(0x7F0010000000), hex(0x7F0020000000)]


def test_a_tensor_of_another_form_is_named(stub_runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(stub_runtime)
    with pytest.raises(UsageError, match="kv_cache: dtype, shape, strides, device"):
        run(plan, latent_call(kv_cache=view("bfloat16", PAGES + 1, PAGE, 576)))
    assert "cuLaunchKernelEx" not in standin.names()


def test_an_address_that_no_kernel_takes_is_named(stub_runtime: Runtime) -> None:
    plan = make_plan(stub_runtime)
    run(plan)
    with pytest.raises(UsageError, match="q: address 0x7f0000100008, expected a multiple of 16"):
        run(plan, latent_call(q=replace(latent_call()["q"], pointer=0x7F0000100008)))


def test_a_preloaded_kernel_is_not_loaded_again(stub_runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(stub_runtime)
    plan.preload()
    run(plan)
    assert standin.names().count("cuModuleLoadData") == 1


def test_counters_lie_in_semaphores(stub_runtime: Runtime, standin: StandIn) -> None:
    run(make_plan(stub_runtime), workspace=SemaphoreWorkspace((0x7F0100000000, 8 << 20), (0x7F0200000000, 64 << 20)))
    seen = sent(standin)
    assert (seen["status"], seen["partial_statistics"]) == (0x7F0100000000, 0x7F0200000000)
    assert 0x7F0100000000 < seen["counters"] < 0x7F0200000000


def test_too_little_scratch_names_the_bytes(stub_runtime: Runtime) -> None:
    plan = make_plan(stub_runtime)
    with pytest.raises(WorkspaceError, match=r"scratch of 64 bytes: \d+ bytes are needed"):
        run(plan, workspace=SemaphoreWorkspace((0x7F0100000000, 8 << 20), (0x7F0200000000, 64)))


def test_a_workspace_of_the_stated_bytes_suffices(stub_runtime: Runtime) -> None:
    plan = make_plan(stub_runtime)
    assert plan.workspace_bytes == workspace_size(plan.regions)
    assert plan.prepare(0).nbytes >= plan.workspace_bytes


def test_what_was_clamped_is_told_once(stub_runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(stub_runtime)
    workspace = plan.prepare(0)
    run(plan, workspace=workspace)
    stub_runtime.driver.fill_words(sent(standin)["status"], 5, 1, 0)
    with pytest.raises(ClampedInputError, match="a length over max_seq_len and a page id outside the pool"):
        plan.check(workspace)
    plan.check(workspace)


@pytest.fixture
def decode(stub_runtime: Runtime) -> Callable[..., Any]:
    """The plain function on made-up tensors with some options."""
    stub_runtime.memory = MadeUpMemory()

    def call(given: dict[str, Any] | None = None, **options: Any) -> Any:
        asked = {"max_seq_len": 1000, "softmax_scale": 0.5, "runtime": stub_runtime}
        return mla_decode(**{**asked, **(given or latent_call()), **options})

    return call


def test_it_keeps_its_plan_while_lengths_grow(decode: Callable[..., Any], standin: StandIn) -> None:
    for bound in (513, 700, 1024):
        decode(max_seq_len=bound)
    assert [sent(standin, i)["max_seq_len"] for i in range(3)] == [513, 700, 1024]
    assert len({call.seen["grid"] for call in standin.calls("cuLaunchKernelEx")}) == 1


@pytest.mark.parametrize("lead", [(BATCH,), (BATCH, 3)])
def test_an_output_is_made_of_the_latent_columns(
    decode: Callable[..., Any], stub_runtime: Runtime, lead: tuple[int, ...]
) -> None:
    out = decode({**latent_call(*lead), "out": None})
    assert (out.shape, out.dtype) == ((*lead, HEADS, 512), "bfloat16")


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        ((0, 3, 2, 4, 7), "3 is followed by 2, expected none to decrease"),
        ((0, 3, 3, 4, 8), "from 0 to 8, expected from 0 to q's 7 tokens"),
        ((1, 3, 3, 4, 7), "from 1 to 7"),
    ],
)
def test_query_sums_that_are_read_back_are_checked(
    decode: Callable[..., Any], stub_runtime: Runtime, standin: StandIn, sums: tuple[int, ...], words: str
) -> None:
    cu = stub_runtime.memory.tensor("int32", 5, values=sums)
    with pytest.raises(UsageError, match=f"q_cu_seq_lens: {words}"):
        decode(ragged_call(7, q_cu_seq_lens=cu))
    assert "cuModuleLoadData" not in standin.names()


def test_query_sums_are_read_back_only_without_a_bound(
    decode: Callable[..., Any], stub_runtime: Runtime, standin: StandIn
) -> None:
    cu = stub_runtime.memory.tensor("int32", 5, values=(0, 3, 3, 4, 7))
    decode(ragged_call(7, q_cu_seq_lens=cu), max_q_len=16)
    assert (sent(standin)["q_len"], stub_runtime.memory.reads) == (16, [])
    decode(ragged_call(7, q_cu_seq_lens=cu))
    assert (sent(standin)["q_len"], stub_runtime.memory.reads) == (3, [cu.pointer])


def test_a_plan_shows_its_kernels(planner: Runtime) -> None:
    plan = make_plan(planner, device_facts=H200)
    assert repr(plan) == f"MlaDecodePlan({plan.selections[0].kernel.name}; workspace of {plan.workspace_bytes} bytes)"
