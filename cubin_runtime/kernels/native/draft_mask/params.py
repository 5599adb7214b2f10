"""The parameter struct of the kernel that packs draft masks: one source for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout
from ..constants import STATUS_BITS_TEXT

DRAFT_MASK = StructLayout.declare(
    "DraftMaskParams",
    (
        Field("out", "ptr", "uint32 [tokens, words], bit j: the token sees query token j of its own request"),
        Field("parents", "ptr", "int32, the parent of each token among its request's; -1: none; null: no tree"),
        Field("allowed", "ptr", "bytes [tokens, columns], not 0: the token sees that query token; null: no such"),
        Field("q_cu_seq_lens", "ptr", "int32 [batch + 1], prefix sums of query tokens; null: q_len each"),
        Field("status", "ptr", f"uint32, bits of what was clamped: {STATUS_BITS_TEXT}"),
        Field("parents_stride", "int64", "elements between tokens in parents"),
        Field("allowed_token_stride", "int64", "bytes between tokens in allowed"),
        Field("allowed_column_stride", "int64", "bytes between columns in allowed"),
        Field("tokens", "int32", "query tokens of all requests"),
        Field("q_len", "int32", "query tokens of each request, or with q_cu_seq_lens their bound; 1 to 64"),
        Field("words", "int32", "words of a token, ceil(q_len / 32)"),
    ),
)

LAYOUTS = MappingProxyType({DRAFT_MASK.name: DRAFT_MASK})
