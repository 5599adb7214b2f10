"""What transformers' attention function launches: the parameters of the kernels, on a recording driver."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from cubin_runtime import Runtime
from cubin_runtime.attention import paged_decode
from cubin_runtime.errors import UsageError
from cubin_runtime.integrations.transformers.arguments import Packed
from cubin_runtime.integrations.transformers.attention import attention
from cubin_runtime.integrations.transformers.continuous import _page_table_of_step
from cubin_runtime.integrations.transformers.masks import _reads, mask, read, read_before
from cubin_runtime.integrations.transformers.operators import Operators
from cubin_runtime.launch.driver import DriverCallError
from cubin_runtime.testing import StandIn
from tests.integrations.launch_records import integers, launches

torch = pytest.importorskip("torch")
masking = pytest.importorskip("transformers.masking_utils", reason="transformers 5 is not installed (make test-torch)")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
BF16, INT32 = torch.bfloat16, torch.int32
BATCH, HEADS, KV_HEADS, DIM = 3, 8, 2, 128
SCALE = 0.125
NO_WINDOW = 1 << 30
SINKS = torch.arange(HEADS, dtype=torch.float32)


class Attended:
    """Calls of the attention function, whose tensors stay alive while the launches are looked at."""

    def __init__(self, standin: StandIn) -> None:
        self._standin = standin
        self._alive: list[Any] = []

    def __call__(self, **given: Any) -> Any:
        operators = Operators(*map(self._keeping, Operators()))
        out, _ = attention(operators, SimpleNamespace(is_causal=True, layer_idx=0), **given)
        query = given["query"]
        assert out.shape == (query.shape[0], query.shape[2], HEADS, DIM)
        return out

    def _keeping(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self._alive.append((arguments, options))
            return function(*arguments, **options)

        return call

    def launch(self) -> tuple[str, dict[str, Any]]:
        """The name and the parameters of the only kernel that was launched."""
        (launch,) = launches(self._standin)
        return launch


@pytest.fixture
def attend(standin: StandIn) -> Attended:
    return Attended(standin)


def windowed(q_len: int, kv_len: int, **given: Any) -> Any:
    """The mask of a layer with a sliding window."""
    return mask(BATCH, q_len, kv_len, mask_function=masking.sliding_window_causal_mask_function(16), **given)


def states(q_len: int, kv_len: int, batch: int = BATCH) -> dict[str, Any]:
    return {
        # As models have it: projected by token, then transposed.
        "query": torch.zeros(batch, q_len, HEADS, DIM, dtype=BF16).transpose(1, 2),
        "key": torch.zeros(batch, KV_HEADS, kv_len, DIM, dtype=BF16),
        "value": torch.zeros(batch, KV_HEADS, kv_len, DIM, dtype=BF16),
        "attention_mask": mask(batch, q_len, kv_len, q_offset=kv_len - q_len),
        "scaling": SCALE,
    }


def paged_states(q_lens: list[int], past: list[int], block: int, layer_window: int = 1) -> dict[str, Any]:
    """Continuous batching of a layer: request ``i`` has the blocks ``3 i``, ``3 i + 1`` and ``3 i + 2`` of the pool."""
    pool = torch.zeros(9 * block, KV_HEADS, DIM, dtype=BF16)
    kv_lens = [old + new for old, new in zip(past, q_lens, strict=True)]
    sums = [torch.tensor([0, *lens], dtype=INT32).cumsum(0).to(INT32) for lens in (q_lens, kv_lens)]
    firsts = [3 * block * request for request in range(len(q_lens))]
    places = [torch.arange(first, first + length) for first, length in zip(firsts, kv_lens, strict=True)]
    cache = SimpleNamespace(
        block_size=block,
        key_cache=[pool],
        value_cache=[pool.clone()],
        layer_index_to_group_indices={0: (0, 0)},
        sliding_windows={0: layer_window},
        update=lambda key, value, layer, read_index, write_index: (pool[read_index[0]], pool[read_index[0]]),
    )
    return {
        **states(sum(q_lens), sum(q_lens), batch=1),
        "attention_mask": None,
        "cache": cache,
        "cu_seq_lens_q": sums[0],
        "cu_seq_lens_k": sums[1],
        "max_seqlen_q": max(q_lens),
        "max_seqlen_k": max(kv_lens),
        "read_index": [torch.cat(places)],
        "write_index": [torch.cat([place[old:] for place, old in zip(places, past, strict=True)])],
        "block_table": None,
    }


@pytest.mark.parametrize("q_len", [2, 40])
def test_rows_of_one_length(q_len: int, attend: Attended) -> None:
    given = states(q_len, 40)
    out = attend(**given)
    name, sent = attend.launch()
    assert (name, sent["batch"], sent["tokens"], sent["q_len"]) == ("context", BATCH, BATCH * q_len, q_len)
    assert (sent["max_seq_len"], sent["kv_tokens"], sent["out"]) == (40, 40, out.data_ptr())
    assert sent["softmax_scale_log2"] == pytest.approx(SCALE * math.log2(math.e))
    assert (sent["window_right"], sent["soft_cap"], sent["sinks"]) == (0, 0.0, 0)


@pytest.mark.parametrize("q_len", [1, 40])
def test_options_of_layers(q_len: int, attend: Attended) -> None:
    form = windowed(q_len, 40, q_offset=40 - q_len)
    attend(**{**states(q_len, 40), "attention_mask": form}, sliding_window=16, softcap=30.0, s_aux=SINKS)
    _, sent = attend.launch()
    # A window of transformers counts the token's own key, one of the kernels counts those before it.
    assert (sent["window_left"], sent["sinks"]) == (15, SINKS.data_ptr())
    assert sent["soft_cap"] > 0


def test_queries_by_head_are_copied(attend: Attended) -> None:
    given = states(40, 40)
    attend(**{**given, "query": given["query"].contiguous()})
    assert attend.launch()[0] == "context"


@pytest.mark.parametrize("room", [50, 96, 256])
@pytest.mark.parametrize("q_len", [1, 3, 20])
def test_a_cache_with_room_has_a_request_in_each_page(q_len: int, room: int, attend: Attended) -> None:
    lengths = windowed(q_len, room, q_offset=25)
    attend(**{**states(q_len, room), "attention_mask": lengths}, sliding_window=16, s_aux=SINKS)
    name, sent = attend.launch()
    assert name == ("decode" if q_len <= 8 else "context")
    assert integers(sent["seq_lens"], BATCH) == [25 + q_len] * BATCH
    if q_len <= 8:
        assert (sent["num_pages"], sent["table_stride"], sent["page_size_log2"]) == (BATCH, 1, 8 if room == 256 else 30)
    else:
        assert (sent["page_table"], sent["kv_tokens"]) == (0, room)
    assert sent["max_seq_len"] == room
    assert (sent["window_left"], sent["sinks"], sent["q_len"]) == (15, SINKS.data_ptr(), q_len)
    assert sent["softmax_scale_log2"] == pytest.approx(SCALE * math.log2(math.e))


@pytest.mark.parametrize(
    ("q_len", "kv_len", "kernel"),
    [(1, 1, "decode"), (1, 40, "decode"), (1, 2050, "decode"), (3, 2000, "context"), (3, 2050, "decode")],
)
def test_a_few_new_tokens_behind_many_keys_are_decoded(q_len: int, kv_len: int, kernel: str, attend: Attended) -> None:
    attend(**states(q_len, kv_len))
    name, sent = attend.launch()
    assert (name, sent["max_seq_len"]) == (kernel, kv_len)


def described(standin: StandIn, function: Any, *tensors: Any, **options: Any) -> list[dict[str, Any]]:
    """The descriptors of keys and values that a call encodes, and the parameters of its launch."""
    standin.clear_log()
    function(*tensors, **options)
    (_, sent), encoded = launches(standin)[-1], standin.calls("cuTensorMapEncodeTiled")[-2:]
    return [*(dict(each.seen) for each in encoded), sent]


@pytest.fixture(params=["with torch's guards alone", "as installed"])
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "with torch's guards alone":
        monkeypatch.setattr("cubin_runtime.attention.fast_path.guards.accelerator", lambda: None)


@pytest.mark.usefixtures("guards")
def test_caches_that_grow_share_a_plan_and_are_read_as_one_alone_is(standin: StandIn, hopper: Runtime) -> None:
    operators, module = Operators(), SimpleNamespace(is_causal=True, layer_idx=0)
    made = []
    for kv_len in (2100, 2303, 2304, 2305, 2305, 4000, 2101):
        given = states(1, kv_len)
        q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
        table, lengths = torch.arange(BATCH, dtype=INT32)[:, None], torch.full((BATCH,), kv_len, dtype=INT32)
        caches = (q, k, v, table, lengths)
        alone = described(standin, paged_decode, *caches, max_seq_len=kv_len, softmax_scale=SCALE)
        before = hopper.stats().plans_made
        found = described(standin, attention, operators, module, **given)
        made.append(hopper.stats().plans_made - before)
        assert found[:2] == alone[:2]
        assert integers(found[2]["seq_lens"], BATCH) == [kv_len] * BATCH
        assert integers(found[2]["page_table"], BATCH) == list(range(BATCH))
        for name in ("q", "max_seq_len", "softmax_scale_log2", "kv_heads", "group", "window_left", "tokens"):
            assert found[2][name] == alone[2][name]
    assert made == [1, 0, 0, 0, 0, 0, 0]


def test_caches_that_grow_beyond_a_power_of_two_get_another_plan(standin: StandIn, hopper: Runtime) -> None:
    before = hopper.stats().plans_made
    kv_lens = [1, 2, 1024, 1025, 2048, 2049]
    for kv_len in kv_lens:
        attention(Operators(), SimpleNamespace(is_causal=True, layer_idx=0), **states(1, kv_len))
    assert hopper.stats().plans_made - before == 3
    assert [sent["max_seq_len"] for _, sent in launches(standin)] == kv_lens


def test_a_layer_sends_what_the_one_before_did_but_for_its_tensors(standin: StandIn, hopper: Runtime) -> None:
    module = SimpleNamespace(is_causal=True, layer_idx=0)
    layers = [states(1, 2100) for _ in range(3)]
    attention(Operators(), module, **layers[0])  # which learns the form
    standin.clear_log()
    outs = [attention(Operators(), module, **given)[0] for given in layers]
    sent = [parameters for _, parameters in launches(standin)]
    assert [each["q"] for each in sent] == [given["query"].data_ptr() for given in layers]
    assert [each["out"] for each in sent] == [out.data_ptr() for out in outs]
    for name, states_of in (("k_map", "key"), ("v_map", "value")):
        begins = [int.from_bytes(each[name][:8], "little") for each in sent]  # the stand-in's descriptors
        assert begins == [given[states_of].data_ptr() for given in layers]
    maps = [int(call.seen["address"], 16) for call in standin.calls("cuTensorMapEncodeTiled")]
    assert maps == [given[name].data_ptr() for given in layers for name in ("key", "value")]
    moving = {"q", "out", "k_map", "v_map"}
    rest = [{name: value for name, value in each.items() if name not in moving} for each in sent]
    assert rest == [rest[0]] * 3


def test_a_refused_launch_of_caches_that_grow_is_an_error_and_the_next_one_is_sent(
    standin: StandIn, hopper: Runtime
) -> None:
    module, given = SimpleNamespace(is_causal=True, layer_idx=0), states(1, 2100)
    for before in range(2):  # with a new length, and with the one before
        standin.fail("cuLaunchKernelEx", 1, times=2)  # and what says why sends it again
        with pytest.raises(DriverCallError, match="cuLaunchKernelEx"):
            attention(Operators(), module, **given)
        standin.clear_log()
        attention(Operators(), module, **given)
        ((_, sent),) = launches(standin)
        assert (before, sent["max_seq_len"]) == (before, 2100)


def test_layers_over_caches_that_grow_are_profiled_each(hopper: Runtime) -> None:
    seen = list[str]()
    hopper.driver.profiler = SimpleNamespace(enter=lambda kernel: seen.append(kernel) or 0.0, leave=lambda begin: None)
    for _ in range(3):
        attention(Operators(), SimpleNamespace(is_causal=True, layer_idx=0), **states(1, 2100))
    assert len(seen) == 3


def test_layers_with_and_without_sinks_and_windows_alternate(standin: StandIn, hopper: Runtime) -> None:
    given, form = states(1, 2100), windowed(1, 2100, q_offset=2099)
    for _ in range(2):
        attention(Operators(), SimpleNamespace(is_causal=True, layer_idx=0), **given)
        other = {**given, "attention_mask": form, "sliding_window": 16, "s_aux": SINKS}
        attention(Operators(), SimpleNamespace(is_causal=True, layer_idx=1), **other)
    seen = [(sent["window_left"], sent["sinks"]) for _, sent in launches(standin)]
    assert seen == 2 * [(-1, 0), (15, SINKS.data_ptr())]
    assert hopper.stats().plans_made == 2


@pytest.mark.usefixtures("guards")
def test_layers_with_and_without_sinks_alone_alternate(standin: StandIn, hopper: Runtime) -> None:
    given = states(1, 2100)
    for more in 2 * [{}, {"s_aux": SINKS}]:
        attention(Operators(), SimpleNamespace(is_causal=True, layer_idx=0), **given, **more)
    assert [sent["sinks"] for _, sent in launches(standin)] == 2 * [0, SINKS.data_ptr()]
    assert hopper.stats().plans_made == 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"value": torch.zeros(BATCH, KV_HEADS, 2101, DIM, dtype=BF16)}, "v: shape"),
        ({"value": torch.zeros(BATCH, KV_HEADS, 2100, DIM, dtype=torch.float16)}, "v: dtype float16"),
        ({"key": torch.zeros(BATCH, KV_HEADS, 2100, DIM + 4, dtype=BF16)[..., :DIM]}, "k: strides"),
    ],
)
def test_caches_that_grow_are_refused_as_others_are(changed: Any, named: str, hopper: Runtime) -> None:
    module = SimpleNamespace(is_causal=True, layer_idx=0)
    for _ in range(2):
        with pytest.raises(UsageError, match=named):
            attention(Operators(), module, **{**states(1, 2100), **changed})
        attention(Operators(), module, **states(1, 2100))


def test_another_form_than_the_last_one_is_not_taken_for_it(standin: StandIn, hopper: Runtime) -> None:
    module, given = SimpleNamespace(is_causal=True, layer_idx=0), states(1, 2100)
    attention(Operators(), module, **given)
    strided = torch.zeros(BATCH, 2100, KV_HEADS, DIM, dtype=BF16).transpose(1, 2)
    attention(Operators(), module, **{**given, "key": strided})
    *_, k_map, v_map = standin.calls("cuTensorMapEncodeTiled")
    assert k_map.seen["strides"] != v_map.seen["strides"]
    halves = {name: given[name].to(torch.float16) for name in ("query", "key", "value")}
    assert attention(Operators(), module, **{**given, **halves})[0].dtype == torch.float16


def test_a_plain_mask_is_read_by_one_of_the_layers_that_it_is_handed_to() -> None:
    full, other = (mask(BATCH, 1, 40, q_offset=torch.tensor(20), allow_is_causal_skip=False) for _ in range(2))
    assert type(full) is torch.Tensor
    found = [read(made, 1, 40) for made in (full, other)]
    assert all(read_before(made, 1, 40) is mask for made, mask in zip((full, other), found, strict=True))
    assert read_before(full, 1, 41) is None
    full.fill_(7)
    assert read_before(full, 1, 40).lengths.tolist() == [7] * BATCH
    assert len(_reads.masks) == 2
    assert read_before(full.clone(), 1, 40) is None


@pytest.mark.parametrize("q_len", [1, 20])
def test_padding_is_left_out_of_the_running_sums(q_len: int, attend: Attended) -> None:
    valid = torch.ones(BATCH, 40, dtype=torch.bool)
    valid[1, :25] = False
    form = mask(BATCH, q_len, 40, q_offset=40 - q_len, attention_mask=valid)
    attend(**{**states(q_len, 40), "attention_mask": form})
    name, sent = attend.launch()
    middle = min(q_len, 15)
    assert name == "context"
    assert integers(sent["q_cu_seq_lens"], BATCH + 1) == [0, q_len, q_len + middle, 2 * q_len + middle]
    assert integers(sent["kv_cu_seq_lens"], BATCH + 1) == [0, 40, 55, 95]
    assert (sent["q_len"], sent["max_seq_len"]) == (q_len, 40)


@pytest.mark.parametrize("block", [16, 256])
def test_continuous_batching_decodes_from_the_pool(block: int, attend: Attended) -> None:
    attend(**paged_states([1, 1, 1], [20, 0, 30], block), s_aux=SINKS)
    name, sent = attend.launch()
    columns = sent["table_stride"]
    table = integers(sent["page_table"], BATCH * columns)
    lengths = integers(sent["seq_lens"], BATCH)
    assert (name, lengths, columns) == ("decode", [21, 1, 31], -(-31 // block))
    used = [table[row * columns : row * columns + -(-length // block)] for row, length in enumerate(lengths)]
    assert used == [list(range(3 * row, 3 * row + len(pages))) for row, pages in enumerate(used)]
    assert (1 << sent["page_size_log2"], sent["num_pages"], sent["q_len"]) == (block, 9, 1)
    assert (sent["sinks"], sent["window_left"]) == (SINKS.data_ptr(), -1)


def test_continuous_batching_of_prompts_and_decoding_together(attend: Attended) -> None:
    attend(**paged_states([1, 30, 4], [20, 0, 9], 16))
    name, sent = attend.launch()
    assert (name, sent["q_len"], 1 << sent["page_size_log2"]) == ("context", 30, 16)
    assert integers(sent["q_cu_seq_lens"], BATCH + 1) == [0, 1, 31, 35]
    assert integers(sent["seq_lens"], BATCH) == [21, 30, 13]
    assert integers(sent["page_table"], 6)[::2] == [0, 3, 6]


@pytest.mark.parametrize(("block", "layer_window"), [(8, 1), (16, 24)])
def test_continuous_batching_over_a_copy_of_the_keys(block: int, layer_window: int, attend: Attended) -> None:
    given = paged_states([1, 1, 1], [20, 0, 19], block, layer_window)
    attend(**given, sliding_window=None if layer_window == 1 else layer_window)
    name, sent = attend.launch()
    assert (name, sent["page_table"]) == ("context", 0)
    assert integers(sent["kv_cu_seq_lens"], BATCH + 1) == [0, 21, 22, 42]
    assert sent["window_left"] == (NO_WINDOW if layer_window == 1 else layer_window - 1)


@pytest.mark.parametrize(("q_lens", "bound"), [([2, 0, 1], 2), ([1, 1, 1], 3), ([0, 1, 1], 1), ([1, 0, 0], 1)])
def test_continuous_batching_decodes_only_where_each_request_has_one_token(
    q_lens: list[int], bound: int, attend: Attended
) -> None:
    given = paged_states(q_lens, [20, 3, 30], 16)
    attend(**{**given, "max_seqlen_q": bound})
    name, sent = attend.launch()
    assert (name, sent["q_len"], sent["tokens"]) == ("context", bound, sum(q_lens))


def test_continuous_batching_is_causal_whatever_the_layer_says(attend: Attended) -> None:
    attend(**paged_states([1, 30, 4], [20, 0, 9], 16), is_causal=False)
    assert attend.launch()[1]["window_right"] == 0


def test_new_keys_are_written_to_their_places(attend: Attended) -> None:
    given = paged_states([1, 2, 1], [20, 3, 30], 16)
    for number, name in enumerate(("key", "value")):
        given[name] = torch.arange(8).view(4, 2).T[None, :, :, None].expand(1, 2, 4, DIM).to(BF16) + 10 * number
    attend(**given)
    cache = given["cache"]
    for number, stored in enumerate((*cache.key_cache, *cache.value_cache)):
        written = [20, 48 + 3, 48 + 4, 96 + 30]
        assert stored[written][..., 0].tolist() == [
            [10 * number + 2 * row, 10 * number + 2 * row + 1] for row in range(4)
        ]
        assert stored.count_nonzero() <= 8 * DIM


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"cu_seq_lens_q": None, "cu_seq_lens_k": None}, "cu_seq_lens_q, cu_seq_lens_k: None with a paged cache"),
        ({"cu_seq_lens_k": None}, "cu_seq_lens_q, cu_seq_lens_k: one of them"),
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q, cu_seq_lens_k: one of them"),
        ({"position_bias": torch.zeros(1)}, "position_bias=a Tensor"),
    ],
)
@pytest.mark.parametrize("block", [8, 16])  # over a copy of the keys, and over the pages
def test_what_a_paged_cache_lacks_is_refused(changed: Any, named: str, block: int, attend: Attended) -> None:
    with pytest.raises(UsageError, match=named):
        attend(**{**paged_states([1, 1, 1], [20, 0, 19], block), **changed})


@pytest.mark.parametrize("windowed", [False, True])
def test_sums_of_two_kinds_of_layers(windowed: bool, attend: Attended) -> None:
    given = paged_states([1, 1, 1], [20, 0, 19], 16, 24 if windowed else 1)
    other = torch.zeros(4, dtype=INT32)
    kinds = ("sliding_attention", "full_attention") if windowed else ("full_attention", "sliding_attention")
    given["cu_seq_lens_k"] = dict(zip(kinds, (given["cu_seq_lens_k"], other), strict=True))
    given["max_seqlen_k"] = dict(zip(kinds, (given["max_seqlen_k"], 1), strict=True))
    attend(**given, sliding_window=24 if windowed else None)
    _, sent = attend.launch()
    if windowed:
        assert integers(sent["kv_cu_seq_lens"], BATCH + 1) == [0, 21, 22, 42]
    else:
        assert (integers(sent["seq_lens"], 3), sent["max_seq_len"]) == ([21, 1, 20], 32)


def test_bounds_have_two_names(attend: Attended) -> None:
    given = paged_states([1, 30, 4], [20, 0, 9], 16)
    given |= {"max_length_q": given.pop("max_seqlen_q"), "max_length_k": given.pop("max_seqlen_k")}
    attend(**given)
    _, sent = attend.launch()
    assert (sent["q_len"], sent["max_seq_len"]) == (30, 30)


def test_without_bounds_the_tokens_bound(attend: Attended) -> None:
    given = paged_states([1, 30, 4], [0, 0, 0], 8)
    del given["max_seqlen_q"], given["max_seqlen_k"]
    attend(**given)
    _, sent = attend.launch()
    assert (sent["q_len"], sent["max_seq_len"]) == (35, 35)


def test_layers_of_a_step_share_its_page_table_and_the_next_step_makes_its_own() -> None:
    read, sums = torch.arange(32, 64), torch.tensor([0, 20, 32], dtype=INT32)
    packed = Packed(sums, sums, 1, 20)
    first = [_page_table_of_step(layer, read, packed, 16) for layer in (0, 1, 4)]
    assert all(table is first[0][0] and lengths is first[0][1] for table, lengths in first)
    read += 64  # the same tensors, filled anew
    table, _ = _page_table_of_step(0, read, packed, 16)
    assert (table - first[0][0]).tolist() == [[4, 4], [4, 4]]
    other, _ = _page_table_of_step(1, read.clone(), packed, 16)
    assert other is not table
    assert torch.equal(other, table)
