"""Attention of an engine over a paged latent cache in which each query token has a list of rows (sparse MLA)."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from ..attention.latent_cache import ROPE
from ..attention.operators.sparse_mla_decode import plan_sparse_mla_decode, sparse_mla_decode
from ..kernels.native.sparse_mla.select import MAX_WIDTH, ROW_FORMS
from ..tensor import TensorView
from .latent_batch import PAGE_SIZE, unserved
from .scratch import load, shared_scratch

LATENT = 512
_ADDRESS = 256  # of tensors that a plan is made for, which reads none


class ListKind(NamedTuple):
    """The common values of layers of one kind.

    ``rows`` is the form of a row of the cache, one of ``ROW_FORMS``; ``width`` are the entries of a list.
    """

    heads: int
    rows: str
    width: int
    device: int


def unserved_lists(latent: int, rope: int, heads: int, width: int) -> str | None:
    """The reason for which a layer of these sizes, with lists of this width, has no kernels; None: it has."""
    if latent != LATENT:
        return f"sparse MLA with kv_lora_rank={latent} not supported"
    if not 1 <= width <= MAX_WIDTH:
        return f"sparse MLA with lists of {width} rows not supported"
    return unserved(latent, rope, heads, 1)


def attend_lists(
    q: Any, kv_cache: Any, indices: Any, softmax_scale: float, out: Any, *, batch_invariant: bool = False
) -> None:
    """Attention of query tokens to the rows that their lists name, which are in the cache already.

    Args:
        q: bfloat16 ``[tokens, heads, 576]``.
        kv_cache: bfloat16 ``[pages, page_size, 576]`` or bytes ``[pages, page_size, 656]``; any strides of pages.
        indices: int32 ``[tokens, width]``, slots of the cache; negative ones are holes.
        out: bfloat16 ``[tokens, heads, 512]``.

    Raises:
        as ``sparse_mla_decode``.
    """
    sparse_mla_decode(q, kv_cache, indices, softmax_scale=softmax_scale, batch_invariant=batch_invariant, out=out)


def load_lists(kind: ListKind, batch_invariant: bool, most_tokens: int, log: logging.Logger) -> None:
    """Load all kernels that a layer may use, for steps of up to ``most_tokens`` query tokens.

    Args:
        log: gets a line that names the kernels of each kind of layer.
    """
    done, ready = ("lists", kind, batch_invariant, most_tokens), shared_scratch(kind.device).ready
    if done in ready:
        return
    ready.add(done)
    columns, row_bytes = ROW_FORMS[kind.rows]
    scaled = kind.rows == "scaled_e4m3"

    def tensor(dtype: Any, *shape: int) -> TensorView:
        return TensorView.contiguous(_ADDRESS, dtype, shape, kind.device)

    plans = [
        plan_sparse_mla_decode(
            tensor("bfloat16", tokens, kind.heads, columns),
            tensor("uint8", 1, PAGE_SIZE, row_bytes) if scaled else tensor("bfloat16", 1, PAGE_SIZE, columns),
            tensor("int32", tokens, kind.width),
            tensor("bfloat16", tokens, kind.heads, LATENT),
            softmax_scale=1.0,
            batch_invariant=batch_invariant,
        )
        for tokens in sorted({1, most_tokens})
    ]
    named = f"sparse MLA with {LATENT} + {ROPE} columns, {kind.heads} heads, rows of {row_bytes} bytes"
    log.info("cubin_runtime: layers of %s run on %s", named, ", ".join(load(plans)))
