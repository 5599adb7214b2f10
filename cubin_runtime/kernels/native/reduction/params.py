"""The parameter structs of the two kernels that follow a trtllm-gen launch: one source for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout

KV_REDUCTION = StructLayout.declare(
    "KvReductionParams",
    (
        Field("out", "ptr", "output [tokens, heads_q, head_dim_v], contiguous"),
        Field("partial_out", "ptr", "2-byte floats [batch, head CTAs, ctas_q, ctas_kv, tile_q, head_dim]"),
        Field("partial_statistics", "ptr", "fp32 pairs, maximum and sum, shaped like partial_out without head_dim"),
        Field("softmax_statistics", "ptr", "fp32 pairs [tokens, heads_q] to fill; null: not wanted"),
        Field("seq_lens", "ptr", "int32 [batch], keys of each request"),
        Field("cum_seq_lens_q", "ptr", "int32 [batch + 1], running sum of query lengths; null: max_q each"),
        Field("top_k_lens", "ptr", "int32 [tokens], sparse keys of each query; null: not by token"),
        Field("sinks", "ptr", "fp32 [heads_q], logits that only enter the denominator; null: none"),
        Field("device_softmax_scale_log2", "ptr", "fp32 on the device that replaces softmax_scale_log2; null: none"),
        Field("max_q", "int32", "bound on every query length"),
        Field("ctas_q", "int32", "tiles of queries a request"),
        Field("ctas_kv", "int32", "splits of the keys, used or not"),
        Field("ctas_per_tile", "int32", "CTAs of this kernel that share one tile"),
        Field("value_ctas", "int32", "parts of the value dimension"),
        Field("heads_q", "int32", "query heads"),
        Field("heads_per_cta", "int32", "query heads in one tile"),
        Field("tokens_per_cta", "int32", "query tokens in one tile"),
        Field("tile_q", "int32", "rows of a tile in the partials"),
        Field("tile_kv", "int32", "keys that give one split work"),
        Field("head_dim", "int32", "values of a partial row, 8 to 4096, a power of two"),
        Field("head_dim_v", "int32", "values of an output row"),
        Field("top_k", "int32", "sparse keys a query; 0: all"),
        Field("softmax_scale_log2", "float", "softmax scale times log2(e)"),
        Field("sum_scale", "float", "factor that the partial sums carry and the partial outputs do not"),
    ),
)

LSE_FROM_STATISTICS = StructLayout.declare(
    "LseFromStatisticsParams",
    (
        Field("statistics", "ptr", "fp32 pairs [tokens, heads_q]: maximum (natural exponents) and sum"),
        Field("lse", "ptr", "fp32 log-sum-exp, base 2, to fill"),
        Field("token_stride", "int64", "elements between tokens in lse"),
        Field("head_stride", "int64", "elements between heads in lse"),
        Field("rows", "int64", "tokens times heads_q"),
        Field("heads_q", "int32", "query heads"),
    ),
)

LAYOUTS = MappingProxyType({layout.name: layout for layout in (KV_REDUCTION, LSE_FROM_STATISTICS)})
