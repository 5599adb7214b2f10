"""Kernel traits in the words of the trtllm-gen metadata: enumerations, dtypes, and the key of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import NamedTuple

from ...dtypes import BY_SHORT, DType


class QkvLayout(IntEnum):
    """Memory layout of Q, K and V."""

    SEPARATE = 0
    PACKED = 1
    PAGED = 2
    CONTIGUOUS = 3


class MaskType(IntEnum):
    """The keys that a query attends to."""

    DENSE = 0
    CAUSAL = 1
    SLIDING_OR_CHUNKED_CAUSAL = 2
    CUSTOM = 3


class KernelType(IntEnum):
    """Context kernels, and decode kernels by the order of their MMA's operands A and B."""

    CONTEXT = 0
    GENERATION = 1
    SWAPS_AB = 2
    KEEPS_AB = 3
    SPECULATIVE = 4


class TileScheduler(IntEnum):
    """The choice between one tile for each CTA and a loop over several."""

    STATIC = 0
    PERSISTENT = 1


class MultiCtasMode(IntEnum):
    """The way in which CTAs that share one sequence's KV merge their partial results."""

    DISABLED = 0
    GMEM = 1
    SEPARATE_KERNEL = 2
    CGA = 3


class SparseType(IntEnum):
    """Sparse MLA: off, the same number of KV tokens for all queries, or a number per query."""

    NONE = 0
    STATIC = 1
    DYNAMIC = 2


class Policy(Enum):
    """``REFERENCE`` makes the reference launcher's decisions, errors included.

    ``BEST`` differs in one point: a tile size without a kernel is skipped in the comparison, where the reference
    launcher fails.
    """

    REFERENCE = "reference"
    BEST = "best"


class Element(NamedTuple):
    """An element as TMA descriptors see it; ``nbytes`` is the unit of strides, a byte for two packed FP4 numbers."""

    bits: int
    nbytes: int
    map_type: str


# Words of the metadata -> dtypes of tensors; a uint8 tensor holds two FP4 numbers (e2m1) per byte.
_DTYPES: Mapping[str, DType] = {
    word: BY_SHORT["uint8" if word == "e2m1" else word] for word in ("fp16", "bf16", "e4m3", "e2m1", "int8")
}
ELEMENTS: Mapping[str, Element] = {
    word: Element(4 if word == "e2m1" else dtype.nbytes * 8, dtype.nbytes, dtype.map_type)
    for word, dtype in _DTYPES.items()
}
TENSOR_DTYPES: Mapping[str, str] = {dtype.name: word for word, dtype in _DTYPES.items()}


def word_of(kind: type[IntEnum], value: int) -> str:
    """The name of an enumeration's value, in lower case; unknown values stay numbers.

    >>> word_of(KernelType, 2), word_of(KernelType, 99)
    ('swaps ab', '99')
    """
    listed = kind._value2member_map_.get(value)
    return str(value) if listed is None else listed.name.lower().replace("_", " ")


class KernelKey(NamedTuple):
    """The traits by which a kernel is looked up, for given dtypes.

    ``tokens_per_page`` is 0 for KV that is not paged, 1 for sparse KV, and 128 with ``dynamic_page`` for kernels
    that take any page of 128 tokens or more.
    """

    layout: int
    mask: int
    kernel_type: int
    scheduler: int
    multi_ctas: int
    head_dim_per_cta_v: int
    head_dim_qk: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    tokens_per_page: int
    dynamic_page: bool
    reuses_smem_k_for_v: bool
    two_cta: bool
    sparse: int
    skips_softmax: bool

    def __str__(self) -> str:
        words = (
            word_of(QkvLayout, self.layout),
            word_of(MaskType, self.mask),
            word_of(KernelType, self.kernel_type),
            word_of(TileScheduler, self.scheduler),
            f"multi-CTA {word_of(MultiCtasMode, self.multi_ctas)}",
            f"head {self.head_dim_qk}/{self.head_dim_v}, {self.head_dim_per_cta_v} a CTA",
            f"tile {self.tile_q}x{self.tile_kv}",
            f"page {'any from ' if self.dynamic_page else ''}{self.tokens_per_page}",
            *(["2-CTA"] if self.two_cta else []),
            *([f"sparse {word_of(SparseType, self.sparse)}"] if self.sparse else []),
            *(["skip-softmax"] if self.skips_softmax else []),
        )
        return ", ".join(words)
