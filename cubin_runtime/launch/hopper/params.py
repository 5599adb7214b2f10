"""The parameter structs of our own kernels: the one source of their layout, for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ..structs import Field, StructLayout
from .following_params import LAYOUTS as FOLLOWING_LAYOUTS

_COMMON = (
    Field("q", "ptr", "queries, bf16 [batch, kv_heads * group, head_dim]"),
    Field("out", "ptr", "output, bf16, shaped like q"),
    Field("lse", "ptr", "log-sum-exp, fp32 [batch, kv_heads * group], base 2; null: not wanted"),
    Field("page_table", "ptr", "int32 [batch, table_stride], page ids of each request in order"),
    Field("seq_lens", "ptr", "int32 [batch], keys of each request"),
    Field("partial_out", "ptr", "fp32 [2 * CTAs, rows, head_dim], unnormalised outputs of split pairs"),
    Field("partial_statistics", "ptr", "fp32 [2 * CTAs, rows, 2], maximum (base 2) and sum of each partial"),
    Field("counters", "ptr", "uint32 [CTAs], arrivals at a split pair; zero between launches"),
    Field("status", "ptr", "uint32, bits of what was clamped: 1 length over bound, 2 negative, 4 page id"),
    Field("q_token_stride", "int64", "elements between requests in q"),
    Field("q_head_stride", "int64", "elements between heads in q"),
    Field("out_token_stride", "int64", "elements between requests in out"),
    Field("out_head_stride", "int64", "elements between heads in out"),
    Field("lse_token_stride", "int64", "elements between requests in lse"),
    Field("lse_head_stride", "int64", "elements between heads in lse"),
    Field("table_stride", "int64", "elements between requests in page_table"),
    Field("batch", "int32", "requests"),
    Field("kv_heads", "int32", "KV heads"),
    Field("group", "int32", "query heads a KV head"),
    Field("heads_together", "int32", "KV heads that neighbouring CTAs read side by side; divides kv_heads"),
    Field("page_size_log2", "int32", "log2 of the tokens in a page"),
    Field("num_pages", "int32", "pages in the pool"),
    Field("max_seq_len", "int32", "bound on every length"),
    Field("softmax_scale_log2", "float", "softmax scale times log2(e)"),
)

PAGED_DECODE_TMA = StructLayout.declare(
    "PagedDecodeTmaParams",
    (
        Field("k_map", "CUtensorMap", "keys: (head_dim, token in page, KV head, page)"),
        Field("v_map", "CUtensorMap", "values, likewise"),
        *_COMMON,
    ),
)

PAGED_DECODE_COPY = StructLayout.declare(
    "PagedDecodeCopyParams",
    (
        Field("k", "ptr", "keys, bf16"),
        Field("v", "ptr", "values, bf16"),
        Field("k_page_stride", "int64", "elements between pages in k"),
        Field("k_token_stride", "int64", "elements between tokens of a page in k"),
        Field("k_head_stride", "int64", "elements between KV heads in k"),
        Field("v_page_stride", "int64", "elements between pages in v"),
        Field("v_token_stride", "int64", "elements between tokens of a page in v"),
        Field("v_head_stride", "int64", "elements between KV heads in v"),
        *_COMMON,
    ),
)

LAYOUTS = MappingProxyType(
    {**{layout.name: layout for layout in (PAGED_DECODE_TMA, PAGED_DECODE_COPY)}, **FOLLOWING_LAYOUTS}
)
