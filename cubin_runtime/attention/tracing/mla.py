"""An MLA decode as a traced call."""

from __future__ import annotations

from dataclasses import replace

from ..mla.tensors import ROPE, MlaTensors
from ..views import DTYPE_NAMES
from .decode import mask_axes, option_tensors, reference_text
from .schema import (
    Axis,
    Constant,
    Scalar,
    Tensor,
    TracedCall,
)

OP_TYPE = "mla_paged"
_HEADS, _WIDTH, _LATENT = Constant("q_heads"), Constant("head_dim_qk"), Constant("kv_lora_rank")


def traced_mla_decode(
    tensors: MlaTensors,
    *,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float,
    max_q_len: int | None,
    batch_invariant: bool,
) -> TracedCall:
    """The call of ``mla_decode`` with these tensors and numbers."""
    q, rows = tensors.q, tensors.k
    pages, page_size, _, width = rows.shape
    cache = replace(rows, shape=(pages, page_size, width), strides=(*rows.strides[:2], rows.strides[3]))
    tokens: tuple[Axis, ...] = ("tokens",) if tensors.ragged else ("batch", "q_len")[: len(q.shape) - 2]
    inputs: list[Tensor | Scalar] = [
        Tensor("q", q, (*tokens, _HEADS, _WIDTH)),
        Tensor("kv_cache", cache, ("pages", Constant("page_size"), _WIDTH), "latent columns, then rope columns"),
        Tensor("page_table", tensors.page_table, ("batch", "columns")),
        Tensor("seq_lens", tensors.seq_lens, ("batch",), "keys, those of the query tokens among them"),
    ]
    sinks: tuple[Axis, ...] = (_HEADS,)
    if tensors.sinks is not None and len(tensors.sinks.shape) == 2:
        sinks = (Constant("one"), _HEADS)
    inputs += option_tensors(tensors, mask_axes(tensors, tokens), sinks)
    inputs += [
        Scalar("softmax_scale", softmax_scale),
        Scalar("output_scale", output_scale),
        Scalar("max_seq_len", max_seq_len, "int32"),
    ]
    if max_q_len is not None:
        inputs.append(Scalar("max_q_len", max_q_len, "int32"))
    outputs = [Tensor("out", tensors.out, (*tokens, _HEADS, _LATENT))]
    if tensors.lse is not None:
        outputs.append(Tensor("lse", tensors.lse, (*tokens, _HEADS), "base 2"))
    form = "ragged" if tensors.ragged else "dense"
    dtypes = "_".join(DTYPE_NAMES.get(view.dtype, view.dtype) for view in (q, rows, tensors.out))
    return TracedCall(
        op_type=OP_TYPE,
        name=f"mla_decode_{form}_{dtypes}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        reference=_reference(inputs, outputs),
        constants={"qk_rope_head_dim": ROPE},
        constraints=(
            "head_dim_qk == kv_lora_rank + qk_rope_head_dim",
            *(("batch_plus_1 == batch + 1",) if tensors.ragged else ()),
        ),
        tags=("stage:decode", f"form:{form}", *(("batch_invariant",) if batch_invariant else ())),
        description=f"Latent attention of {form} query tokens over pages",
    )


def _reference(inputs: list[Tensor | Scalar], outputs: list[Tensor]) -> str:
    names = [part.name for part in inputs]
    given = ", ".join(f"{name}={name}" for name in names if name != "kv_cache")
    dtype, latent = outputs[0].view.dtype, outputs[0].view.shape[-1]
    return (
        f"{reference_text()}\n\ndef run({', '.join(names)}):\n"
        f"    keys = kv_cache.unsqueeze(2)\n"
        f"    caches = {{'k_cache': keys, 'v_cache': keys[..., :{latent}]}}\n"
        f"    return decode({given}, **caches, window_left=-1, out_dtype=torch.{dtype}, with_lse={len(outputs) > 1})\n"
    )
