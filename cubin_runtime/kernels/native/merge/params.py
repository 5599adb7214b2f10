"""The parameter struct of the kernel that merges partial results: one source for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout
from ..constants import MERGE_TYPES_TEXT

MERGE_STATES = StructLayout.declare(
    "MergeStatesParams",
    (
        Field("v", "ptr", "partial outputs, [tokens, parts, heads, dim]"),
        Field("s", "ptr", "their log-sum-exps, fp32 [tokens, parts, heads]; -inf: saw no key"),
        Field("v_other", "ptr", "one more part, [tokens, heads, dim]; null: none"),
        Field("s_other", "ptr", "its log-sum-exp, fp32 [tokens, heads]"),
        Field("out", "ptr", "output of out_type, [tokens, heads, dim]"),
        Field("lse", "ptr", "fp32 [tokens, heads], log-sum-exp of the output; null: not wanted"),
        Field("sinks", "ptr", "fp32 [heads], logits added to the softmax denominator; null: none"),
        Field("mask", "ptr", "bytes [tokens], 0: leave the token as it is; null: all are merged"),
        Field("v_token_stride", "int64", "elements between tokens in v"),
        Field("v_part_stride", "int64", "elements between parts in v"),
        Field("v_head_stride", "int64", "elements between heads in v"),
        Field("s_token_stride", "int64", "elements between tokens in s"),
        Field("s_part_stride", "int64", "elements between parts in s"),
        Field("s_head_stride", "int64", "elements between heads in s"),
        Field("v_other_token_stride", "int64", "elements between tokens in v_other"),
        Field("v_other_head_stride", "int64", "elements between heads in v_other"),
        Field("s_other_token_stride", "int64", "elements between tokens in s_other"),
        Field("s_other_head_stride", "int64", "elements between heads in s_other"),
        Field("out_token_stride", "int64", "elements between tokens in out"),
        Field("out_head_stride", "int64", "elements between heads in out"),
        Field("lse_token_stride", "int64", "elements between tokens in lse"),
        Field("lse_head_stride", "int64", "elements between heads in lse"),
        Field("tokens", "int32", "tokens"),
        Field("heads", "int32", "heads; tokens times heads is below 2^31"),
        Field("parts", "int32", "parts in v, at least 1"),
        Field("units", "int32", "units of 8 values in a row"),
        Field("lanes_log2", "int32", "log2 of the lanes that share a row; at most 5, divides units"),
        Field("out_type", "int32", MERGE_TYPES_TEXT),
        Field("lse_to_log2", "float", "factor from the unit of all log-sum-exps to base 2"),
        Field("lse_from_log2", "float", "its inverse"),
    ),
)

LAYOUTS = MappingProxyType({MERGE_STATES.name: MERGE_STATES})
