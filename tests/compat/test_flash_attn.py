"""flash-attention's functions over keys of one size and ragged ones: what reaches the kernel, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.compat import flash_attn, flash_attn_interface
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import StandIn
from tests.attention.flash_attn_calls import (
    BATCH,
    COLUMNS,
    DIM,
    HEADS,
    KV_HEADS,
    KV_TOKENS,
    PAGE,
    PAGES,
    TOKENS,
    cache_arguments,
    even_arguments,
    paged_varlen_arguments,
    sent,
    varlen_arguments,
)
from tests.attention.trtllm_calls import MadeUpMemory, made, tensor

pytestmark = pytest.mark.usefixtures("hopper")

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
NO_WINDOW = 1 << 30
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "func": (flash_attn.flash_attn_func, even_arguments),
    "varlen": (flash_attn.flash_attn_varlen_func, varlen_arguments),
    "paged varlen": (flash_attn.flash_attn_varlen_func, paged_varlen_arguments),
    "func of version 3": (flash_attn_interface.flash_attn_func, even_arguments),
    "varlen of version 3": (flash_attn_interface.flash_attn_varlen_func, varlen_arguments),
    "cache": (flash_attn.flash_attn_with_kvcache, lambda memory, **more: cache_arguments(memory, 100, **more)),
    "cache of version 3": (
        flash_attn_interface.flash_attn_with_kvcache,
        lambda memory, **more: cache_arguments(memory, 100, **more),
    ),
}


@pytest.fixture(params=CALLS)
def attend(request: pytest.FixtureRequest, standin: StandIn, memory: MadeUpMemory) -> Callable[..., dict[str, Any]]:
    """Call one of the functions with its usual arguments changed; what arrived."""
    function, arguments = CALLS[request.param]

    def call(**changes: Any) -> dict[str, Any]:
        function(**arguments(memory, **changes))
        return sent(standin)

    return call


def test_sizes_of_requests_of_one_size(standin: StandIn, memory: MadeUpMemory) -> None:
    flash_attn.flash_attn_func(**even_arguments(memory))
    seen = sent(standin)
    sizes = ("batch", "tokens", "q_len", "kv_tokens", "max_seq_len")
    assert [seen[name] for name in sizes] == [BATCH, 300, 100, 300, 300]


def test_sizes_of_ragged_requests(standin: StandIn, memory: MadeUpMemory) -> None:
    given = varlen_arguments(memory)
    flash_attn.flash_attn_varlen_func(**given)
    seen = sent(standin)
    sizes = ("batch", "tokens", "kv_tokens", "q_len", "max_seq_len", "group")
    assert [seen[name] for name in sizes] == [BATCH, TOKENS, KV_TOKENS, 128, 512, HEADS // KV_HEADS]
    sums = given["cu_seqlens_q"].pointer, given["cu_seqlens_k"].pointer, 0
    assert (seen["q_cu_seq_lens"], seen["kv_cu_seq_lens"], seen["seq_lens"]) == sums


def test_lengths_below_the_ragged_ones(standin: StandIn, memory: MadeUpMemory) -> None:
    used = memory.tensor("int32", BATCH)
    flash_attn_interface.flash_attn_varlen_func(**varlen_arguments(memory, seqused_k=used))
    assert sent(standin)["seq_lens"] == used.pointer


def test_a_bound_over_the_keys_is_how_many_there_are(standin: StandIn, memory: MadeUpMemory) -> None:
    flash_attn.flash_attn_varlen_func(**varlen_arguments(memory, max_seqlen_k=1 << 20))
    assert sent(standin)["max_seq_len"] == KV_TOKENS


@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_pages_of_ragged_queries(standin: StandIn, memory: MadeUpMemory, name: str) -> None:
    table, lengths = memory.tensor("int32", BATCH, COLUMNS), memory.tensor("int32", BATCH)
    tables = {"block_table": None, name: table}
    given = paged_varlen_arguments(memory, seqused_k=lengths, max_seqlen_k=1 << 20, **tables)
    flash_attn.flash_attn_varlen_func(**given)
    seen = sent(standin)
    assert (seen["page_table"], seen["seq_lens"]) == (table.pointer, lengths.pointer)
    assert [seen[size] for size in ("num_pages", "page_size_log2", "max_seq_len")] == [PAGES, 6, COLUMNS * PAGE]


@pytest.mark.parametrize(
    ("causal", "window", "left", "right"),
    [
        (False, (-1, -1), NO_WINDOW, NO_WINDOW),
        (True, (-1, -1), NO_WINDOW, 0),
        (True, [100, 0], 100, 0),
        (True, (100, 7), 100, 0),
        (False, (100, 7), 100, 7),
        (False, (-1, 7), NO_WINDOW, 7),
        (False, (0, 0), 0, 0),
        (False, (None, 3), NO_WINDOW, 3),
    ],
)
def test_mask_and_window(
    attend: Callable[..., dict[str, Any]], causal: bool, window: Any, left: int, right: int
) -> None:
    seen = attend(causal=causal, window_size=window)
    assert (seen["window_left"], seen["window_right"]) == (left, right)


def test_the_default_scale_is_that_of_the_head_dimension(attend: Callable[..., dict[str, Any]]) -> None:
    seen = attend()
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(LOG2_E / math.sqrt(DIM)), 1.0)


def test_a_given_scale(attend: Callable[..., dict[str, Any]]) -> None:
    assert attend(softmax_scale=0.25)["softmax_scale_log2"] == pytest.approx(0.25 * LOG2_E)


def test_softcap(attend: Callable[..., dict[str, Any]]) -> None:
    assert attend(softcap=30.0)["soft_cap"] == 30.0


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
def test_sinks(attend: Callable[..., dict[str, Any]], memory: MadeUpMemory, name: str) -> None:
    sinks = memory.tensor("float32", HEADS)
    assert attend(**{name: sinks})["sinks"] == sinks.pointer


@pytest.mark.parametrize("hint", [{"num_splits": 7}, {"pack_gqa": True}], ids=lambda hint: next(iter(hint)))
def test_what_only_tunes_is_accepted(attend: Callable[..., dict[str, Any]], hint: dict[str, Any]) -> None:
    assert attend(**hint)["batch"] == BATCH


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_takes_the_kernel_that_has_the_bits_of_decode(
    attend: Callable[..., dict[str, Any]], standin: StandIn, deterministic: bool
) -> None:
    attend(deterministic=deterministic)
    assert ("segments" in standin.calls("cuLaunchKernelEx")[-1].seen["symbol"]) == deterministic


@pytest.mark.parametrize("name", CALLS)
def test_the_output_is_made_or_given_and_returned(standin: StandIn, memory: MadeUpMemory, name: str) -> None:
    function, arguments = CALLS[name]
    out = function(**arguments(memory))
    assert (sent(standin)["out"], out.dtype, out.shape) == (out.pointer, "bfloat16", arguments(memory)["q"].shape)
    standin.clear_log()
    own = memory.tensor("bfloat16", *out.shape)
    assert function(**arguments(memory, out=own)) is own
    assert sent(standin)["out"] == own.pointer


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_the_log_sum_exp_of_ragged_requests_is_by_head(standin: StandIn, memory: MadeUpMemory, module: Any) -> None:
    out, lse, *rest = module.flash_attn_varlen_func(**varlen_arguments(memory, return_attn_probs=True))
    seen = sent(standin)
    assert rest == ([None] if module is flash_attn else [])
    assert (seen["out"], seen["lse"]) == (out.pointer, lse.pointer)
    assert (lse.shape, lse.strides, lse.dtype) == ((HEADS, TOKENS), (TOKENS, 1), "float32")
    assert (seen["lse_token_stride"], seen["lse_head_stride"]) == (1, TOKENS)
    assert (seen["lse_scale"], seen["lse_sink"]) == (pytest.approx(LN_2), 1)


@pytest.mark.parametrize("name", ["func", "cache"])
def test_the_log_sum_exp_of_requests_of_one_size(standin: StandIn, memory: MadeUpMemory, name: str) -> None:
    function, arguments = CALLS[name]
    wanted = {"func": "return_attn_probs", "cache": "return_softmax_lse"}[name]
    lse = function(**arguments(memory, **{wanted: True}))[1]
    seen = sent(standin)
    assert (lse.shape, lse.strides) == ((BATCH, HEADS, 100), (100, BATCH * 100, 1))
    assert (seen["lse"], seen["lse_token_stride"], seen["lse_head_stride"]) == (lse.pointer, 1, BATCH * 100)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"qv": tensor("bfloat16", 1)}, "qv=a TensorView: no kernel here honours it; expected None"),
    ({"q_descale": tensor("float32", 1)}, "q_descale=a TensorView"),
    *(
        ({name: tensor("float32", 1)}, f"{name}: a tensor with bfloat16 keys and values")
        for name in ("k_descale", "v_descale")
    ),
    ({"k_descale": math.inf}, "k_descale=inf: expected a finite number"),
    ({"attention_chunk": 64}, "attention_chunk=64: no kernel here honours it; expected 0"),
    ({"sm_margin": 2}, "sm_margin=2"),
    ({"window_size": 5}, r"window_size=5: expected \(left, right\)"),
    ({"window_size": (1, 2, 3)}, r"window_size=\(1, 2, 3\)"),
    ({"window_size": (1.5, 0)}, "window_size=1.5: expected an integer"),
    ({"softcap": -1.0}, "softcap=-1.0: expected 0"),
    ({"softmax_scale": math.nan}, "softmax_scale=nan"),
    ({"s_aux": tensor("float32", 5)}, r"s_aux: shape \(5,\)"),
    ({"learnable_sink": tensor("float32", 5)}, r"learnable_sink: shape \(5,\)"),
    ({"s_aux": tensor("float32", 8), "learnable_sink": tensor("float32", 8)}, "learnable_sink: given with s_aux"),
    ({"q": tensor("bfloat16", 8, DIM)}, r"q: shape \(8, 128\), expected"),
    ({"out": tensor("bfloat16", 8, DIM)}, "out: shape"),
    ({"q": None}, "q: got NoneType"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_honoured_names_the_argument(
    attend: Callable[..., dict[str, Any]],
    standin: StandIn,
    memory: MadeUpMemory,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        attend(**made(memory, changes))
    assert standin.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("func", "dropout_p", 0.1),
        ("varlen", "dropout_p", 0.1),
        *((name, "alibi_slopes", tensor("float32", HEADS)) for name in ("func", "varlen", "cache")),
    ],
)
def test_what_version_2_alone_has_and_none_honours(memory: MadeUpMemory, name: str, argument: str, value: Any) -> None:
    function, arguments = CALLS[name]
    with pytest.raises(UsageError, match=f"{argument}="):
        function(**arguments(memory, **made(memory, {argument: value})))


VARLEN: list[tuple[dict[str, Any], str]] = [
    ({"seqused_q": tensor("int32", 3)}, "cu_seqlens_q: running sums for seqused_q would be made from a TensorView"),
    ({"cu_seqlens_q": tensor("int32", 3, 4)}, "cu_seqlens_q: shape"),
    ({"cu_seqlens_q": tensor("int64", 4)}, "cu_seqlens_q: dtype int64"),
    ({"cu_seqlens_k": tensor("int32", 9)}, r"cu_seqlens_k: shape \(9,\)"),
    ({"cu_seqlens_k": None}, "cu_seqlens_k: got NoneType"),
    ({"max_seqlen_q": 0}, "max_seqlen_q=0"),
    ({"max_seqlen_q": 1.5}, "max_seqlen_q=1.5"),
    ({"max_seqlen_k": -1}, "max_seqlen_k=-1"),
    ({"max_seqlen_k": None}, "max_seqlen_k=None"),
    ({"seqused_k": tensor("int32", 9)}, r"seqused_k: shape \(9,\)"),
    ({"k": tensor("bfloat16", 900, 2, 64)}, r"k: shape \(900, 2, 64\)"),
    ({"k": tensor("bfloat16", 3, 300, 2, 128)}, "k: shape .*expected 3 dimensions"),
    ({"v": tensor("float16", 900, 2, 128)}, "v: dtype float16"),
]
PAGED: list[tuple[dict[str, Any], str]] = [
    ({"page_table": tensor("int32", 3, 16)}, "page_table: given with block_table"),
    ({"block_table": tensor("int32", 3)}, r"block_table: shape \(3,\), expected 2"),
    ({"block_table": tensor("int32", 5, 16)}, r"block_table: shape \(5, 16\)"),
    ({"block_table": None, "page_table": tensor("int32", 5, 16)}, r"page_table: shape \(5, 16\)"),
    ({"seqused_k": None}, "cu_seqlens_k: got NoneType"),
    (
        {"seqused_k": None, "cu_seqlens_k": tensor("int32", 4)},
        "cu_seqlens_k: lengths would be made .* not a torch tensor",
    ),
    ({"k": tensor("bfloat16", 100, 24, 2, 128)}, "k: page size "),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [*(("varlen", *case) for case in VARLEN), *(("paged varlen", *case) for case in PAGED)],
)
def test_what_ragged_attention_refuses(
    standin: StandIn, memory: MadeUpMemory, name: str, changes: dict[str, Any], message: str
) -> None:
    function, arguments = CALLS[name]
    with pytest.raises(UsageError, match=message):
        function(**arguments(memory, **made(memory, changes)))
    assert standin.calls("cuLaunchKernelEx") == []
