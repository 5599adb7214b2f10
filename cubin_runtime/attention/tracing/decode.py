"""A paged decode as a traced call."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..decode_tensors import DecodeTensors
from ..views import DTYPE_NAMES, TensorView
from .schema import (
    Axis,
    Constant,
    Scalar,
    Tensor,
    TracedCall,
)

OP_TYPE = "gqa_paged"
_HEADS = (Constant("q_heads"), Constant("head_dim"))
_CACHE: tuple[Axis, ...] = ("pages", Constant("page_size"), Constant("kv_heads"), Constant("head_dim"))
_ONE = (Constant("one"),)


def traced_decode(
    tensors: DecodeTensors,
    *,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float,
    window_left: int,
    max_q_len: int | None,
    batch_invariant: bool,
) -> TracedCall:
    """The call of ``paged_decode`` with these tensors and numbers."""
    q = tensors.q
    tokens: tuple[Axis, ...] = ("tokens",) if tensors.ragged else ("batch", "q_len")[: len(q.shape) - 2]
    inputs: list[Tensor | Scalar] = [
        Tensor("q", q, (*tokens, *_HEADS)),
        Tensor("k_cache", tensors.k, _CACHE, "the tokens of a page, then its heads; as strides had it"),
        Tensor("v_cache", tensors.v, _CACHE),
        Tensor("page_table", tensors.page_table, ("batch", "columns")),
        Tensor("seq_lens", tensors.seq_lens, ("batch",), "keys, those of the query tokens among them"),
    ]
    inputs += option_tensors(tensors, mask_axes(tensors, tokens), _sink_axes(tensors))
    inputs += [
        Scalar("softmax_scale", softmax_scale),
        Scalar("output_scale", output_scale),
        Scalar("window_left", window_left, "int32"),
        Scalar("max_seq_len", max_seq_len, "int32"),
    ]
    if max_q_len is not None:
        inputs.append(Scalar("max_q_len", max_q_len, "int32"))
    outputs = [Tensor("out", tensors.out, (*tokens, *_HEADS))]
    if tensors.lse is not None:
        outputs.append(Tensor("lse", tensors.lse, (*tokens, Constant("q_heads")), "base 2"))
    form = "ragged" if tensors.ragged else "dense"
    dtypes = "_".join(DTYPE_NAMES.get(view.dtype, view.dtype) for view in (q, tensors.k, tensors.out))
    return TracedCall(
        op_type=OP_TYPE,
        name=f"paged_decode_{form}_{dtypes}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        reference=_reference(inputs, outputs),
        constants={"group": tensors.group},
        constraints=("q_heads == kv_heads * group", *(("batch_plus_1 == batch + 1",) if tensors.ragged else ())),
        tags=("stage:decode", f"form:{form}", *(("batch_invariant",) if batch_invariant else ())),
        description=f"Grouped-query decode of {form} query tokens over pages",
    )


def option_tensors(tensors: DecodeTensors, mask: tuple[Axis, ...], sinks: tuple[Axis, ...]) -> list[Tensor]:
    """The tensors that a call may leave out, as far as they are there."""
    more: list[tuple[str, TensorView | None, tuple[Axis, ...], str]] = [
        ("q_cu_seq_lens", tensors.q_cu_seq_lens, ("batch_plus_1",), "where each request's tokens begin"),
        ("mask", tensors.mask, mask, "32 bits a token: query tokens that it sees"),
        ("sinks", tensors.sinks, sinks, "logits in the denominator"),
        ("softmax_scale_device", tensors.softmax_scale, _ONE, "a factor more of the scores"),
        ("output_scale_device", tensors.output_scale, _ONE, "a factor more of the output"),
    ]
    return [Tensor(name, view, axes, words) for name, view, axes, words in more if view is not None]


def mask_axes(tensors: DecodeTensors, tokens: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of the mask in the form that it came in."""
    words = Constant("mask_words")
    if tensors.mask is None or len(tensors.mask.shape) == len(tokens) + 1:
        return (*tokens, words)
    return ("batch", Constant("one"), words) if len(tensors.mask.shape) == 3 else ("tokens", words)


def _sink_axes(tensors: DecodeTensors) -> tuple[Axis, ...]:
    flat = tensors.sinks is None or len(tensors.sinks.shape) == 1
    return (Constant("q_heads"),) if flat else (Constant("kv_heads"), Constant("group"))


def _reference(inputs: list[Tensor | Scalar], outputs: list[Tensor]) -> str:
    names = [part.name for part in inputs]
    given = ", ".join(f"{name}={name}" for name in names)
    with_lse, dtype = len(outputs) > 1, outputs[0].view.dtype
    return (
        f"{reference_text()}\n\ndef run({', '.join(names)}):\n"
        f"    return decode({given}, out_dtype=torch.{dtype}, with_lse={with_lse})\n"
    )


@cache
def reference_text() -> str:
    """The source of the reference that ``run`` calls."""
    return Path(__file__).with_name("decode_reference.py").read_text()
