"""The common part of all native attention problems: queries, outputs, lengths, scales, and their parameters."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...launch.structs import FastModDiv, Field
from ...values import dataclass
from .constants import ATTENTION_TYPES

LOG2_E = math.log2(math.e)
# Numbers that come with each run, by the names of their fields.
NUMBERS = ("max_seq_len", "softmax_scale_log2", "output_scale")
_ONLY_PAGE_LOG2 = 30  # over any length
VALUE_TABLE_FIELD = Field(
    "v_table_offset",
    "int64",
    "elements in page_table from the page ids of a request's keys to those of its values; 0: they are the same",
)
SLACK_TILES_FIELD = Field(
    "slack_tiles",
    "int32",
    "KV tiles that a CTA may have beyond an equal share, if then no output tile is split through the workspace",
)
GLOBAL_LENS_FIELD = Field(
    "global_seq_lens",
    "ptr",
    "int32 [batch], keys of each request on all ranks, of which seq_lens counts this rank's; null: it has all",
)
DEALING_FIELDS = (
    Field("cp_round", "FastModDiv", "keys dealt to all ranks in a round, at least 2; used with global_seq_lens"),
    Field("cp_begin", "int32", "the first key of a round that is this rank's; likewise"),
    Field("cp_interleave", "int32", "keys of a round that are this rank's; likewise"),
)

_SCALED = (("k", "keys"), ("v", "values"))


def kv_scale_stride_fields(suffix: str = "_scale") -> tuple[Field, ...]:
    """The strides of the scales that the fields ``k`` and ``v`` with this suffix point to."""
    return tuple(
        Field(f"{name}_scale_{of}_stride", "int64", f"elements between the factors of {of}s in {name}{suffix}; 0: one")
        for name, _ in _SCALED
        for of in ("request", "head")
    )


# Of kernels over e4m3 keys and values: they come last in a struct.
KV_SCALE_FIELDS = (
    *(Field(f"{name}_scale", "ptr", f"fp32, factors of {what}; null: 1") for name, what in _SCALED),
    *kv_scale_stride_fields(),
)


def kv_scale_strides(k: tuple[int, int], v: tuple[int, int]) -> dict[str, object]:
    """The stride fields of scales of keys and of values: elements between requests and between KV heads."""
    strides = {"k": k, "v": v}
    return {
        f"{name}_scale_{of}_stride": stride
        for name, by in strides.items()
        for of, stride in zip(("request", "head"), by, strict=True)
    }


class CacheStrides(NamedTuple):
    """Elements between pages (or requests), tokens and KV heads of one of K and V; ragged keys are one page."""

    page: int
    token: int
    head: int


def cache_strides(k: CacheStrides, v: CacheStrides) -> dict[str, object]:
    """The stride fields of keys and of values."""
    return {f"{name}_{of}_stride": getattr(by, of) for name, by in (("k", k), ("v", v)) for of in CacheStrides._fields}


def page_size_log2(page_size: int) -> int:
    """The log2 by which kernels divide tokens: a page whose size is no power of two is the only one of its request."""
    return page_size.bit_length() - 1 if page_size.bit_count() == 1 else _ONLY_PAGE_LOG2


class Dealing(NamedTuple):
    """The keys of a request that a rank holds with context parallelism.

    They are dealt to ``world`` ranks in rounds, ``interleave`` neighbouring keys to each; ``rank`` is this
    one.
    """

    world: int = 1
    rank: int = 0
    interleave: int = 1

    def values(self) -> dict[str, object]:
        """The fields of a struct."""
        return {
            "cp_round": FastModDiv.of(self.world * self.interleave),
            "cp_begin": self.rank * self.interleave,
            "cp_interleave": self.interleave,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Sizes, strides (in elements) and options; addresses come with each run.

    ``tokens`` are the query tokens of all requests, ``q_len`` those of each, or their bound where requests differ.
    Dtypes are short names. Strides of tensors with heads are those of a token and of a head. ``softmax_scale`` and
    ``output_scale`` are 1 where the device has them.
    """

    batch: int
    tokens: int
    q_len: int
    page_size: int
    num_pages: int
    max_seq_len: int
    kv_dtype: str
    q_dtype: str
    out_dtype: str
    softmax_scale: float
    output_scale: float
    q_strides: tuple[int, int]
    out_strides: tuple[int, int]
    lse_strides: tuple[int, int]
    table_stride: int
    programmatic_serialization: bool = False
    dealing: Dealing = Dealing()

    def values(self) -> dict[str, object]:
        """The fields of a struct that follow from these alone."""
        return {
            "q_token_stride": self.q_strides[0],
            "q_head_stride": self.q_strides[1],
            "out_token_stride": self.out_strides[0],
            "out_head_stride": self.out_strides[1],
            "lse_token_stride": self.lse_strides[0],
            "lse_head_stride": self.lse_strides[1],
            "table_stride": self.table_stride,
            "batch": self.batch,
            "tokens": self.tokens,
            "q_len": self.q_len,
            "page_size_log2": page_size_log2(self.page_size),
            "num_pages": self.num_pages,
            "max_seq_len": self.max_seq_len,
            "q_type": ATTENTION_TYPES[self.q_dtype],
            "out_type": ATTENTION_TYPES[self.out_dtype],
            "softmax_scale_log2": self.softmax_scale * LOG2_E,
            "output_scale": self.output_scale,
        }
