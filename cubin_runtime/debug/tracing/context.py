"""A context attention as a traced call."""

from __future__ import annotations

from ...attention.attention_operator import AttentionCall
from ...attention.operators.context_attention import ContextOptions, is_paged
from ...dtypes import DTYPES
from ...tensor import TensorView
from .decode import ONE, kv_scales, sink_axes, table_axes
from .references import of_attention, run_of
from .schema import Axis, Constant, Scalar, Tensor, TracedCall

_KV = (Constant("kv_heads"), Constant("head_dim"))
_VALUES = (Constant("kv_heads"), Constant("value_dim"))


def traced_context(call: AttentionCall) -> TracedCall:
    """A call of ``context_attention``."""
    q, tensors, options = call.q, call.tensors, call.options
    assert isinstance(options, ContextOptions)
    k, out, lse = tensors["k"], tensors["out"], tensors.get("lse")
    tokens: tuple[Axis, ...] = ("tokens",) if call.ragged else ("batch", "q_len")
    keys: tuple[Axis, ...] = ("kv_tokens",) if len(k.shape) == 3 else ("batch", "kv_len")
    if is_paged(call):
        keys = "pages", Constant("page_size")
    inputs: list[Tensor | Scalar] = [
        Tensor("q", q, (*tokens, Constant("q_heads"), Constant("head_dim"))),
        Tensor("k", k, (*keys, *_KV), "tokens, then heads; as strides had it"),
        Tensor("v", tensors["v"], (*keys, *_VALUES)),
        *_optional_tensors(call),
        Scalar("softmax_scale", options.softmax_scale * options.k_scale),
        Scalar("output_scale", options.output_scale * options.v_scale),
        Scalar("window_left", options.window_left, "int32"),
        Scalar("window_right", options.window_right, "int32"),
        Scalar("logit_soft_cap", options.logit_soft_cap),
        Scalar("max_seq_len", options.max_seq_len, "int32"),
    ]
    if options.max_q_len is not None:
        inputs.append(Scalar("max_q_len", options.max_q_len, "int32"))
    outputs = [Tensor("out", out, (*tokens, Constant("q_heads"), Constant("value_dim")))]
    if lse is not None:
        outputs.append(Tensor("lse", lse, (*tokens, Constant("q_heads")), f"base {options.lse_base}"))
    form = "ragged" if call.ragged else "dense"
    of_q, of_k = DTYPES[q.dtype].short, DTYPES[k.dtype].short
    of_keys = "paged" if is_paged(call) else "ragged" if len(k.shape) == 3 else "dense"
    fixed = ("causal", *(("lse_base", "lse_sink") if lse else ()))
    reference_arguments = {name: repr(getattr(options, name)) for name in fixed} | of_attention(outputs)
    axes = {axis for part in inputs if isinstance(part, Tensor) for axis in part.axes}
    return TracedCall(
        op_type="gqa_paged" if is_paged(call) else "gqa_ragged",
        name=f"context_attention_{form}_{of_keys}_{'_over_'.join(dict.fromkeys((of_q, of_k)))}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        reference=run_of("context", inputs, reference_arguments),
        constants={"group": call.q_heads // k.shape[-2]},
        constraints=(
            "q_heads == kv_heads * group",
            *(("batch_plus_1 == batch + 1",) if {"batch", "batch_plus_1"} <= axes else ()),
        ),
        tags=(
            *("stage:context", f"form:{form}", f"keys:{of_keys}", f"causal:{options.causal}"),
            *(("batch_invariant",) if options.batch_invariant else ()),
        ),
        description=f"Grouped-query attention of {form} query tokens over {of_keys} keys",
    )


def _optional_tensors(call: AttentionCall) -> list[Tensor]:
    tensors, table = call.tensors, call.tensors.get("page_table")
    more: list[tuple[str, TensorView | None, tuple[Axis, ...], str]] = [
        ("page_table", table, table_axes(table) if table else (), ""),
        ("seq_lens", tensors.get("seq_lens"), ("batch",), "keys of each request"),
        ("q_cu_seq_lens", tensors.get("q_cu_seq_lens"), ("batch_plus_1",), "where each request's tokens begin"),
        ("kv_cu_seq_lens", tensors.get("kv_cu_seq_lens"), ("batch_plus_1",), "where each request's keys begin"),
        ("sinks", tensors.get("sinks"), sink_axes(tensors), "logits in the denominator"),
        ("softmax_scale_device", tensors.get("softmax_scale"), ONE, "a factor more of the scores"),
        ("output_scale_device", tensors.get("output_scale"), ONE, "a factor more of the output"),
    ]
    return [
        *(Tensor(name, view, axes, words) for name, view, axes, words in more if view is not None),
        *kv_scales(call),
    ]
