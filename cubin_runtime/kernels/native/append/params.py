"""The parameter struct of the KV append kernel: one source for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout
from ..constants import STATUS_BITS_TEXT
from ..problem import kv_scale_stride_fields

_FIELDS = (
    Field("key", "ptr", "new keys, [tokens, kv_heads, key dim]"),
    Field("value", "ptr", "new values, [tokens, kv_heads, value dim]"),
    Field("k_cache", "ptr", "keys"),
    Field("v_cache", "ptr", "values"),
    Field("page_table", "ptr", "int32 page ids: [batch, table_stride], or with page_indptr [columns]"),
    Field("page_indptr", "ptr", "int32 [batch + 1], where the page ids of each request begin; null: table_stride"),
    Field("seq_lens", "ptr", "int32 [batch], keys of each request; null: positions"),
    Field("cum_seq_lens", "ptr", "int32 [batch + 1], where the tokens of each request begin; null: new_tokens each"),
    Field("positions", "ptr", "int32 [tokens], position of each token among its request's keys; null: seq_lens"),
    Field("batch_indices", "ptr", "int32 [tokens], request of each token, with positions"),
    Field("k_scale_device", "ptr", "fp32, multiplied with k_scale; null: 1"),
    Field("v_scale_device", "ptr", "fp32, multiplied with v_scale; null: 1"),
    Field("status", "ptr", f"uint32, bits of what was met: {STATUS_BITS_TEXT}"),
    Field("key_token_stride", "int64", "bytes between tokens in key"),
    Field("key_head_stride", "int64", "bytes between KV heads in key"),
    Field("value_token_stride", "int64", "bytes between tokens in value"),
    Field("value_head_stride", "int64", "bytes between KV heads in value"),
    Field("k_page_stride", "int64", "bytes between pages in k_cache"),
    Field("k_token_stride", "int64", "bytes between tokens of a page in k_cache"),
    Field("k_head_stride", "int64", "bytes between KV heads in k_cache"),
    Field("v_page_stride", "int64", "bytes between pages in v_cache"),
    Field("v_token_stride", "int64", "bytes between tokens of a page in v_cache"),
    Field("v_head_stride", "int64", "bytes between KV heads in v_cache"),
    Field("table_stride", "int64", "elements between requests in page_table"),
    Field("batch", "int32", "requests"),
    Field("tokens", "int32", "new tokens, padding included"),
    Field("new_tokens", "int32", "new tokens of each request where all have as many"),
    Field("lengths_include_new", "int32", "1: seq_lens are those with the new tokens; 0: without"),
    Field("kv_heads", "int32", "KV heads"),
    Field("page_size", "int32", "tokens of a page"),
    Field("num_pages", "int32", "pages in the pool"),
    Field("columns", "int32", "page ids of a request in page_table; with page_indptr all of them"),
    Field("k_units", "int32", "16-byte units of a key of one head in the cache, at least 2"),
    Field("v_units", "int32", "16-byte units of a value, likewise"),
    Field("token_units", "int32", "kv_heads * (k_units + v_units)"),
    Field("k_reciprocal", "uint32", "2^32 / k_units, rounded up"),
    Field("v_reciprocal", "uint32", "2^32 / v_units, rounded up"),
    Field("token_reciprocal", "uint32", "2^32 / token_units, rounded up"),
    Field("k_scale", "float", "what keys are divided by before they are quantised"),
    Field("v_scale", "float", "what values are divided by"),
    Field("chunk_tokens", "int32", "tokens that a CTA takes at a time"),
)
APPEND_KV = StructLayout.declare("AppendKvParams", _FIELDS)
APPEND_KV_QUANTISE = StructLayout.declare(
    "AppendKvQuantiseParams", (*_FIELDS, *kv_scale_stride_fields("_scale_device"))
)

LAYOUTS = MappingProxyType({layout.name: layout for layout in (APPEND_KV, APPEND_KV_QUANTISE)})
