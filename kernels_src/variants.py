"""The list of native kernels, one entry per cubin. CONTRIBUTING says how to add one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from cubin_runtime.kernels.native.constants import MERGE_TYPES
from cubin_runtime.kernels.native.mla.select import COLUMNS as MLA_COLUMNS
from cubin_runtime.kernels.native.mla.select import SEPARATE_COLUMNS as MLA_SEPARATE_COLUMNS
from cubin_runtime.kernels.native.prefill.select import SEGMENT_HEAD_DIMS

# Dynamic plus static shared memory that one block can opt in to, in bytes, by compute capability.
SHARED_BYTES_PER_BLOCK: Mapping[str, int] = {
    "80": 163 << 10,
    "86": 99 << 10,
    "89": 99 << 10,
    "90": 227 << 10,
    "100": 227 << 10,
    "103": 227 << 10,
    "120": 99 << 10,
}
# What L2 does with keys and values: an L2Policy of common/ptx.cuh, by operation. Chosen in sequences of layers on an
# H200 (benchmarks/results/l2_policies.json): decodes lose 0.3% to 1.1% without evict_first and MLA of 16 heads up to
# 4%; prompts of 2,048 tokens gain 1% to 20% without a hint, and longer ones neither gain nor lose beyond the noise.
L2_POLICIES: Mapping[str, str] = {
    "paged_decode": "evict_first",
    "paged_mla_decode": "evict_first",
    "context_attention": "evict_unchanged",
}
# The same of MLA keys that several CTAs read: up to 64 requests gain 1% to 3% without a hint.
GROUP_L2_POLICY = "evict_unchanged"
# How new keys, new values and states are read, each once: merges gain 2% to 11% over __ldcs, appends up to 4%.
LOAD_FUNCTION = "__ldcg"
# Kernels for these SMs were measured on a GPU; those for other SMs were only compiled.
MEASURED_SMS = frozenset({"90", "90a"})

_SM = re.compile(r"(\d{2,3})([af]?)")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel compiled for one SM.

    ``source`` is relative to ``kernels_src``; ``symbol`` the name of its ``extern "C" __global__`` function;
    ``defines`` become ``-D`` options; ``traits`` are what a planner selects by; ``struct`` names one of the
    layouts of ``cubin_runtime.kernels.native.layouts``. Threads and shared memory follow from the source: the build
    reads them back from the compiler.
    """

    source: str
    symbol: str
    sm: str
    operation: str
    struct: str
    traits: Mapping[str, int | str | bool] = field(default_factory=dict)
    defines: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _SM.fullmatch(self.sm) or self.base_sm not in SHARED_BYTES_PER_BLOCK:
            raise ValueError(f"{self.symbol}: sm={self.sm!r}: expected one of {', '.join(SHARED_BYTES_PER_BLOCK)}")
        if not _SYMBOL.fullmatch(self.symbol):
            raise ValueError(f"symbol={self.symbol!r}: expected a C identifier")

    @property
    def name(self) -> str:
        """``SYMBOL_smNN``, unique in a release."""
        return f"{self.symbol}_sm{self.sm}"

    @property
    def family(self) -> str:
        """The folder that holds the source and, in a release, the cubin."""
        return self.source.partition("/")[0]

    @property
    def file(self) -> str:
        """The cubin's path in the release folder."""
        return f"{self.family}/{self.name}.cubin"

    @property
    def base_sm(self) -> str:
        """The SM without its suffix."""
        return self.sm.rstrip("af")

    @property
    def status(self) -> str:
        """``measured`` or ``built, not run``."""
        return "measured" if self.sm in MEASURED_SMS else "built, not run"


@dataclass(frozen=True, slots=True)
class _DecodeShape:
    """Build options of paged decode: rows of a CTA, consumer warpgroups, pipeline stages, CTAs per SM, and the tokens
    of a KV tile, of which a stage holds the keys or the values.

    ``wgmma``: warpgroups multiply whole tiles by 64 rows; otherwise warps multiply 16 tokens by groups of 8 rows.
    ``q_e4m3``: queries are e4m3 and multiplied with e4m3 keys as they are. ``segments``: bits of prefill; e4m3 keys and
    values become ``q_type``, which is that of queries.
    """

    head_dim: int
    rows: int
    warpgroups: int
    stages: int
    ctas: int
    wgmma: bool = False
    tile: int = 64
    q_e4m3: bool = False
    segments: bool = False
    q_type: str = ""

    @property
    def q_dtypes(self) -> str:
        """Query dtypes that the kernel accepts with an e4m3 cache."""
        if self.q_type:
            return self.q_type
        return "e4m3" if self.q_e4m3 else "bf16,fp16" if self.wgmma else "bf16,fp16,e4m3"

    @property
    def arithmetic(self) -> str:
        """Kernels with the same dtype, head_dim and arithmetic give a row the same bits."""
        return "segments" if self.segments else f"warpgroups of {self.rows} rows" if self.wgmma else "warps"


def _paged_decode(sm: str, dtype: str, shape: _DecodeShape) -> Variant:
    tma = sm == "90a"
    return Variant(
        source="fmha/paged_decode.cu",
        symbol=f"fmha_paged_decode_{dtype}{'_q_e4m3' if shape.q_e4m3 else ''}{shape.q_type and f'_q_{shape.q_type}'}"
        f"_d{shape.head_dim}_rows{shape.rows}{'_segments' if shape.segments else ''}",
        sm=sm,
        operation="paged_decode",
        struct=f"PagedDecode{'Tma' if tma else 'Copy'}{'E4m3' if dtype == 'e4m3' else ''}Params",
        traits={
            "dtype": dtype,
            "q_dtypes": shape.q_dtypes if dtype == "e4m3" else dtype,
            "head_dim": shape.head_dim,
            "rows": shape.rows,
            "tile_tokens": shape.tile,
            "ctas_per_multiprocessor": shape.ctas,
            "tma": tma,
            "arithmetic": shape.arithmetic,
            **({"l2_policy": L2_POLICIES["paged_decode"]} if tma else {}),
        },
        defines={
            "HEAD_DIM": shape.head_dim,
            "KV_E4M3": int(dtype == "e4m3"),
            "MMA_FP16": int((shape.q_type or dtype) != "bf16"),
            "Q_E4M3": int(shape.q_e4m3),
            "ROWS": shape.rows,
            "TILE_TOKENS": shape.tile,
            "CONSUMER_WARPGROUPS": shape.warpgroups,
            "WARPGROUP_MMA": int(shape.wgmma),
            "STAGES": shape.stages,
            "CTAS_PER_SM": shape.ctas,
            "USE_TMA": int(tma),
            **({"L2_POLICY": L2_POLICIES["paged_decode"]} if tma else {}),
            **({"SEGMENTS": 1} if shape.segments else {}),
        },
    )


# head_dim, rows, warpgroups, stages, CTAs. Two CTAs share an SM's 227 KB where registers allow it.
_HOPPER_DECODE_16_BITS = (
    _DecodeShape(32, 16, 1, 20, 2),
    _DecodeShape(64, 8, 1, 6, 2, tile=128),
    _DecodeShape(64, 16, 1, 6, 2, tile=128),
    _DecodeShape(64, 64, 2, 12, 1, wgmma=True, tile=128),
    _DecodeShape(64, 128, 2, 8, 1, wgmma=True, tile=128),
    _DecodeShape(128, 8, 1, 6, 2),
    _DecodeShape(128, 16, 1, 6, 2),
    _DecodeShape(128, 64, 2, 8, 1, wgmma=True),
    _DecodeShape(128, 128, 2, 4, 1, wgmma=True, tile=128),
    _DecodeShape(256, 8, 1, 6, 1),
    _DecodeShape(256, 32, 2, 4, 1),
    _DecodeShape(512, 8, 1, 3, 1),
)
# Those that give the bits of prefill, for batch_invariant.
_HOPPER_DECODE_SEGMENTS = (
    _DecodeShape(64, 8, 1, 6, 2, tile=128, segments=True),
    _DecodeShape(64, 16, 1, 6, 2, tile=128, segments=True),
    _DecodeShape(64, 64, 1, 4, 2, wgmma=True, tile=128, segments=True),
    _DecodeShape(128, 8, 1, 6, 1, tile=128, segments=True),
    _DecodeShape(128, 16, 1, 6, 1, tile=128, segments=True),
    _DecodeShape(128, 64, 2, 6, 1, wgmma=True, tile=128, segments=True),
    _DecodeShape(128, 128, 2, 4, 1, wgmma=True, tile=128, segments=True),
)
_HOPPER_DECODE_SEGMENTS_8_BITS = tuple(
    _DecodeShape(head_dim, rows, warpgroups, stages, ctas, wgmma=rows == 64, tile=128, segments=True, q_type=q_type)
    for q_type in ("bf16", "fp16")
    for head_dim, rows, warpgroups, stages, ctas in (
        (64, 8, 1, 8, 3),
        (64, 16, 1, 12, 2),
        (64, 64, 1, 12, 1),
        (128, 8, 1, 6, 2),
        (128, 16, 1, 4, 2),
        (128, 64, 2, 4, 1),
    )
)
_HOPPER_DECODE_8_BITS = (
    _DecodeShape(32, 16, 1, 20, 2),
    _DecodeShape(64, 8, 1, 6, 2, tile=128),
    _DecodeShape(64, 16, 1, 6, 2, tile=128),
    _DecodeShape(64, 64, 2, 12, 1, wgmma=True, tile=128),
    _DecodeShape(64, 64, 2, 12, 1, wgmma=True, tile=128, q_e4m3=True),
    _DecodeShape(64, 128, 2, 12, 1, wgmma=True, tile=128, q_e4m3=True),
    _DecodeShape(128, 8, 1, 6, 2, tile=128),
    _DecodeShape(128, 16, 1, 6, 2, tile=128),
    _DecodeShape(128, 64, 2, 8, 1, wgmma=True),
    _DecodeShape(128, 64, 2, 12, 1, wgmma=True, q_e4m3=True),
    _DecodeShape(128, 128, 2, 16, 1, wgmma=True, q_e4m3=True),
    _DecodeShape(256, 8, 1, 10, 1),
    _DecodeShape(256, 32, 2, 8, 1),
    _DecodeShape(512, 8, 1, 6, 1),
)
# All of these fit into 99 KB of shared memory, the least of these SMs.
_PORTABLE_DECODE_16_BITS = (
    _DecodeShape(32, 16, 1, 8, 1),
    _DecodeShape(64, 16, 1, 6, 1),
    _DecodeShape(128, 16, 1, 4, 1),
    _DecodeShape(256, 8, 1, 2, 1),
)
_PORTABLE_DECODE_8_BITS = (
    _DecodeShape(32, 16, 1, 8, 1),
    _DecodeShape(64, 16, 1, 8, 1),
    _DecodeShape(128, 16, 1, 8, 1),
    _DecodeShape(256, 8, 1, 5, 1),
)
_PORTABLE_SMS = ("80", "86", "89", "100", "120")


def _decode_variants() -> tuple[Variant, ...]:
    hopper = [
        _paged_decode("90a", dtype, shape)
        for dtype in ("bf16", "fp16")
        for shape in (*_HOPPER_DECODE_16_BITS, *_HOPPER_DECODE_SEGMENTS)
    ]
    eight_bits = (*_HOPPER_DECODE_8_BITS, *_HOPPER_DECODE_SEGMENTS_8_BITS)
    hopper += [_paged_decode("90a", "e4m3", shape) for shape in eight_bits]
    portable = [
        _paged_decode(sm, dtype, shape)
        for sm in _PORTABLE_SMS
        for dtype in ("bf16", "fp16")
        for shape in _PORTABLE_DECODE_16_BITS
    ]
    # The conversion from e4m3 came with SM89.
    portable += [
        _paged_decode(sm, "e4m3", shape) for sm in _PORTABLE_SMS if int(sm) >= 89 for shape in _PORTABLE_DECODE_8_BITS
    ]
    return (*hopper, *portable)


# Dtypes of partials and output of a reduction; a 2-byte output has the type of the partials.
_REDUCTION_DTYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "e4m3"))
_FOLLOWING_SMS = ("90a", "100", "103")


def _kv_reduction(sm: str, partial: str, out: str) -> Variant:
    return Variant(
        source="trtllm_gen/kv_reduction.cu",
        symbol=f"trtllm_gen_kv_reduction_{partial}_to_{out}",
        sm=sm,
        operation="kv_reduction",
        struct="KvReductionParams",
        traits={"dtype_partial": partial, "dtype_out": out},
        defines={"PARTIAL_FP16": int(partial == "fp16"), "OUT_E4M3": int(out == "e4m3")},
    )


def _lse_from_statistics(sm: str) -> Variant:
    return Variant(
        source="trtllm_gen/lse_from_statistics.cu",
        symbol="trtllm_gen_lse_from_statistics",
        sm=sm,
        operation="lse_from_statistics",
        struct="LseFromStatisticsParams",
    )


# The ways to read of which the fastest is the limit of what kernels may reach: source and L2 policy.
_READS = tuple(product(("streaming_read", "bulk_read"), ("evict_first", "evict_unchanged")))


def _streaming_read(sm: str, source: str, l2_policy: str) -> Variant:
    return Variant(
        source=f"measure/{source}.cu",
        symbol=f"measure_{source}_{l2_policy}",
        sm=sm,
        operation="streaming_read",
        struct="StreamingReadParams",
        traits={"way": source, "l2_policy": l2_policy},
        defines={"L2_POLICY": l2_policy},
    )


def _row_read(sm: str, l2_policy: str) -> Variant:
    return Variant(
        source="measure/row_read.cu",
        symbol=f"measure_row_read_{l2_policy}",
        sm=sm,
        operation="row_read",
        struct="RowReadParams",
        traits={"l2_policy": l2_policy},
        defines={"L2_POLICY": l2_policy},
    )


# Dtypes of new keys and values, and of the caches where those are others: quantised, else copied.
_APPEND_DTYPES = (None, ("bf16", "e4m3"), ("fp16", "e4m3"))


def _append_kv(sm: str, dtypes: tuple[str, str] | None) -> Variant:
    return Variant(
        source="append/append_kv.cu",
        symbol=f"append_kv_{'_to_'.join(dtypes) if dtypes else 'copy'}",
        sm=sm,
        operation="append_kv",
        struct="AppendKvQuantiseParams" if dtypes else "AppendKvParams",
        traits={"quantise": f"{dtypes[0]} to {dtypes[1]}" if dtypes else ""},
        defines={
            "QUANTISE": int(dtypes is not None),
            "SOURCE_FP16": int(dtypes is not None and dtypes[0] == "fp16"),
            "LOAD_FUNCTION": LOAD_FUNCTION,
        },
    )


def _draft_mask(sm: str) -> Variant:
    return Variant(
        source="draft_mask/draft_mask.cu",
        symbol="pack_draft_mask",
        sm=sm,
        operation="draft_mask",
        struct="DraftMaskParams",
    )


def _merge_states(sm: str, dtype: str) -> Variant:
    return Variant(
        source="merge/merge_states.cu",
        symbol=f"merge_states_{dtype}",
        sm=sm,
        operation="merge_states",
        struct="MergeStatesParams",
        traits={"dtype": dtype},
        defines={"VALUES_TYPE": MERGE_TYPES[dtype], "LOAD_FUNCTION": LOAD_FUNCTION},
    )


_MLA_TILE_TOKENS = 64
# The portable kernel is for SM120 and SM121; that for SM90 is how it is tested.
_PORTABLE_MLA_SMS = ("90", "120")
_PORTABLE_MLA_STAGES = {512: 3, 256: 7, 128: 9}  # as many as fit into 99 KB of shared memory beside the queries
# Pipeline stages of the kernels for few rows: as many as fit into 227 KB of shared memory.
_FEW_ROWS_STAGES = {
    "bf16": {(512, 64): 3, (256, 64): 5, (512, 0): 3, (256, 32): 5, (128, 32): 9},
    "e4m3": {(512, 64): 5, (256, 64): 9, (512, 0): 6, (256, 32): 9, (128, 32): 13},
}


def _mla_decode(
    source: str,
    name: str,
    dtype: str,
    q_dtypes: str,
    columns: tuple[int, int],
    rows: int,
    row_bytes: int,
    *,
    sm: str = "90a",
    tile: int = _MLA_TILE_TOKENS,
    **defines: int,
) -> Variant:
    """``columns``: latent and rope ones of a key; ``row_bytes``: of a token in a TMA box, and the span of its swizzle.

    ``tile``: tokens of a KV tile.
    """
    box_columns = row_bytes // (1 if dtype == "e4m3" else 2)
    latent, rope = columns
    return Variant(
        source=f"mla/{source}.cu",
        symbol=f"{name}_latent{latent}{'' if rope == 64 else f'_rope{rope}'}",
        sm=sm,
        operation="paged_mla_decode",
        struct="PagedMlaDecodeParams",
        traits={
            "dtype": dtype,
            "q_dtypes": q_dtypes,
            "latent": latent,
            "rope": rope,
            "rows": rows,
            "tile_tokens": tile,
            "box_columns": box_columns,
            "swizzle": f"{row_bytes}B",
            "l2_policy": L2_POLICIES["paged_mla_decode"],
            "group_l2_policy": GROUP_L2_POLICY,
        },
        defines={
            "KV_E4M3": int(dtype == "e4m3"),
            "LATENT": latent,
            "ROPE": rope,
            "ROWS": rows,
            "TILE_TOKENS": tile,
            "BOX_COLUMNS": box_columns,
            "L2_POLICY": L2_POLICIES["paged_mla_decode"],
            "GROUP_L2_POLICY": GROUP_L2_POLICY,
            **defines,
        },
    )


def _with_separate_values(variant: Variant) -> Variant:
    """The kernel for values in memory of their own."""
    return replace(
        variant,
        symbol=f"{variant.symbol}_separate_values",
        struct="PagedMlaDecodeValuesParams",
        traits={**variant.traits, "separate_values": True},
        defines={**variant.defines, "SEPARATE_VALUES": 1},
    )


def _mla_variants(columns: tuple[int, int]) -> Iterator[Variant]:
    yield _mla_decode("paged_mla_decode", "paged_mla_decode_bf16", "bf16", "bf16", columns, 64, 128)
    e4m3 = "paged_mla_decode_e4m3"
    yield _mla_decode(e4m3, e4m3, "e4m3", "bf16", columns, 64, 64, Q_E4M3=0)
    yield _mla_decode(e4m3, f"{e4m3}_q_e4m3", "e4m3", "e4m3", columns, 64, 64, Q_E4M3=1)
    if columns == MLA_SEPARATE_COLUMNS:
        yield _with_separate_values(_mla_decode(e4m3, f"{e4m3}_q_e4m3", "e4m3", "e4m3", columns, 64, 64, Q_E4M3=1))
    for dtype, q_dtypes in (("bf16", "bf16"), ("e4m3", "bf16,e4m3")):
        source, stages = "few_rows_mla_decode", _FEW_ROWS_STAGES[dtype][columns]
        yield _mla_decode(source, f"{source}_{dtype}", dtype, q_dtypes, columns, 16, 128, STAGES=stages)
    for sm in _PORTABLE_MLA_SMS:
        source, stages = "portable_mla_decode", _PORTABLE_MLA_STAGES[columns[0]]
        yield _mla_decode(source, f"{source}_e4m3", "e4m3", "e4m3", columns, 64, 64, sm=sm, tile=32, STAGES=stages)


# Tiles of a split under batch invariance: lists are short, and splits of dense decode too coarse for them.
_SPARSE_MLA_SPLIT_TILES = 8
# Rows of the cache -> columns behind the latent ones.
_SPARSE_MLA_ROPE = {"scaled_e4m3": 64, "bf16": 64, "bf16_nope": 0}
# Rows of the cache and query rows of a tile -> stages of the pipeline and the most CTAs of a cluster; 0: CTA groups. A
# stage has half of a tile in clusters, 16 keys in CTA groups.
_SPARSE_MLA_FORMS = {
    ("scaled_e4m3", 16): (8, 16),
    ("scaled_e4m3", 32): (7, 8),
    ("scaled_e4m3", 64): (12, 0),
    ("bf16", 16): (5, 16),
    ("bf16_nope", 16): (5, 16),
}


def _sparse_mla_decode(cache_rows: str, rows: int) -> Variant:
    """``cache_rows``: how a row of the cache lies in memory, see ``kernels.native.sparse_mla.select``."""
    stages, max_cluster = _SPARSE_MLA_FORMS[cache_rows, rows]
    scaled = cache_rows == "scaled_e4m3"
    # Parts of a list that a CTA keeps apart: there are registers for two of 16 rows.
    cta_parts = 2 if scaled and rows == 16 else 1
    clustered = {"CTA_PARTS": cta_parts, "MAX_CLUSTER": max_cluster}
    return Variant(
        source=f"mla/{'' if max_cluster else 'scaled_'}sparse_mla_decode.cu",
        symbol=f"sparse_mla_decode_{cache_rows}_latent512{f'_rows{rows}' if rows > 16 else ''}",
        sm="90a",
        operation="sparse_mla_decode",
        struct="SparseMlaDecodeParams",
        traits={
            "cache_rows": cache_rows,
            "latent": 512,
            "rope": _SPARSE_MLA_ROPE[cache_rows],
            "rows": rows,
            "tile_tokens": _MLA_TILE_TOKENS,
            "split_tiles": _SPARSE_MLA_SPLIT_TILES,
            "max_cluster": max_cluster,
            "max_cta_parts": cta_parts,
        },
        defines={
            "SPARSE": 1,
            "KV_E4M3": int(scaled),
            "LATENT": 512,
            "ROPE": _SPARSE_MLA_ROPE[cache_rows],
            "ROWS": rows,
            "TILE_TOKENS": _MLA_TILE_TOKENS,
            "SPLIT_TILES": _SPARSE_MLA_SPLIT_TILES,
            "STAGES": stages,
            **(clustered if max_cluster else {"Q_E4M3": 0, "BOX_COLUMNS": 64}),
        },
    )


# head_dim -> columns of a value, consumer warpgroups of 64 rows, keys of a tile, pipeline stages of keys and of values,
# and the k16 steps of queries that fit into registers, without a soft cap and with one.
_PREFILL_SHAPES = {
    64: (64, 3, 128, 4, 4, 1, 0),
    128: (128, 2, 128, 2, 2, 8, 8),
    192: (128, 2, 128, 2, 2, 8, 8),
    256: (256, 2, 64, 2, 2, 4, 2),
}
# Of e4m3 keys and values, whose producers need registers: consumer warpgroups; and by head_dim, dtype of queries and
# segments the producer warpgroups and the same steps.
_PREFILL_E4M3_WARPGROUPS = 2


def _prefill_e4m3(head_dim: int, dtype: str, segments: bool) -> tuple[int, int, int]:
    # Two are faster where there is room for tiles of e4m3 and the conversion is long (context_e4m3_h100.json).
    if head_dim == 256:
        return 2, 0, 0
    if head_dim == 128 and dtype == "bf16" and not segments:
        return 2, 4, 3
    return 1, *{64: (4, 4), 128: (5, 4) if segments else (6, 5), 192: (6, 5)}[head_dim]


def _context_attention(
    dtype: str,
    head_dim: int,
    soft_cap: bool,
    *,
    segments: bool = False,
    e4m3: bool = False,
    split_keys: bool = False,
) -> Variant:
    asked = {"_soft_cap": soft_cap, "_segments": segments, "_split_keys": split_keys}
    options = "".join(word for word, is_asked in asked.items() if is_asked)
    value_dim, warpgroups, tile, k_stages, v_stages, *register_steps = _PREFILL_SHAPES[head_dim]
    if segments and soft_cap:
        warpgroups = 2  # three have not enough registers for both
    producers = 1
    if e4m3:
        warpgroups = _PREFILL_E4M3_WARPGROUPS
        producers, *register_steps = _prefill_e4m3(head_dim, dtype, segments)
    return Variant(
        source="prefill/context_attention.cu",
        symbol=f"context_attention_{dtype}{'_over_e4m3' if e4m3 else ''}_d{head_dim}{options}",
        sm="90a",
        operation="context_attention",
        struct="ContextAttentionE4m3Params" if e4m3 else "ContextAttentionParams",
        traits={
            "dtype": dtype,
            "kv_dtype": "e4m3" if e4m3 else dtype,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "rows": 64 * warpgroups,
            "tile_tokens": tile,
            "soft_cap": soft_cap,
            "segments": segments,
            "split_keys": split_keys,
            "l2_policy": L2_POLICIES["context_attention"],
        },
        defines={
            "HEAD_DIM": head_dim,
            "KV_E4M3": int(e4m3),
            "MMA_FP16": int(dtype == "fp16"),
            "VALUE_DIM": value_dim,
            "TILE_TOKENS": tile,
            "WARPGROUPS": warpgroups,
            "K_STAGES": k_stages,
            "V_STAGES": v_stages,
            "SOFT_CAP": int(soft_cap),
            "SEGMENTS": int(segments),
            "QUERY_REGISTER_STEPS": register_steps[soft_cap],
            "L2_POLICY": L2_POLICIES["context_attention"],
            **({"PRODUCER_WARPGROUPS": producers} if producers > 1 else {}),
            **({"SPLIT_KEYS": 1} if split_keys else {}),
        },
    )


def _cache_conversion(dtype: str) -> Variant:
    tokens = 128
    return Variant(
        source="prefill/cache_conversion.cu",
        symbol=f"convert_e4m3_cache_to_{dtype}",
        sm="90a",
        operation="cache_conversion",
        struct="CacheConversionParams",
        traits={"dtype": dtype, "cta_tokens": tokens},
        defines={
            "TO_FP16": int(dtype == "fp16"),
            "CTA_TOKENS": tokens,
            "UNITS_IN_FLIGHT": 4,
            "LOAD_FUNCTION": LOAD_FUNCTION,
        },
    )


def _merge_parts(dtype: str) -> Variant:
    return Variant(
        source="prefill/merge_parts.cu",
        symbol=f"merge_parts_{dtype}",
        sm="90a",
        operation="merge_parts",
        struct="MergePartsParams",
        traits={"dtype": dtype},
        defines={"TO_FP16": int(dtype == "fp16")},
    )


def _prefill_variants() -> Iterator[Variant]:
    dtypes = ("bf16", "fp16")
    yield from map(_cache_conversion, dtypes)
    yield from map(_merge_parts, dtypes)
    for e4m3, head_dim, dtype, soft_cap in product((False, True), _PREFILL_SHAPES, dtypes, (False, True)):
        yield _context_attention(dtype, head_dim, soft_cap, e4m3=e4m3)
        if head_dim in SEGMENT_HEAD_DIMS:
            yield _context_attention(dtype, head_dim, soft_cap, segments=True, e4m3=e4m3)
        yield _context_attention(dtype, head_dim, soft_cap, e4m3=e4m3, split_keys=True)


VARIANTS: tuple[Variant, ...] = (
    *_decode_variants(),
    *(_kv_reduction(sm, *dtypes) for sm in _FOLLOWING_SMS for dtypes in _REDUCTION_DTYPES),
    *(_lse_from_statistics(sm) for sm in _FOLLOWING_SMS),
    *(_streaming_read("90a", *way) for way in _READS),
    *(_row_read("90a", l2_policy) for l2_policy in dict.fromkeys(policy for _, policy in _READS)),
    *(variant for columns in MLA_COLUMNS for variant in _mla_variants(columns)),
    *(_sparse_mla_decode(*form) for form in _SPARSE_MLA_FORMS),
    *_prefill_variants(),
    *(_append_kv("90a", dtypes) for dtypes in _APPEND_DTYPES),
    *(_merge_states("90a", dtype) for dtype in MERGE_TYPES),
    *(_draft_mask(sm) for sm in ("90a", *_PORTABLE_SMS)),
)
