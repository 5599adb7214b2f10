"""An MLA decode as a traced call."""

from __future__ import annotations

from dataclasses import replace

from ...attention.attention_operator import AttentionCall
from ...dtypes import DTYPES
from ...tensor import TensorView
from .decode import decode_tags, mask_axes, option_numbers, option_tensors
from .references import of_attention, run_of
from .schema import Axis, Constant, Scalar, Tensor, TracedCall

OP_TYPE = "mla_paged"
_HEADS, _WIDTH, _LATENT = Constant("q_heads"), Constant("head_dim_qk"), Constant("kv_lora_rank")
_ROPE = Constant("qk_rope_head_dim")


def traced_mla_decode(call: AttentionCall) -> TracedCall:
    """A call of ``mla_decode``."""
    q, tensors, options = call.q, call.tensors, call.options
    rows, out, lse, given_sinks = tensors["kv_cache"], tensors["out"], tensors.get("lse"), tensors.get("sinks")
    width = rows.shape[-1]
    cache = _without_head(rows)
    tokens: tuple[Axis, ...] = ("tokens",) if call.ragged else ("batch", "q_len")[: len(q.shape) - 2]
    values, rope = tensors.get("v_cache"), tensors.get("q_rope")
    inputs: list[Tensor | Scalar] = [
        Tensor("q", q, (*tokens, _HEADS, _WIDTH if rope is None else _LATENT)),
        Tensor("kv_cache", cache, ("pages", Constant("page_size"), _WIDTH), "latent columns, then rope columns"),
        Tensor("page_table", tensors["page_table"], ("batch", "columns")),
        Tensor("seq_lens", tensors["seq_lens"], ("batch",), "keys, those of the query tokens among them"),
    ]
    if rope is not None:
        inputs.append(Tensor("q_rope", rope, (*tokens, _HEADS, _ROPE), "the columns behind those of q"))
    if values is not None:
        inputs.append(Tensor("v_cache", _without_head(values), ("pages", Constant("page_size"), _LATENT)))
    sinks: tuple[Axis, ...] = (_HEADS,)
    if given_sinks is not None and len(given_sinks.shape) == 2:
        sinks = (Constant("one"), _HEADS)
    inputs += option_tensors(tensors, mask_axes(tensors, tokens), sinks)
    inputs += [
        Scalar("softmax_scale", options.softmax_scale),
        Scalar("output_scale", options.output_scale),
        Scalar("max_seq_len", options.max_seq_len, "int32"),
    ]
    inputs += option_numbers(call)
    outputs = [Tensor("out", out, (*tokens, _HEADS, _LATENT))]
    if lse is not None:
        outputs.append(Tensor("lse", lse, (*tokens, _HEADS), "base 2"))
    form = "ragged" if call.ragged else "dense"
    dtypes = "_".join(DTYPES[view.dtype].short for view in (q, rows, out))
    return TracedCall(
        op_type=OP_TYPE,
        name=f"mla_decode_{form}_{dtypes}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        reference=run_of(
            "decode",
            inputs,
            {
                **({} if rope is None else {"q": "torch.cat((q, q_rope), -1)"}),
                "k_cache": "kv_cache[:, :, None]",
                "v_cache": f"kv_cache[:, :, None, :{out.shape[-1]}]" if values is None else "v_cache[:, :, None]",
                "window_left": "-1",
                **of_attention(outputs),
            },
            without=["kv_cache", "q_rope"],
        ),
        constants={"qk_rope_head_dim": width - out.shape[-1]},
        constraints=(
            "head_dim_qk == kv_lora_rank + qk_rope_head_dim",
            *(("batch_plus_1 == batch + 1",) if call.ragged else ()),
        ),
        tags=decode_tags(call),
        description=f"Latent attention of {form} query tokens over pages",
    )


def _without_head(cache: TensorView) -> TensorView:
    """A latent cache ``[pages, page_size, 1, columns]`` without its one head."""
    return replace(cache, shape=(*cache.shape[:2], cache.shape[3]), strides=(*cache.strides[:2], cache.strides[3]))
