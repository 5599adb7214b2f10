"""A paged decode as a traced call."""

from __future__ import annotations

from ...attention.attention_operator import AttentionCall
from ...attention.decode_rules import DEALING_OPTIONS, GLOBAL_LENS
from ...attention.operator import CallTensors
from ...attention.paged_cache import KV_SCALES
from ...dtypes import DTYPES
from ...tensor import TensorView
from .references import of_attention, run_of
from .schema import Axis, Constant, Scalar, Tensor, TracedCall

OP_TYPE = "gqa_paged"
_HEADS = (Constant("q_heads"), Constant("head_dim"))
_CACHE: tuple[Axis, ...] = ("pages", Constant("page_size"), Constant("kv_heads"), Constant("head_dim"))
ONE = (Constant("one"),)


def traced_decode(call: AttentionCall) -> TracedCall:
    """A call of ``paged_decode``."""
    q, tensors, options = call.q, call.tensors, call.options
    k, out, lse = tensors["k_cache"], tensors["out"], tensors.get("lse")
    tokens: tuple[Axis, ...] = ("tokens",) if call.ragged else ("batch", "q_len")[: len(q.shape) - 2]
    inputs: list[Tensor | Scalar] = [
        Tensor("q", q, (*tokens, *_HEADS)),
        Tensor("k_cache", k, _CACHE, "the tokens of a page, then its heads; as strides had it"),
        Tensor("v_cache", tensors["v_cache"], _CACHE),
        Tensor("page_table", tensors["page_table"], table_axes(tensors["page_table"])),
        Tensor("seq_lens", tensors["seq_lens"], ("batch",), "keys, those of the query tokens among them"),
    ]
    inputs += option_tensors(tensors, mask_axes(tensors, tokens), sink_axes(tensors))
    inputs += kv_scales(call)
    inputs += [
        Scalar("softmax_scale", options.softmax_scale * options.k_scale),
        Scalar("output_scale", options.output_scale * options.v_scale),
        Scalar("window_left", options.window_left, "int32"),
        Scalar("max_seq_len", options.max_seq_len, "int32"),
    ]
    inputs += option_numbers(call)
    outputs = [Tensor("out", out, (*tokens, *_HEADS))]
    if lse is not None:
        outputs.append(Tensor("lse", lse, (*tokens, Constant("q_heads")), "base 2"))
    form = "ragged" if call.ragged else "dense"
    # Without a mask or a window, positions by index and by depth see the same keys.
    by_index = options.drafts_by_index and tensors.get("mask") is not None and options.window_left >= 0
    dtypes = "_".join(DTYPES[view.dtype].short for view in (q, k, out))
    return TracedCall(
        op_type=OP_TYPE,
        name=f"paged_decode_{form}_{dtypes}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        reference=run_of("decode", inputs, ({"by_index": "True"} if by_index else {}) | of_attention(outputs)),
        constants={"group": call.q_heads // k.shape[2]},
        constraints=("q_heads == kv_heads * group", *(("batch_plus_1 == batch + 1",) if call.ragged else ())),
        tags=decode_tags(call, *(("draft_position:index",) if by_index else ())),
        description=f"Grouped-query decode of {form} query tokens over pages",
    )


def table_axes(table: TensorView) -> tuple[Axis, ...]:
    """The axes of a page table, which may have a row for keys and one for values."""
    return ("batch", "columns") if len(table.shape) == 2 else ("batch", Constant("tables"), "columns")


def decode_tags(call: AttentionCall, *more: str) -> tuple[str, ...]:
    """The words to find a decode by."""
    form = "ragged" if call.ragged else "dense"
    return ("stage:decode", f"form:{form}", *(("batch_invariant",) if call.options.batch_invariant else ()), *more)


def option_numbers(call: AttentionCall) -> list[Scalar]:
    """The numbers that a call may leave out, as far as they are there."""
    options = call.options
    names = DEALING_OPTIONS if call.tensors.get(GLOBAL_LENS.name) is not None else ()
    numbers = {"max_q_len": options.max_q_len, **{name: getattr(options, name) for name in names}}
    return [Scalar(name, number, "int32") for name, number in numbers.items() if number is not None]


def option_tensors(tensors: CallTensors, mask: tuple[Axis, ...], sinks: tuple[Axis, ...]) -> list[Tensor]:
    """The tensors that a call may leave out, as far as they are there."""
    more: list[tuple[str, TensorView | None, tuple[Axis, ...], str]] = [
        ("q_cu_seq_lens", tensors.get("q_cu_seq_lens"), ("batch_plus_1",), "where each request's tokens begin"),
        ("mask", tensors.get("mask"), mask, "one bit for each query token that a token may see"),
        ("sinks", tensors.get("sinks"), sinks, "logits in the denominator"),
        (GLOBAL_LENS.name, tensors.get(GLOBAL_LENS.name), ("batch",), "keys on all ranks"),
        ("softmax_scale_device", tensors.get("softmax_scale"), ONE, "a factor more of the scores"),
        ("output_scale_device", tensors.get("output_scale"), ONE, "a factor more of the output"),
    ]
    return [Tensor(name, view, axes, words) for name, view, axes, words in more if view is not None]


def kv_scales(call: AttentionCall) -> list[Tensor]:
    """The scales of keys and values that are tensors, in the form that they came in."""
    scales = [(name, call.tensors.get(name)) for name in KV_SCALES]
    return [Tensor(name, view, scale_axes(view), "a factor more of a KV head") for name, view in scales if view]


def scale_axes(scale: TensorView) -> tuple[Axis, ...]:
    """The axes of a scale of keys or values, by request and KV head."""
    heads = (Constant("kv_heads"),)
    if scale.shape == (1,):
        return ONE
    return heads if len(scale.shape) == 1 else ("batch", *heads)


def mask_axes(tensors: CallTensors, tokens: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of the mask in the form that it came in."""
    words = Constant("mask_words")
    mask = tensors.get("mask")
    if mask is None or len(mask.shape) == len(tokens) + 1:
        return (*tokens, words)
    return ("batch", Constant("one"), words) if len(mask.shape) == 3 else ("tokens", words)


def sink_axes(tensors: CallTensors) -> tuple[Axis, ...]:
    """The axes of the sinks in the form that they came in."""
    sinks = tensors.get("sinks")
    flat = sinks is None or len(sinks.shape) == 1
    return (Constant("q_heads"),) if flat else (Constant("kv_heads"), Constant("group"))
