"""flash-attention's functions on torch tensors: what is made, appending, and tracing. Its CPU build serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flash_attn, flash_attn_interface
from cubin_runtime.compat.flash_attn import append_checks
from cubin_runtime.compat.flash_attn import cache as cache_module
from cubin_runtime.compat.flash_attn.options import Options
from cubin_runtime.compat.flash_attn.tensors import _cache, whole_cache
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.append.params import APPEND_KV
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.testing import StandIn
from tests.attention.flash_attn_calls import BATCH, COLUMNS, DIM, HEADS, KV_HEADS, PAGE, PAGES, sent
from tests.attention.host_tensors import memory_of_host_tensors

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BF16, INT32 = torch.bfloat16, torch.int32


@pytest.fixture(autouse=True)
def runtime(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """One for whose calls host tensors are on device 0."""
    hopper.memory = memory_of_host_tensors(monkeypatch)
    return hopper


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the attention that follows an append, by name."""
    seen: dict[str, Any] = {}
    original = cache_module.attend_cache

    def attend_cache(queries: Any, cache: Any, lengths: Any, options: Any) -> Any:
        seen.update(cache=cache, lengths=lengths, invariant=options.batch_invariant)
        return original(queries, cache, lengths, options)

    monkeypatch.setattr("cubin_runtime.compat.flash_attn.functions.attend_cache", attend_cache)
    return seen


def varlen(**changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.zeros(30, HEADS, DIM, dtype=BF16),
        "k": torch.zeros(PAGES, PAGE, KV_HEADS, DIM, dtype=BF16),
        "v": torch.zeros(PAGES, PAGE, KV_HEADS, DIM, dtype=BF16),
        "cu_seqlens_q": torch.tensor([0, 10, 20, 30], dtype=INT32),
        "cu_seqlens_k": torch.tensor([0, 100, 150, 450], dtype=INT32),
        "max_seqlen_q": 10,
        "max_seqlen_k": 300,
        "block_table": torch.zeros(BATCH, COLUMNS, dtype=INT32),
    }
    return {**given, **changes}


def cached(q_len: int = 1, new: int = 0, **changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.zeros(BATCH, q_len, HEADS, DIM, dtype=BF16),
        "k_cache": torch.zeros(PAGES, PAGE, KV_HEADS, DIM, dtype=BF16),
        "v_cache": torch.zeros(PAGES, PAGE, KV_HEADS, DIM, dtype=BF16),
        "cache_seqlens": torch.tensor([5, 0, 70], dtype=INT32),
        "block_table": torch.zeros(BATCH, COLUMNS, dtype=INT32),
        "causal": True,
    }
    tokens = {name: torch.zeros(BATCH, new, KV_HEADS, DIM, dtype=BF16) for name in ("k", "v") if new}
    return {**given, **tokens, **changes}


def unpaged(tokens: int, requests: int = BATCH) -> dict[str, Any]:
    caches = {name: torch.zeros(requests, tokens, KV_HEADS, DIM, dtype=BF16) for name in ("k_cache", "v_cache")}
    return {**caches, "block_table": None}


def appended(standin: StandIn) -> dict[str, Any]:
    (first, _) = standin.calls("cuLaunchKernelEx")
    return APPEND_KV.unpack(bytes.fromhex(first.seen["parameter0"]))


def test_lengths_in_pages_are_made_from_running_sums(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = flash_attn.attention.differences
    monkeypatch.setattr(flash_attn.attention, "differences", lambda *a: made.append(original(*a)) or made[-1])
    flash_attn.flash_attn_varlen_func(**varlen())
    (lengths,) = made
    assert lengths.tolist() == [100, 50, 300]
    assert (sent(standin)["seq_lens"], lengths.dtype) == (lengths.data_ptr(), INT32)


def test_sinks_of_16_bits_are_converted(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = torch.arange(HEADS, dtype=BF16)
    made = []
    original = flash_attn.options.in_float32
    monkeypatch.setattr(flash_attn.options, "in_float32", lambda x: made.append(original(x)) or made[-1])
    flash_attn.flash_attn_varlen_func(**varlen(s_aux=sinks))
    assert (made[0].dtype, made[0].tolist()) == (torch.float32, list(range(HEADS)))
    assert sent(standin)["sinks"] == made[0].data_ptr()


def in_functionalize(make: Callable[[], Any]) -> None:
    torch.func.functionalize(lambda _: make())(torch.zeros(()))


def in_grad(make: Callable[[], Any]) -> None:
    torch.func.grad(lambda x: (make(), x)[1])(torch.zeros(()))


def in_fake_mode(make: Callable[[], Any]) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        make()


@pytest.mark.parametrize("within", [in_functionalize, in_grad, in_fake_mode])
def test_tables_made_in_a_transform_or_a_mode_are_not_kept(within: Callable[[Any], None]) -> None:
    like = torch.zeros(BATCH, 1, HEADS, DIM, dtype=BF16)
    _cache.clear()
    within(lambda: whole_cache(like, BATCH, 7)[0])
    table, lengths = whole_cache(like, BATCH, 7)
    assert (type(table), table.flatten().tolist(), lengths.tolist()) == (torch.Tensor, [*range(BATCH)], [7] * BATCH)
    assert table.data_ptr() != 0
    assert whole_cache(like, BATCH, 7)[0] is table


def test_the_log_sum_exp_is_a_tensor_of_the_peers_shape() -> None:
    _, lse, _ = flash_attn.flash_attn_varlen_func(**varlen(return_attn_probs=True))
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((HEADS, 30), torch.float32, True)
    _, lse = flash_attn.flash_attn_with_kvcache(**cached(9, return_softmax_lse=True))
    assert (lse.shape, lse.dtype) == ((BATCH, HEADS, 9), torch.float32)


@pytest.mark.parametrize(("q_len", "symbol"), [(1, "paged_decode"), (9, "context_attention")])
def test_new_tokens_are_appended_before_attention(
    standin: StandIn, kept: dict[str, Any], q_len: int, symbol: str
) -> None:
    given = cached(q_len, new=3)
    flash_attn.flash_attn_with_kvcache(**given)
    seen = appended(standin)
    assert symbol in standin.calls("cuLaunchKernelEx")[1].seen["symbol"]
    pointers = [seen[name] for name in ("key", "value", "k_cache", "v_cache", "page_table", "seq_lens")]
    names = ("k", "v", "k_cache", "v_cache", "block_table", "cache_seqlens")
    assert pointers == [given[name].data_ptr() for name in names]
    assert kept["lengths"].tolist() == [8, 3, 73]
    assert given["cache_seqlens"].tolist() == [5, 0, 70]


def test_new_tokens_go_behind_the_lengths(standin: StandIn) -> None:
    flash_attn.flash_attn_with_kvcache(**cached(new=3))
    assert appended(standin)["lengths_include_new"] == 0


def test_ragged_new_tokens(standin: StandIn, kept: dict[str, Any]) -> None:
    sums = torch.tensor([0, 1, 1, 6], dtype=INT32)
    new = {name: torch.zeros(6, KV_HEADS, DIM, dtype=BF16) for name in ("k", "v")}
    flash_attn_interface.flash_attn_with_kvcache(**cached(**new, cu_seqlens_k_new=sums))
    assert appended(standin)["cum_seq_lens"] == sums.data_ptr()
    assert kept["lengths"].tolist() == [6, 0, 75]


def test_a_cache_without_pages_is_one_page_of_each_request(standin: StandIn, kept: dict[str, Any]) -> None:
    flash_attn.flash_attn_with_kvcache(**cached(new=1, **unpaged(500)))
    seen = appended(standin)
    assert (seen["columns"], seen["num_pages"], kept["cache"].table) == (1, BATCH, None)
    assert kept["lengths"].tolist() == [6, 1, 71]


@pytest.mark.parametrize(("tokens", "log2"), [(512, 9), (500, 30), (16, 4), (5000, 30)])
@pytest.mark.parametrize("gap", [0, 3])
def test_requests_of_a_cache_are_chosen_by_a_page_table(standin: StandIn, tokens: int, log2: int, gap: int) -> None:
    chosen = torch.tensor([4, 0, 2], dtype=INT32)
    caches = unpaged(tokens + gap, 5)
    given = {name: None if cache is None else cache[:, :tokens] for name, cache in caches.items()}
    flash_attn.flash_attn_with_kvcache(**cached(cache_batch_idx=chosen, **given))
    (launch,) = standin.calls("cuLaunchKernelEx")
    assert "paged_decode" in launch.seen["symbol"]
    seen = PAGED_DECODE_TMA.unpack(bytes.fromhex(launch.seen["parameter0"]))
    assert (seen["page_table"], seen["table_stride"]) == (chosen.data_ptr(), 1)
    assert [seen[name] for name in ("num_pages", "page_size_log2", "max_seq_len")] == [5, log2, tokens]


@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal", "symbol"),
    [
        (1, 2047, True, "context_attention"),
        (1, 2048, False, "paged_decode"),
        (1, 9001, True, "paged_decode"),
        (8, 9001, True, "paged_decode"),
        (8, 9001, False, "context_attention"),
        (9, 9001, True, "context_attention"),
    ],
)
def test_few_tokens_over_many_keys_are_decoded_without_a_cache(
    standin: StandIn, q_len: int, kv_len: int, causal: bool, symbol: str
) -> None:
    q = torch.zeros(2, q_len, HEADS, DIM, dtype=BF16)
    # Heads in front of tokens, as a cache of transformers has them.
    k, v = (torch.zeros(2, KV_HEADS, kv_len, DIM, dtype=BF16).transpose(1, 2) for _ in range(2))
    out = flash_attn.flash_attn_func(q, k, v, causal=causal)
    assert out.shape == q.shape
    flash_attn.flash_attn_func(q, k, v, causal=causal, deterministic=True)
    launch, other = standin.calls("cuLaunchKernelEx")
    assert symbol in launch.seen["symbol"]
    assert "context_attention" in other.seen["symbol"]


@pytest.mark.parametrize(("dim", "value_dim", "symbol"), [(128, 128, "paged_decode"), (192, 128, "context_attention")])
def test_one_token_over_many_keys_of_any_head_dimension(
    standin: StandIn, dim: int, value_dim: int, symbol: str
) -> None:
    q, k, v = (
        torch.zeros(1, n, KV_HEADS, width, dtype=BF16) for n, width in ((1, dim), (2048, dim), (2048, value_dim))
    )
    assert flash_attn.flash_attn_func(q, k, v).shape == (1, 1, KV_HEADS, value_dim)
    assert symbol in standin.calls("cuLaunchKernelEx")[0].seen["symbol"]


@pytest.mark.parametrize("requests", [1, 3])
def test_keys_of_another_number_of_requests_are_refused_where_they_would_be_decoded(
    standin: StandIn, requests: int
) -> None:
    q = torch.zeros(2, 1, HEADS, DIM, dtype=BF16)
    k, v = (torch.zeros(requests, 2048, KV_HEADS, DIM, dtype=BF16) for _ in range(2))
    with pytest.raises(UsageError, match=rf"^k: shape \({requests}, 2048, 2, 128\), expected \(2, 2048, 2, 128\)"):
        flash_attn.flash_attn_func(q, k, v)
    with pytest.raises(UsageError, match=r"^k_cache: shape"):
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.zeros(2, dtype=INT32))
    assert standin.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize(("given", "lengths"), [(7, [7, 7, 7]), (None, [COLUMNS * PAGE] * BATCH)])
def test_lengths_that_are_all_the_same(kept: dict[str, Any], given: Any, lengths: list[int]) -> None:
    flash_attn.flash_attn_with_kvcache(**cached(cache_seqlens=given))
    assert (kept["lengths"].tolist(), kept["lengths"].dtype) == (lengths, INT32)


@pytest.mark.parametrize("cache", [unpaged(500), {}], ids=["requests", "pages"])
def test_new_tokens_need_lengths(standin: StandIn, cache: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^cache_seqlens: None with k"):
        flash_attn.flash_attn_with_kvcache(**cached(new=1, cache_seqlens=None, **cache))
    assert standin.calls("cuLaunchKernelEx") == []


REFUSED_ATTENTION: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(BATCH, 1, HEADS, DIM)}, "q: dtype float32, expected bfloat16"),
    ({"q": torch.zeros(BATCH, 1, 3, DIM, dtype=BF16)}, "q: 3 heads over 2 KV heads"),
    ({"q": torch.zeros(BATCH, 1, HEADS, DIM + 1, dtype=BF16)[..., 1:]}, "q: address|q: strides"),
    ({"q": torch.zeros(BATCH, 1, HEADS, DIM, dtype=BF16, requires_grad=True)}, "q: requires grad"),
    ({"softmax_scale": float("nan")}, "softmax_scale=nan: expected a finite number"),
    ({"softmax_scale": torch.zeros(3)}, r"softmax_scale: shape \(3,\)"),
    ({"window_size": (1, 2, 3)}, "window_size="),
    ({"softcap": -1.0}, "softcap=-1.0: expected 0"),
    ({"s_aux": torch.zeros(5)}, r"s_aux: shape \(5,\)"),
    ({"learnable_sink": torch.zeros(HEADS, dtype=torch.int16)}, "learnable_sink: dtype int16"),
    ({"k_descale": torch.ones(1)}, "k_descale: a tensor with bfloat16 keys"),
    ({"out": torch.zeros(BATCH, 2, HEADS, DIM, dtype=BF16)}, "out: shape"),
    ({"out": torch.zeros(1, 1, HEADS, DIM, dtype=BF16).expand(BATCH, -1, -1, -1)}, "out: strides .*no overlapping"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_ATTENTION)
@pytest.mark.parametrize("calls_before", [0, 9])
def test_a_call_that_is_refused_has_appended_nothing(
    standin: StandIn, changes: dict[str, Any], message: str, calls_before: int
) -> None:
    arguments = cached(new=1)
    for _ in range(calls_before):
        flash_attn.flash_attn_with_kvcache(**arguments)
    standin.clear_log()
    with pytest.raises(UsageError, match=f"^({message})"):
        flash_attn.flash_attn_with_kvcache(**{**arguments, **changes})
    assert standin.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize("q_len", [1, 9])
def test_attention_behind_an_append_is_checked_once_for_calls_alike(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch, q_len: int
) -> None:
    checks = []
    monkeypatch.setattr(append_checks, "attend_cache", lambda *_: checks.append(q_len))
    rows = torch.zeros(BATCH * q_len * HEADS * DIM + 8, dtype=BF16)
    for first in (0, 8, 2, 2, 0):  # of 16 bytes, or of 4
        q = rows[first : rows.numel() - 8 + first].view(BATCH, q_len, HEADS, DIM)
        for _ in range(2):
            append_checks.check_before_append(
                cache_module.queries_of(q, None, None), *_checked_with(cached(q_len, new=1))
            )
    assert len(checks) == 3


def _checked_with(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """A cache, its lengths and options as a call with these arguments has them."""
    cache = cache_module.cache_of(
        arguments["k_cache"], arguments["v_cache"], arguments["block_table"], "block_table", None, BATCH
    )
    options = Options(
        names={},
        window_size=(-1, -1),
        softmax_scale=None,
        causal=True,
        softcap=0.0,
        sinks=None,
        out=None,
        returns_lse=False,
        batch_invariant=False,
    )
    return cache, arguments["cache_seqlens"], options


NARROW = torch.zeros(BATCH, 1, 1, DIM, dtype=BF16)


def _ragged(sums: Any) -> dict[str, Any]:
    return {"cu_seqlens_k_new": sums, **{name: torch.zeros(6, KV_HEADS, DIM, dtype=BF16) for name in ("k", "v")}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": NARROW}, r"k: shape \(3, 1, 1, 128\)"),
        ({"v": NARROW}, r"v: shape \(3, 1, 1, 128\)"),
        ({"k": NARROW.to(torch.float16)}, "k: dtype float16"),
        ({"v_cache": torch.zeros(PAGES, PAGE, 1, DIM, dtype=BF16)}, "v_cache: shape"),
        ({"cache_seqlens": torch.zeros(5, dtype=INT32)}, r"cache_seqlens: shape \(5,\)"),
        ({"cu_seqlens_k_new": torch.zeros(4, dtype=INT32)}, "k: shape .*expected 3 dimensions"),
        ({"k": None}, "v: given without k, expected None"),
        ({"v": None}, "v: None with k"),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.uint32)}, "cache_seqlens: dtype uint32, expected int32"),
        ({"cache_seqlens": torch.eye(3, dtype=INT32).to_sparse()}, "cache_seqlens: layout torch.sparse_coo"),
        (_ragged(torch.zeros(3, dtype=INT32)), r"cu_seqlens_k_new: shape \(3,\), expected \(4,\)"),
        (_ragged(torch.zeros(4)), "cu_seqlens_k_new: dtype float32, expected int32"),
        (_ragged(torch.zeros((), dtype=INT32)), r"cu_seqlens_k_new: shape \(\), expected 1 dim"),
        (_ragged(torch.zeros(4, dtype=INT32, device="meta")), "cu_seqlens_k_new: on meta, cache_seqlens is on cpu"),
        ({"cache_batch_idx": torch.zeros(4, dtype=INT32)}, r"cache_batch_idx: shape \(4,\), expected \(3,\)"),
        ({"cache_batch_idx": torch.zeros(3)}, "cache_batch_idx: dtype float32, expected int32"),
        ({"cache_batch_idx": torch.zeros(3, dtype=INT32, device="meta")}, "cache_batch_idx: on meta, block_table is"),
        (
            {
                "cache_batch_idx": torch.zeros(3, dtype=INT32),
                "block_table": torch.zeros(3, COLUMNS, dtype=torch.uint8),
            },
            "block_table: dtype uint8, expected int32",
        ),
        (
            {
                "cache_batch_idx": torch.zeros(3, dtype=INT32),
                "block_table": torch.zeros(0, COLUMNS, dtype=INT32),
            },
            "block_table: shape .*expected 1 row or more",
        ),
    ],
)
def test_an_append_names_the_callers_arguments(standin: StandIn, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        flash_attn.flash_attn_with_kvcache(**cached(new=1) | changes)
    assert standin.calls("cuLaunchKernelEx") == []


def test_calls_like_earlier_ones_take_fast_paths(runtime: Runtime, standin: StandIn) -> None:
    given = cached(new=1)
    flash_attn.flash_attn_with_kvcache(**given)
    paths = sum(len(paths.entries) for paths in runtime.fast_paths.values())
    for _ in range(3):
        flash_attn.flash_attn_with_kvcache(**given)
    assert (paths, sum(len(paths.entries) for paths in runtime.fast_paths.values())) == (2, 2)
    assert len(standin.calls("cuLaunchKernelEx")) == 8


def _traced(function: Any, given: dict[str, Any]) -> list[str]:
    """The ops of ours in the one graph that torch makes of a call."""
    found: list[str] = []

    def backend(module: Any, _: Any) -> Any:
        found.extend(str(node.target) for node in module.graph.nodes if "cubin_runtime" in str(node.target))
        return lambda *inputs: [torch.zeros(1)] * 8

    torch._dynamo.reset()
    torch.compile(lambda: function(**given), backend=backend, fullgraph=True)()
    return found


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_torch_traces_a_call_as_one_op(module: Any) -> None:
    assert _traced(module.flash_attn_varlen_func, varlen(return_attn_probs=True)) == ["cubin_runtime.context_attention"]
    assert _traced(module.flash_attn_with_kvcache, cached(9, return_softmax_lse=True)) == [
        "cubin_runtime.context_attention"
    ]


def test_torch_traces_append_and_decode_as_two_ops() -> None:
    assert _traced(flash_attn.flash_attn_with_kvcache, cached(new=1)) == [
        "cubin_runtime.append_kv",
        "cubin_runtime.paged_decode",
    ]


def test_layers_that_ask_for_the_same_lengths_get_the_same_tensors() -> None:
    like = torch.empty(1)
    table, lengths = whole_cache(like, 3, 40)
    assert (table.tolist(), lengths.tolist()) == ([[0], [1], [2]], [40] * 3)
    assert whole_cache(torch.empty(2), 3, 40)[1] is lengths
    assert whole_cache(like, 3, 41)[1].tolist() == [41] * 3
    for length in range(200):  # more than are kept
        assert whole_cache(like, 2, length)[1].tolist() == [length] * 2
    assert not whole_cache(like, 3, 40)[0].is_inference()


def test_tensors_of_a_traced_call_are_its_own() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        assert isinstance(whole_cache(torch.empty(1), 5, 7)[1], FakeTensor)
    assert type(whole_cache(torch.empty(1), 5, 7)[1]) is torch.Tensor


def test_query_tokens_that_are_not_used_become_requests_without_keys(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    original = flash_attn.attention.context_attention

    def context_attention(*given: Any, **named: Any) -> Any:
        seen.update(named)
        return original(*given, **named)

    monkeypatch.setattr(flash_attn.attention, "context_attention", context_attention)
    used = torch.tensor([4, 0, 10], dtype=INT32)
    descale = torch.arange(6, dtype=torch.float32).view(3, 2)
    caches = {name: varlen()[name].to(torch.float8_e4m3fn) for name in ("k", "v")}
    given = varlen(seqused_q=used, seqused_k=torch.tensor([7, 8, 9], dtype=INT32), k_descale=descale, **caches)
    flash_attn.flash_attn_varlen_func(**given)
    assert seen["q_cu_seq_lens"].tolist() == [0, 4, 10, 10, 20, 30, 30]
    assert seen["seq_lens"].tolist() == [7, 0, 8, 0, 9, 0]
    assert seen["page_table"].shape == (6, COLUMNS)
    assert seen["k_scale"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    ragged = {name: torch.zeros(450, KV_HEADS, DIM, dtype=BF16) for name in ("k", "v")}
    flash_attn.flash_attn_varlen_func(**varlen(seqused_q=used, block_table=None, **ragged))
    assert seen["kv_cu_seq_lens"].tolist() == [0, 100, 100, 150, 150, 450, 450]


def test_numbers_of_used_tokens_that_no_request_has_are_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(flash_attn.attention, "context_attention", lambda *_, **named: seen.update(named))
    flash_attn.flash_attn_varlen_func(**varlen(seqused_q=torch.tensor([-3, 25, 2**31 - 1], dtype=INT32)))
    assert seen["q_cu_seq_lens"].tolist() == [0, 0, 10, 20, 20, 30, 30]


USED = torch.zeros(BATCH, dtype=INT32)
NESTED = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seqused_q": torch.zeros(4, dtype=INT32)}, r"seqused_q: shape \(4,\), expected \(3,\)"),
        ({"seqused_q": USED.long()}, "seqused_q: dtype int64, expected int32"),
        ({"seqused_q": USED.to("meta")}, "seqused_q: on meta, cu_seqlens_q is on cpu"),
        ({"cu_seqlens_q": torch.zeros(4, dtype=torch.uint32)}, "cu_seqlens_q: dtype uint32, expected int32"),
        ({"cu_seqlens_q": torch.zeros(0, dtype=INT32)}, r"cu_seqlens_q: shape \(0,\), expected \(batch"),
        ({"cu_seqlens_k": torch.zeros(4, dtype=torch.bool)}, "cu_seqlens_k: dtype bool, expected int32"),
        ({"cu_seqlens_k": torch.zeros(3, dtype=INT32)}, r"cu_seqlens_k: shape \(3,\), expected \(4,\)"),
        ({"seqused_k": torch.zeros((), dtype=INT32)}, r"seqused_k: shape \(\), expected 1 dim"),
        ({"seqused_k": torch.zeros(3, dtype=INT32).to_sparse()}, "seqused_k: layout torch.sparse_coo"),
        ({"block_table": torch.zeros((), dtype=INT32)}, r"block_table: shape \(\), expected 2 dim"),
        ({"v_descale": torch.eye(3).to_sparse()}, "v_descale: layout torch.sparse_coo"),
        ({"v_descale": NESTED}, "v_descale: a nested tensor"),
        ({"s_aux": NESTED}, "s_aux: a NestedTensor"),
        ({"k": NESTED}, "k: a nested tensor"),
    ],
)
def test_a_wrong_tensor_that_others_would_be_made_of_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"^{words}"):
        flash_attn.flash_attn_varlen_func(**varlen(**{"seqused_q": USED, **changes}))


def test_one_split_may_come_as_a_tensor(kept: dict[str, Any]) -> None:
    flash_attn.flash_attn_with_kvcache(**cached(num_splits=torch.tensor(1)))
    assert kept["invariant"] is True


@pytest.mark.parametrize("q_len", [1, 9])
def test_rows_of_a_block_table_are_chosen(standin: StandIn, kept: dict[str, Any], q_len: int) -> None:
    table = torch.arange(5 * COLUMNS, dtype=INT32).view(5, COLUMNS)
    rows = torch.tensor([3, 0, 4], dtype=INT32)
    flash_attn.flash_attn_with_kvcache(**cached(q_len, block_table=table, cache_batch_idx=rows, rotary_seqlens=rows))
    assert kept["cache"].table[:, 0].tolist() == [3 * COLUMNS, 0, 4 * COLUMNS]


def test_rows_that_a_block_table_does_not_have_are_without_pages(kept: dict[str, Any]) -> None:
    table = torch.arange(5 * COLUMNS, dtype=INT32).view(5, COLUMNS)
    flash_attn.flash_attn_with_kvcache(
        **cached(new=1, block_table=table, cache_batch_idx=torch.tensor([-1, 4, 5], dtype=INT32))
    )
    assert kept["cache"].table.tolist() == [[-1] * COLUMNS, table[4].tolist(), [-1] * COLUMNS]
    assert kept["cache"].table.dtype == INT32


@pytest.mark.parametrize("q_len", [1, 9])
def test_descales_reach_the_kernel(standin: StandIn, q_len: int) -> None:
    caches = {name: cached()[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    descale = torch.ones(1).expand(BATCH, KV_HEADS)
    flash_attn.flash_attn_with_kvcache(**cached(q_len, **caches, k_descale=descale, v_descale=descale))
    (launch,) = standin.calls("cuLaunchKernelEx")
    seen = LAYOUTS["ContextAttentionE4m3Params" if q_len == 9 else "PagedDecodeTmaE4m3Params"].unpack(
        bytes.fromhex(launch.seen["parameter0"])
    )
    assert (seen["k_scale"], seen["v_scale"]) == (descale.data_ptr(),) * 2
    assert {seen[f"{name}_scale_{of}_stride"] for name in "kv" for of in ("request", "head")} == {0}


def test_a_decode_over_e4m3_that_has_to_have_the_bits_of_a_prompt_is_a_decode(standin: StandIn) -> None:
    caches = {name: cached()[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    flash_attn.flash_attn_with_kvcache(**cached(1, **caches, num_splits=1))
    assert "paged_decode" in standin.calls("cuLaunchKernelEx")[0].seen["symbol"]
