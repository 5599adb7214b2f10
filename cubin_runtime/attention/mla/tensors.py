"""The tensors of one MLA decode: those of a paged decode whose keys and values lie in one cache of one head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ..decode_tensors import (
    REQUIRED,
    TENSOR_NAMES,
    DecodeTensors,
    flat_scalar,
)
from ..views import TensorView, view_of

ROPE = 64
_NAMES = tuple("kv_cache" if name in ("k_cache", "v_cache") else name for name in TENSOR_NAMES)
# Rows of queries and outputs are moved in pieces of 16 bytes.
_ALIGNMENTS = (16, 16, 16, 4, 4, 16, 4, 4, 4, 4, 4, 4)
_STRIDE_BYTES = {"q": 16, "kv_cache": 16, "out": 16}


@dataclass(frozen=True, slots=True)
class MlaTensors(DecodeTensors):
    """The tensors of one call; ``k`` and ``v`` are the latent cache as ``[pages, page_size, 1, latent + rope]``."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a caller knows them by, in the order of ``TENSOR_NAMES``."""
        return _NAMES

    @property
    def alignments(self) -> tuple[int, ...]:
        """The multiple in bytes that each address must be of, in the same order."""
        return _ALIGNMENTS

    @property
    def stride_bytes(self) -> dict[str, int]:
        """The multiple in bytes that strides of dimensions over 1 must be of."""
        return _STRIDE_BYTES

    @property
    def latent(self) -> int:
        """Columns of a value, the first ones of a cache row."""
        return self.k.shape[3] - ROPE

    @property
    def out_shape(self) -> tuple[int, ...]:
        """What an output for ``q`` has."""
        return (*self.q.shape[:-1], self.latent)


def mla_tensors(given: tuple[Any, ...]) -> MlaTensors:
    """The views of one call's tensors, in the order of ``TENSOR_NAMES`` with the cache in both places.

    Raises:
        UsageError: something is no CUDA tensor, or the cache has another form.
    """
    pairs = list(zip(given, _NAMES, strict=True))
    q, cache, _, page_table, seq_lens, out = [view_of(tensor, name) for tensor, name in pairs[:REQUIRED]]
    optional = [None if tensor is None else view_of(tensor, name) for tensor, name in pairs[REQUIRED:]]
    lse, q_cu_seq_lens, mask, sinks, softmax_scale, output_scale = optional
    rows = latent_view(cache)
    return MlaTensors(
        q=q,
        k=rows,
        v=rows,
        page_table=page_table,
        seq_lens=seq_lens,
        out=out,
        lse=lse,
        q_cu_seq_lens=q_cu_seq_lens,
        mask=mask,
        sinks=sinks,
        softmax_scale=flat_scalar(softmax_scale),
        output_scale=flat_scalar(output_scale),
    )


def latent_view(cache: TensorView, name: str = "kv_cache") -> TensorView:
    """A latent cache of either form as ``[pages, page_size, 1, width]``: the same memory.

    Raises:
        UsageError: it has another rank, or more heads than one.
    """
    shape, strides = cache.shape, cache.strides
    if len(shape) == 4 and shape[1] == 1:
        shape, strides = (shape[0], *shape[2:]), (strides[0], *strides[2:])
    if len(shape) != 3:
        raise UsageError(
            f"{name}: shape {cache.shape}, expected [pages, page_size, width] or [pages, 1, page_size, width]"
        )
    pages, tokens, width = shape
    own = (strides[0], strides[1], width, strides[2])
    return TensorView(cache.pointer, cache.dtype, (pages, tokens, 1, width), own, cache.device)
