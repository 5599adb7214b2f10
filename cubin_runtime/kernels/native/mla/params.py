"""The parameter structs of the MLA decode kernels: one source for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout
from ..constants import ATTENTION_TYPES_TEXT, STATUS_BITS_TEXT
from ..problem import DEALING_FIELDS, GLOBAL_LENS_FIELD, SLACK_TILES_FIELD

_KV_MAP = Field("kv_map", "CUtensorMap", "latent cache: (latent and rope, token in page, page)")
_V_MAP = Field("v_map", "CUtensorMap", "values: (latent, token in page, page)")
_OTHERS = (
    Field("q", "ptr", "queries of q_type, [tokens, heads, latent + rope]; with q_rope [tokens, heads, latent]"),
    Field("q_rope", "ptr", "rope columns of queries of q_type, [tokens, heads, rope]; null: they follow those in q"),
    Field("out", "ptr", "output of out_type, [tokens, heads, latent]"),
    Field("lse", "ptr", "log-sum-exp, fp32 [tokens, heads], base 2; null: not wanted"),
    Field("page_table", "ptr", "int32 [batch, table_stride], page ids of each request in order"),
    Field("seq_lens", "ptr", "int32 [batch], KV length of each request"),
    Field("q_cu_seq_lens", "ptr", "int32 [batch + 1], prefix sums of query tokens; null: q_len each"),
    Field("mask", "ptr", "uint32 [tokens], bit j: the token sees query token j of its own request; null: causal"),
    Field("sinks", "ptr", "fp32 [heads], logits added to the softmax denominator; null: none"),
    GLOBAL_LENS_FIELD,
    Field("softmax_scale_device", "ptr", "fp32, multiplied with softmax_scale_log2; null: 1"),
    Field("output_scale_device", "ptr", "fp32, multiplied with output_scale; null: 1"),
    Field("partial_out", "ptr", "fp16 [slots, rows of a tile, latent], scaled split-KV partial outputs"),
    Field("partial_statistics", "ptr", "fp32, for each slot the maxima (base 2), sums and scales of its rows"),
    Field("counters", "ptr", "uint32, arrivals, departures and tickets of split output tiles; zero between launches"),
    Field("status", "ptr", f"uint32, bits of what was clamped: {STATUS_BITS_TEXT}"),
    Field("q_token_stride", "int64", "elements between tokens in q"),
    Field("q_head_stride", "int64", "elements between heads in q"),
    Field("q_rope_token_stride", "int64", "elements between tokens in q_rope, or in q if that has the rope columns"),
    Field("q_rope_head_stride", "int64", "elements between heads in q_rope; likewise"),
    Field("out_token_stride", "int64", "elements between tokens in out"),
    Field("out_head_stride", "int64", "elements between heads in out"),
    Field("lse_token_stride", "int64", "elements between tokens in lse"),
    Field("lse_head_stride", "int64", "elements between heads in lse"),
    Field("table_stride", "int64", "elements between requests in page_table"),
    Field("batch", "int32", "requests"),
    Field("tokens", "int32", "query tokens of all requests"),
    Field("q_len", "int32", "query tokens of each request, or with q_cu_seq_lens their bound; 1 to 16"),
    Field("heads", "int32", "query heads, 1 to 128"),
    Field("cta_group_size", "int32", "neighbouring CTAs that process as many row tiles of a request in step"),
    Field("splits", "int32", "0: stream-K; else the most splits of an output tile, by its own KV tiles"),
    SLACK_TILES_FIELD,
    Field(
        "spread_tiles", "int32", "likewise, of the longest output tile, where each has CTAs of its own; 0: some do not"
    ),
    Field("start_tiles", "int32", "KV tiles that take as long as the start of an output tile; 0: no matter"),
    Field("page_size_log2", "int32", "log2 of the tokens in a page"),
    Field("num_pages", "int32", "pages in the pool"),
    Field("max_seq_len", "int32", "bound on every length"),
    *DEALING_FIELDS,
    Field("q_type", "int32", ATTENTION_TYPES_TEXT),
    Field("out_type", "int32", "likewise"),
    Field("softmax_scale_log2", "float", "softmax scale times log2(e)"),
    Field("output_scale", "float", "multiplied with the output"),
)

PAGED_MLA_DECODE = StructLayout.declare("PagedMlaDecodeParams", (_KV_MAP, *_OTHERS))
# Values do not lie in their keys.
PAGED_MLA_DECODE_VALUES = StructLayout.declare("PagedMlaDecodeValuesParams", (_KV_MAP, _V_MAP, *_OTHERS))

LAYOUTS = MappingProxyType({layout.name: layout for layout in (PAGED_MLA_DECODE, PAGED_MLA_DECODE_VALUES)})
