"""The parameter struct of the sparse MLA decode kernel: one source for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout
from ..constants import ATTENTION_TYPES_TEXT, STATUS_BITS_TEXT
from ..problem import SLACK_TILES_FIELD

SPARSE_MLA_DECODE = StructLayout.declare(
    "SparseMlaDecodeParams",
    (
        Field("q", "ptr", "queries, bf16 [batch, heads, latent + rope]"),
        Field("kv_cache", "ptr", "rows of the latent cache, by page and row of the page"),
        Field("indices", "ptr", "int32 [batch, width], slots of the rows that each token attends to; negative: none"),
        Field("topk_lens", "ptr", "int32 [batch], how many entries of each list count; null: width"),
        Field("sinks", "ptr", "fp32 [heads], logits added to the softmax denominator; null: none"),
        Field("softmax_scale_device", "ptr", "fp32, multiplied with softmax_scale; null: 1"),
        Field("output_scale_device", "ptr", "fp32, multiplied with output_scale; null: 1"),
        Field("out", "ptr", "output of out_type, [batch, heads, latent]"),
        Field("lse", "ptr", "log-sum-exp, fp32 [batch, heads]; null: not wanted"),
        Field("partial_out", "ptr", "fp16 [slots, rows of a tile, latent], scaled split-KV partial outputs"),
        Field("partial_statistics", "ptr", "fp32, for each slot the maxima (base 2), sums and scales of its rows"),
        Field(
            "counters", "ptr", "uint32, arrivals, departures and tickets of split output tiles; zero between launches"
        ),
        Field("status", "ptr", f"uint32, bits of what was clamped: {STATUS_BITS_TEXT}"),
        Field("q_token_stride", "int64", "elements between tokens in q"),
        Field("q_head_stride", "int64", "elements between heads in q"),
        Field("out_token_stride", "int64", "elements between tokens in out"),
        Field("out_head_stride", "int64", "elements between heads in out"),
        Field("lse_token_stride", "int64", "elements between tokens in lse"),
        Field("lse_head_stride", "int64", "elements between heads in lse"),
        Field("indices_stride", "int64", "elements between lists"),
        Field("page_bytes", "int64", "bytes between pages of the cache"),
        Field("row_bytes", "int64", "bytes between rows of a page"),
        Field("batch", "int32", "query tokens, each a request of its own"),
        Field("heads", "int32", "query heads, 1 to 128"),
        Field("width", "int32", "entries of a list"),
        Field("rows", "int32", "rows of the cache: slots from there on are outside of it"),
        Field("page_size_log2", "int32", "log2 of the rows in a page"),
        Field("cta_group_size", "int32", "neighbouring CTAs that process as many row tiles of a token in step"),
        Field("splits", "int32", "0: stream-K; else the most splits of an output tile, or its parts in clusters"),
        SLACK_TILES_FIELD,
        Field("out_type", "int32", ATTENTION_TYPES_TEXT),
        Field("lse_sink", "int32", "1: the log-sum-exp includes the sink"),
        Field("softmax_scale", "float", "factor of the scores"),
        Field("output_scale", "float", "multiplied with the output"),
        Field("lse_from_log2", "float", "factor from base 2 to the unit of the log-sum-exp"),
    ),
)

LAYOUTS = MappingProxyType({SPARSE_MLA_DECODE.name: SPARSE_MLA_DECODE})
