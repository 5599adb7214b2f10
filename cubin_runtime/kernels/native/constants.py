"""Numbers that native kernels and their planners share: declared here, generated as a header for the CUDA sources."""

from __future__ import annotations

from dataclasses import field, fields
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from ...dtypes import DTYPES
from ...values import dataclass

HEADER = "KernelConstants.h"


# Short names of dtypes -> their numbers in q_type and out_type of structs of attention, and in out_type of merges.
ATTENTION_TYPES = MappingProxyType({d.short: d.attention_code for d in DTYPES.values() if d.attention_code is not None})
MERGE_TYPES = MappingProxyType({d.short: d.merge_code for d in DTYPES.values() if d.merge_code is not None})
ATTENTION_TYPES_TEXT = ", ".join(f"{code} {dtype}" for dtype, code in ATTENTION_TYPES.items())
MERGE_TYPES_TEXT = ", ".join(f"{code} {dtype}" for dtype, code in MERGE_TYPES.items())


class StatusBit(IntEnum):
    """Bits of the status word, which a kernel sets when it clamps an input; ``meaning`` says what it met."""

    meaning: str

    def __new__(cls, bit: int, meaning: str) -> StatusBit:
        """A member whose number is ``bit``."""
        member = int.__new__(cls, bit)
        member._value_ = bit
        member.meaning = meaning
        return member

    LENGTH_OVER_BOUND = 1, "a length over max_seq_len"
    LENGTH_NEGATIVE = 2, "a negative length"
    PAGE_OUTSIDE_POOL = 4, "a page id outside the pool"
    QUERIES = 8, "a q_cu_seq_lens that decreases, steps over max_q_len or leaves the query tokens"
    POSITION_WITHOUT_PAGE = 16, "a position behind the pages of its request"
    TOKEN_OF_NO_REQUEST = 32, "a token of no request"
    DRAFT_PARENT = 64, "a parent that does not come before its query token"


STATUS_BITS_TEXT = ", ".join(f"{int(bit)} {bit.meaning}" for bit in StatusBit)


def _number(value: int, meaning: str) -> Any:
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """Sizes and limits; ``CONSTANTS`` is the only instance. In C++ the names are in capitals."""

    segment_tile_tokens: int = _number(128, "keys of a tile where prefill and decode give the same bits")
    segment_tokens: int = _number(512, "keys of a segment there, from absolute multiples of it on")
    decode_split_tokens: int = _number(1024, "batch invariance cuts long requests into splits of this many keys")
    decode_short_splits: int = _number(4, "and shorter requests into up to this many splits")
    decode_short_split_tokens: int = _number(256, "of at least this many keys")
    decode_max_cluster_ctas: int = _number(8, "CTAs of a cluster that merges its splits in shared memory")
    decode_group_reciprocal_bits: int = _number(16, "fraction bits of group_reciprocal")
    partials_per_cta: int = _number(2, "a CTA's work range may begin within one output tile and end within another")
    mla_split_tiles: int = _number(16, "batch invariance cuts requests into splits of this many tiles")
    mla_invariant_splits: int = _number(4, "but into at most this many")
    mla_max_splits: int = _number(192, "splits of an output tile in any other launch, which are at most its CTA groups")
    mla_many_splits: int = _number(16, "splits of an output tile that may have a single tile each")
    mla_merged_tiles: int = _number(2, "tiles of a split otherwise: with fewer, merging costs more than it saves")
    mla_max_cta_group: int = _number(4, "CTAs of a group")
    mla_max_row_scales: int = _number(8, "scales of a row of an fp16 partial, beside its maximum and sum")
    mla_min_page_tokens: int = _number(16, "tokens of the smallest page")
    reduction_threads: int = _number(512, "threads of a CTA of kv_reduction")
    reduction_values: int = _number(8, "neighbouring 2-byte values that one of them merges")
    lse_threads: int = _number(1024, "threads of a CTA of lse_from_statistics, at most")
    append_threads: int = _number(256, "threads of a CTA of append_kv")
    append_ctas_per_multiprocessor: int = _number(6, "CTAs of it on a multiprocessor, at most")
    append_loads: int = _number(2, "16-byte loads of one of them in flight together")
    append_chunk_tokens: int = _number(
        32, "tokens that a CTA of it takes at a time, at most: a lane finds a place of each"
    )
    append_shared_requests: int = _number(1024, "requests whose lengths it keeps in shared memory, at most")
    append_max_units: int = _number(8192, "16-byte units of a token's keys and values in the caches, at most")
    merge_threads: int = _number(256, "threads of a CTA of merge_states")
    merge_ctas_per_multiprocessor: int = _number(4, "CTAs of it on a multiprocessor, at most")
    merge_values: int = _number(8, "neighbouring values that one of them merges at a time")
    merge_parts_threads: int = _number(256, "threads of a CTA of merge_parts")
    merge_parts_max_splits: int = _number(64, "parts into which keys of context attention are split, at most")
    draft_mask_threads: int = _number(128, "threads of a CTA of draft_mask")
    streaming_threads: int = _number(512, "threads of a CTA of streaming_read")
    streaming_loads: int = _number(8, "16-byte loads of one of them for each chunk")
    row_read_max_bytes: int = _number(1152, "bytes of a row of row_read, at most")


CONSTANTS = KernelConstants()


def cpp_names() -> dict[str, int]:
    """Every number by its name in C++."""
    return (
        {f"TYPE_{dtype.upper()}": code for dtype, code in ATTENTION_TYPES.items()}
        | {f"STATUS_{bit.name}": int(bit) for bit in StatusBit}
        | {item.name.upper(): getattr(CONSTANTS, item.name) for item in fields(CONSTANTS)}
    )


def cpp_header() -> str:
    """The text of ``KernelConstants.h``, valid as C++17."""
    meanings = {f"STATUS_{bit.name}": bit.meaning for bit in StatusBit}
    meanings |= {item.name.upper(): item.metadata["meaning"] for item in fields(CONSTANTS)}
    lines = ["#pragma once"]
    for name, number in cpp_names().items():
        comment = f"  // {meanings[name]}" if name in meanings else ""
        lines.append(f"constexpr int {name} = {number};{comment}")
    return "\n".join(lines) + "\n"
