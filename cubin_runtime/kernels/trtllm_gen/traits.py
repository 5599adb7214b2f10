"""The words of trtllm-gen: enumerations as its metadata numbers them, dtypes, and float32 arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_float
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

INT32_MAX = 2**31 - 1


class QkvLayout(IntEnum):
    """How Q, K and V lie in memory."""

    SEPARATE = 0
    PACKED = 1
    PAGED = 2
    CONTIGUOUS = 3


class MaskType(IntEnum):
    """Which keys a query sees."""

    DENSE = 0
    CAUSAL = 1
    SLIDING_OR_CHUNKED_CAUSAL = 2
    CUSTOM = 3


class KernelType(IntEnum):
    """Context kernels, and generation kernels by the order of the operands of their matrix product."""

    CONTEXT = 0
    GENERATION = 1
    SWAPS_AB = 2
    KEEPS_AB = 3
    SPECULATIVE = 4


class TileScheduler(IntEnum):
    """Whether CTAs take one tile each or walk over several."""

    STATIC = 0
    PERSISTENT = 1


class MultiCtasMode(IntEnum):
    """How several CTAs that share one sequence's KV merge their parts."""

    DISABLED = 0
    GMEM = 1
    SEPARATE_KERNEL = 2
    CGA = 3


class SparseType(IntEnum):
    """Sparse MLA: none, a fixed number of KV tokens a query, or a number for each query."""

    NONE = 0
    STATIC = 1
    DYNAMIC = 2


class Policy(Enum):
    """``REFERENCE`` decides as the recorded launcher does, refusals included.

    ``BEST`` differs in one thing: while tile sizes are compared, a candidate without a kernel is passed over
    instead of ending the selection.
    """

    REFERENCE = "reference"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type: bits, and the word for it in a TMA descriptor (packed FP4 moves as bytes)."""

    name: str
    bits: int
    descriptor: str

    @property
    def stride_bytes(self) -> int:
        """Bytes that one element counts for in a stride; packed FP4 strides count bytes already."""
        return max(self.bits, 8) // 8


DTYPES: Mapping[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("fp16", 16, "float16"),
        Dtype("bf16", 16, "bfloat16"),
        Dtype("e4m3", 8, "uint8"),
        Dtype("int8", 8, "uint8"),
        Dtype("e2m1", 4, "uint8"),
    )
}
# What tensors say -> what the metadata says; a uint8 tensor holds two FP4 numbers a byte.
TENSOR_DTYPES: Mapping[str, str] = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "uint8": "e2m1",
    "int8": "int8",
}


def word_of(kind: type[IntEnum], value: int) -> str:
    """A number of an enumeration as a person reads it; one that is not listed stays a number.

    >>> word_of(KernelType, 2), word_of(KernelType, 99)
    ('swaps ab', '99')
    """
    listed = kind._value2member_map_.get(value)
    return str(value) if listed is None else listed.name.lower().replace("_", " ")


class KernelKey(NamedTuple):
    """What the selection asks for, and what a kernel is found by, within one set of dtypes.

    ``tokens_per_page`` is 0 for KV that is not paged, 1 for sparse KV, 128 with ``dynamic_page`` for kernels
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


def float32(value: float) -> float:
    """The nearest float32, as a C cast gives it; too large becomes infinity."""
    return c_float(value).value


def int32(value: int) -> int:
    """The low 32 bits as a signed number, as a narrowing C cast gives them."""
    return (value + 0x80000000 & 0xFFFFFFFF) - 0x80000000


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient rounded up, of non-negative numbers."""
    return -(-dividend // divisor)


def is_power_of_two(value: int) -> bool:
    """Whether ``value`` is 1, 2, 4, ..."""
    return value > 0 and value & (value - 1) == 0
