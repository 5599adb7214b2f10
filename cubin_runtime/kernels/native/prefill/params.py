"""The parameter struct of the context attention kernels: one source for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout
from ..constants import STATUS_BITS_TEXT
from ..problem import KV_SCALE_FIELDS, VALUE_TABLE_FIELD

_FIELDS = (
    Field("q_map", "CUtensorMap", "queries: (head_dim, head, token)"),
    Field(
        "k_map",
        "CUtensorMap",
        "keys: (head_dim, token in page, KV head, page); ragged: one page; else one each request",
    ),
    Field("v_map", "CUtensorMap", "values, likewise, of their own columns"),
    Field("out", "ptr", "output, [tokens, heads, columns of a value], of the type of q"),
    Field("lse", "ptr", "log-sum-exp, fp32 [tokens, heads]; null: not wanted"),
    Field("page_table", "ptr", "int32 [batch, table_stride], page ids of each request in order; null: no pages"),
    Field("seq_lens", "ptr", "int32 [batch], KV length of each request; null: by kv_cu_seq_lens, or kv_tokens each"),
    Field("q_cu_seq_lens", "ptr", "int32 [batch + 1], prefix sums of query tokens; null: q_len each"),
    Field("kv_cu_seq_lens", "ptr", "int32 [batch + 1], prefix sums of ragged keys; null: a page of k_map each"),
    Field("sinks", "ptr", "fp32 [heads], logits added to the softmax denominator; null: none"),
    Field("softmax_scale_device", "ptr", "fp32, multiplied with softmax_scale_log2; null: 1"),
    Field("output_scale_device", "ptr", "fp32, multiplied with output_scale; null: 1"),
    Field("counters", "ptr", "uint32 [2], work tiles handed out and CTAs done; zero between launches"),
    Field("status", "ptr", f"uint32, bits of what was clamped: {STATUS_BITS_TEXT}"),
    Field("out_token_stride", "int64", "elements between tokens in out"),
    Field("out_head_stride", "int64", "elements between heads in out"),
    Field("lse_token_stride", "int64", "elements between tokens in lse"),
    Field("lse_head_stride", "int64", "elements between heads in lse"),
    Field("table_stride", "int64", "elements between requests in page_table"),
    VALUE_TABLE_FIELD,
    Field("batch", "int32", "requests"),
    Field("tokens", "int32", "query tokens of all requests"),
    Field("kv_tokens", "int32", "ragged keys of all requests, or those of each"),
    Field("q_len", "int32", "query tokens of each request, or with q_cu_seq_lens their bound"),
    Field("max_seq_len", "int32", "bound on every KV length"),
    Field("group", "int32", "query heads per KV head"),
    Field("packed_log2", "int32", "log2 of the heads whose rows of a token are neighbours in a row tile"),
    Field("head_packs", "int32", "heads >> packed_log2"),
    Field("section_packs", "int32", "head packs whose work tiles are interleaved, so that their keys stay in L2"),
    Field("page_size_log2", "int32", "log2 of the tokens in a page; 30: a request has one page, of any size"),
    Field("num_pages", "int32", "pages in the pool"),
    Field("window_left", "int32", "keys before its own position that a query sees"),
    Field("window_right", "int32", "keys behind its own position that a query sees; 0: causal"),
    Field("softmax_scale_log2", "float", "softmax scale times log2(e)"),
    Field("output_scale", "float", "multiplied with the output"),
    Field("soft_cap", "float", "bound that tanh gives the scores, in kernels built for one"),
    Field("lse_scale", "float", "1: log-sum-exp in base 2; ln(2): in base e"),
    Field("lse_sink", "int32", "whether the log-sum-exp includes the sink"),
)

CONTEXT_ATTENTION = StructLayout.declare("ContextAttentionParams", _FIELDS)
# With keys and values in e4m3, which have scales.
CONTEXT_ATTENTION_E4M3 = StructLayout.declare("ContextAttentionE4m3Params", (*_FIELDS, *KV_SCALE_FIELDS))

# Of the kernel that converts e4m3 keys and values to 16 bits before.
CACHE_CONVERSION = StructLayout.declare(
    "CacheConversionParams",
    (
        Field("k", "ptr", "keys, e4m3"),
        Field("v", "ptr", "values, e4m3"),
        Field("converted_k", "ptr", "keys, 16 bits: [batch, kv_heads, tokens, k_columns]"),
        Field("converted_v", "ptr", "values, 16 bits: [batch, kv_heads, tokens, v_columns]"),
        Field("page_table", "ptr", "int32 [batch, table_stride], page ids of each request in order; null: no pages"),
        Field("seq_lens", "ptr", "int32 [batch], keys of each request; null: tokens"),
        Field("q_cu_seq_lens", "ptr", "int32 [batch + 1], prefix sums of query tokens; null: each request has some"),
        Field("status", "ptr", f"uint32, bits of what was clamped: {STATUS_BITS_TEXT}"),
        *(
            Field(f"{name}_{of}_stride", "int64", f"bytes between {of}s in {name}")
            for name in ("k", "v")
            for of in ("page", "token", "head")
        ),
        Field("table_stride", "int64", "elements between requests in page_table"),
        VALUE_TABLE_FIELD,
        Field("kv_heads", "int32", "KV heads"),
        Field("tokens", "int32", "tokens of a request that there is room for; all, if they are ragged"),
        Field("max_seq_len", "int32", "bound on every KV length"),
        Field("k_columns", "int32", "columns of a key"),
        Field("v_columns", "int32", "columns of a value"),
        Field("page_size_log2", "int32", "log2 of the tokens in a page; 30: a request has one page, of any size"),
        Field("num_pages", "int32", "pages in the pool"),
    ),
)

# Of the kernel that merges the outputs of split keys.
MERGE_PARTS = StructLayout.declare(
    "MergePartsParams",
    (
        Field("parts", "ptr", "outputs of the parts, fp32 [tokens, splits, heads, columns]"),
        Field("part_lses", "ptr", "their log-sum-exps in base 2, fp32 [tokens, splits, heads]; -inf: saw no key"),
        Field("out", "ptr", "output, [tokens, heads, columns]"),
        Field("lse", "ptr", "log-sum-exp, fp32 [tokens, heads]; null: not wanted"),
        Field("sinks", "ptr", "fp32 [heads], logits added to the softmax denominator; null: none"),
        Field("q_cu_seq_lens", "ptr", "int32 [batch + 1], prefix sums of query tokens; null: all are of a request"),
        Field("out_token_stride", "int64", "elements between tokens in out"),
        Field("out_head_stride", "int64", "elements between heads in out"),
        Field("lse_token_stride", "int64", "elements between tokens in lse"),
        Field("lse_head_stride", "int64", "elements between heads in lse"),
        Field("batch", "int32", "requests"),
        Field("tokens", "int32", "query tokens of all requests, and those of none"),
        Field("heads", "int32", "query heads"),
        Field("columns", "int32", "columns of a value, a multiple of 4 up to 256"),
        Field("splits", "int32", "parts of a row, up to 64"),
        Field("warps_log2", "int32", "log2 of the warps that share a row, up to 3"),
        Field("lse_scale", "float", "1: log-sum-exp in base 2; ln(2): in base e"),
    ),
)

LAYOUTS = MappingProxyType(
    {layout.name: layout for layout in (CONTEXT_ATTENTION, CONTEXT_ATTENTION_E4M3, CACHE_CONVERSION, MERGE_PARTS)}
)
