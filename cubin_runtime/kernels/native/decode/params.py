"""The parameter structs of paged decode kernels: the one source of their layout, for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout
from ..constants import ATTENTION_TYPES_TEXT, STATUS_BITS_TEXT
from ..problem import DEALING_FIELDS, GLOBAL_LENS_FIELD, KV_SCALE_FIELDS, SLACK_TILES_FIELD, VALUE_TABLE_FIELD

_COMMON = (
    Field("q", "ptr", "queries of q_type, [tokens, kv_heads * group, head_dim]"),
    Field("out", "ptr", "output of out_type, shaped like q"),
    Field("lse", "ptr", "log-sum-exp, fp32 [tokens, kv_heads * group], base 2; null: not wanted"),
    Field("page_table", "ptr", "int32 [batch, table_stride], page ids of each request in order"),
    Field("seq_lens", "ptr", "int32 [batch], KV length of each request"),
    Field("q_cu_seq_lens", "ptr", "int32 [batch + 1], prefix sums of query tokens; null: q_len each"),
    Field(
        "mask",
        "ptr",
        "uint32 [tokens, ceil(q_len / 32)], bit j: the token sees query token j of its own request; null: causal",
    ),
    Field("sinks", "ptr", "fp32 [kv_heads * group], logits added to the softmax denominator; null: none"),
    GLOBAL_LENS_FIELD,
    Field("softmax_scale_device", "ptr", "fp32, multiplied with softmax_scale_log2; null: 1"),
    Field("output_scale_device", "ptr", "fp32, multiplied with output_scale; null: 1"),
    Field("partial_out", "ptr", "fp32 [slots, rows, head_dim], unnormalised split-KV partial outputs"),
    Field("partial_statistics", "ptr", "fp32 [slots, rows, 2], maximum (base 2) and sum of each partial row"),
    Field("counters", "ptr", "uint32, arrivals at each split output tile; zero between launches"),
    Field("status", "ptr", f"uint32, bits of what was clamped: {STATUS_BITS_TEXT}"),
    Field("q_token_stride", "int64", "elements between tokens in q"),
    Field("q_head_stride", "int64", "elements between heads in q"),
    Field("out_token_stride", "int64", "elements between tokens in out"),
    Field("out_head_stride", "int64", "elements between heads in out"),
    Field("lse_token_stride", "int64", "elements between tokens in lse"),
    Field("lse_head_stride", "int64", "elements between heads in lse"),
    Field("table_stride", "int64", "elements between requests in page_table"),
    VALUE_TABLE_FIELD,
    Field("batch", "int32", "requests"),
    Field("tokens", "int32", "query tokens of all requests"),
    Field("q_len", "int32", "query tokens of each request, or with q_cu_seq_lens their bound; 1 to 64"),
    Field("kv_heads", "int32", "KV heads"),
    Field("group", "int32", "query heads per KV head"),
    Field("group_reciprocal", "int32", "65536 / group, rounded up"),
    Field("head_groups", "int32", "kv_heads / cta_group_size"),
    Field("cta_group_size", "int32", "neighbouring CTAs that process as many KV heads in step; divides kv_heads"),
    Field(
        "splits",
        "int32",
        "0: stream-K; else the most splits of an output tile, or partials of a CTA",
    ),
    Field(
        "cluster_size_log2",
        "int32",
        "log2 of the CTAs in a cluster, of which each output tile may have one; -1: no clusters",
    ),
    SLACK_TILES_FIELD,
    Field("min_rows", "int32", "skip requests of fewer rows (query tokens times group), for another launch"),
    Field("max_rows", "int32", "skip requests of more rows"),
    Field("page_size_log2", "int32", "log2 of the tokens in a page; 30: a request has one page, of any size"),
    Field("num_pages", "int32", "pages in the pool"),
    Field("max_seq_len", "int32", "bound on every length"),
    Field("window_left", "int32", "keys before its own position that a query sees; -1: all"),
    Field(
        "positions_by_index",
        "int32",
        "for windows, whether a query token's position goes by its index; 0: by how many query tokens it sees",
    ),
    *DEALING_FIELDS,
    Field("q_type", "int32", ATTENTION_TYPES_TEXT),
    Field("out_type", "int32", "likewise"),
    Field("softmax_scale_log2", "float", "softmax scale times log2(e)"),
    Field("output_scale", "float", "multiplied with the output"),
)

_TMA = (
    Field("k_map", "CUtensorMap", "keys: (head_dim, token in page, KV head, page)"),
    Field("v_map", "CUtensorMap", "values, likewise"),
    *_COMMON,
)
_COPY = (
    Field("k", "ptr", "keys"),
    Field("v", "ptr", "values"),
    Field("k_page_stride", "int64", "elements between pages in k"),
    Field("k_token_stride", "int64", "elements between tokens of a page in k"),
    Field("k_head_stride", "int64", "elements between KV heads in k"),
    Field("v_page_stride", "int64", "elements between pages in v"),
    Field("v_token_stride", "int64", "elements between tokens of a page in v"),
    Field("v_head_stride", "int64", "elements between KV heads in v"),
    *_COMMON,
)

PAGED_DECODE_TMA = StructLayout.declare("PagedDecodeTmaParams", _TMA)
PAGED_DECODE_COPY = StructLayout.declare("PagedDecodeCopyParams", _COPY)
PAGED_DECODE_TMA_E4M3 = StructLayout.declare("PagedDecodeTmaE4m3Params", (*_TMA, *KV_SCALE_FIELDS))
PAGED_DECODE_COPY_E4M3 = StructLayout.declare("PagedDecodeCopyE4m3Params", (*_COPY, *KV_SCALE_FIELDS))

LAYOUTS = MappingProxyType(
    {
        layout.name: layout
        for layout in (PAGED_DECODE_TMA, PAGED_DECODE_TMA_E4M3, PAGED_DECODE_COPY, PAGED_DECODE_COPY_E4M3)
    }
)
