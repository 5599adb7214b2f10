"""The list of native kernels, one entry per cubin. CONTRIBUTING says how to add one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cubin_runtime.kernels.native.constants import CONSTANTS

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
# Kernels for these SMs were measured on a GPU; those for other SMs were only compiled.
MEASURED_SMS = frozenset({"90a"})

_SM = re.compile(r"(\d{2,3})([af]?)")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel compiled for one SM.

    ``source`` is relative to ``kernels_src``; ``symbol`` the name of its ``extern "C" __global__`` function;
    ``defines`` become ``-D`` options; ``traits`` are what a planner selects by; ``struct`` names one of the
    layouts of ``cubin_runtime.kernels.native.layouts``. ``shared_bytes`` is dynamic shared memory.
    """

    source: str
    symbol: str
    sm: str
    operation: str
    struct: str
    threads: int
    shared_bytes: int
    traits: Mapping[str, int | str | bool] = field(default_factory=dict)
    defines: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _SM.fullmatch(self.sm) or self.base_sm not in SHARED_BYTES_PER_BLOCK:
            raise ValueError(f"{self.symbol}: sm={self.sm!r}: expected one of {', '.join(SHARED_BYTES_PER_BLOCK)}")
        if not _SYMBOL.fullmatch(self.symbol):
            raise ValueError(f"symbol={self.symbol!r}: expected a C identifier")
        if not 1 <= self.threads <= 1024:
            raise ValueError(f"{self.name}: threads={self.threads}: expected 1 to 1024")

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


_DECODE_BARRIER_BYTES = 16  # a full and an empty barrier a buffer


@dataclass(frozen=True, slots=True)
class _DecodeShape:
    """Build options of paged decode: rows of a CTA, consumer warpgroups, pipeline stages, CTAs per SM, and the tokens
    of a KV tile, of which a stage holds the keys or the values.

    ``wgmma``: warpgroups multiply whole tiles by 64 rows; otherwise warps multiply 16 tokens by groups of 8 rows.
    ``q_e4m3``: queries are e4m3 and multiplied with e4m3 keys as they are.
    """

    head_dim: int
    rows: int
    warpgroups: int
    stages: int
    ctas: int
    wgmma: bool = False
    tile: int = 64
    q_e4m3: bool = False

    @property
    def q_dtypes(self) -> str:
        """Query dtypes that the kernel accepts with an e4m3 cache."""
        return "e4m3" if self.q_e4m3 else "bf16,fp16" if self.wgmma else "bf16,fp16,e4m3"

    @property
    def converted_stages(self) -> int:
        """Stages of e4m3 tiles converted to fp16, in warpgroup kernels."""
        return (4 if self.q_e4m3 else 6) if self.wgmma else 0

    @property
    def arithmetic(self) -> str:
        """Kernels with the same dtype, head_dim and arithmetic give a row the same bits."""
        return f"warpgroups of {self.rows} rows" if self.wgmma else "warps"


def _decode_shared_bytes(shape: _DecodeShape, item_bytes: int) -> int:
    """``sizeof(SharedStorage)`` of decode/config.cuh, which asserts it."""
    narrow = item_bytes == 1
    merge_buffers = 4 if shape.rows == 8 and shape.head_dim <= 128 else 1
    ring = shape.stages * shape.tile * shape.head_dim * item_bytes
    merge = merge_buffers * shape.rows * (shape.head_dim + 4) * 4
    in_shared = shape.warpgroups > 1 or shape.head_dim > 256 or (shape.rows > 8 and shape.head_dim > 64)
    query = 8 * (shape.rows // 8 * (shape.head_dim // 16) * 32 if in_shared and not shape.wgmma else 1)
    parties = 64 * shape.warpgroups // shape.rows if shape.wgmma else 4
    undo = shape.rows if narrow and in_shared and not shape.wgmma else 0
    rows = 4 * ((2 * (parties + 1) + 2) * shape.rows + undo)
    converted = shape.converted_stages if narrow else 0
    merge = max(merge, converted * shape.tile * shape.head_dim * 2)
    ones = 256 if converted and shape.head_dim == 64 else 0
    cleared = 8 * parties if shape.wgmma and not converted else 0
    barriers = _DECODE_BARRIER_BYTES * (shape.stages + converted) + cleared
    share = (15 + 4 + 6 + 1) * 4 if shape.wgmma else 15 * 4 if shape.rows > 8 else 0
    return -(-(-(-(ring + merge + ones + query + rows) // 8) * 8 + barriers + 4 + share) // 128) * 128


def _paged_decode(sm: str, dtype: str, shape: _DecodeShape) -> Variant:
    tma = sm == "90a"
    helpers = 2 if shape.wgmma and dtype == "e4m3" else 1  # warpgroups that load tiles and convert them
    return Variant(
        source="fmha/paged_decode.cu",
        symbol=f"fmha_paged_decode_{dtype}{'_q_e4m3' if shape.q_e4m3 else ''}_d{shape.head_dim}_rows{shape.rows}",
        sm=sm,
        operation="paged_decode",
        struct="PagedDecodeTmaParams" if tma else "PagedDecodeCopyParams",
        threads=192 if shape.warpgroups == 1 else 128 * (shape.warpgroups + helpers),
        shared_bytes=_decode_shared_bytes(shape, 1 if dtype == "e4m3" else 2),
        traits={
            "dtype": dtype,
            "q_dtypes": shape.q_dtypes if dtype == "e4m3" else dtype,
            "head_dim": shape.head_dim,
            "rows": shape.rows,
            "tile_tokens": shape.tile,
            "ctas_per_multiprocessor": shape.ctas,
            "tma": tma,
            "arithmetic": shape.arithmetic,
        },
        defines={
            "HEAD_DIM": shape.head_dim,
            "KV_E4M3": int(dtype == "e4m3"),
            "MMA_FP16": int(dtype != "bf16"),
            "Q_E4M3": int(shape.q_e4m3),
            "ROWS": shape.rows,
            "TILE_TOKENS": shape.tile,
            "CONSUMER_WARPGROUPS": shape.warpgroups,
            "WARPGROUP_MMA": int(shape.wgmma),
            "STAGES": shape.stages,
            "CTAS_PER_SM": shape.ctas,
            "USE_TMA": int(tma),
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
    _DecodeShape(128, 128, 2, 8, 1, wgmma=True),
    _DecodeShape(256, 8, 1, 6, 1),
    _DecodeShape(256, 32, 2, 4, 1),
    _DecodeShape(512, 8, 1, 3, 1),
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
    hopper = [_paged_decode("90a", dtype, shape) for dtype in ("bf16", "fp16") for shape in _HOPPER_DECODE_16_BITS]
    hopper += [_paged_decode("90a", "e4m3", shape) for shape in _HOPPER_DECODE_8_BITS]
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
        threads=CONSTANTS.reduction_threads,
        shared_bytes=0,
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
        threads=CONSTANTS.lse_threads,
        shared_bytes=0,
    )


def _streaming_read(sm: str) -> Variant:
    return Variant(
        source="measure/streaming_read.cu",
        symbol="measure_streaming_read",
        sm=sm,
        operation="streaming_read",
        struct="StreamingReadParams",
        threads=CONSTANTS.streaming_threads,
        shared_bytes=0,
    )


_MLA_TILE_TOKENS = 64


def _mla_shared_bytes(latent: int) -> int:
    """What ``SharedStorage`` of mla/bf16/shared_storage.cuh needs, which asserts that it fits."""
    box = 64 * 128
    boxes = latent // 64 + 1
    # Queries, P and two buffers of keys in boxes of 64 x 64, two pieces, maxima and sums of two warpgroups and whether
    # the maxima have grown, barriers, the CTA's share.
    return (3 * boxes + 1) * box + 2 * 48 + 4 * 64 * 4 + 2 * 4 * 4 + (2 * boxes + 2 * 5 + 2) * 8 + 96


def _mla_ring_bytes(latent: int, q_e4m3: bool) -> int:
    """The same of mla/e4m3/shared_storage.cuh."""
    tiles = (5 if q_e4m3 else 3) if latent > 256 else (8 if q_e4m3 else 7)
    probabilities = 3
    # Raw tiles, probabilities and what is said with them, their barriers, the CTA's share.
    rings = tiles * (64 * (latent + 64) + 16) + probabilities * (64 * 128 + 64 * 16 + 48 + 16) + 104
    # Four boxes of queries; or all of them in fp16, scores, two pieces, factors of the rows' scores, barriers.
    return rings + (4 * 64 * 64 if q_e4m3 else 64 * (latent + 64) * 2 + 64 * 272 + 2 * 64 + 2 * 64 * 4 + 2 * 8 + 64)


def _paged_mla_decode(dtype: str, latent: int, q_e4m3: bool = False) -> Variant:
    narrow = dtype == "e4m3"
    shared = _mla_ring_bytes(latent, q_e4m3) if narrow else _mla_shared_bytes(latent)
    return Variant(
        source=f"mla/paged_mla_decode{'_e4m3' if narrow else ''}.cu",
        symbol=f"paged_mla_decode_{dtype}{'_q_e4m3' if q_e4m3 else ''}_latent{latent}",
        sm="90a",
        operation="paged_mla_decode",
        struct="PagedMlaDecodeParams",
        threads=512 if narrow else 384,
        shared_bytes=-(-shared // 1024) * 1024,
        traits={
            "dtype": dtype,
            "q_dtypes": "e4m3" if q_e4m3 else "bf16",
            "latent": latent,
            "rope": CONSTANTS.mla_rope_columns,
            "rows": 64,
            "tile_tokens": _MLA_TILE_TOKENS,
            "box_columns": 64,
            "swizzle": "64B" if narrow else "128B",
        },
        defines={
            "KV_E4M3": int(narrow),
            "LATENT": latent,
            "ROWS": 64,
            "TILE_TOKENS": _MLA_TILE_TOKENS,
            "BOX_COLUMNS": 64,
        }
        | ({"Q_E4M3": int(q_e4m3)} if narrow else {}),
    )


def _few_rows_mla_decode(dtype: str, latent: int) -> Variant:
    # A row of 128 bytes in a box: of e4m3, the last box is half past the columns.
    item = 1 if dtype == "e4m3" else 2
    box_columns = 128 // item
    stage = -(-(latent + 64) // box_columns) * 64 * 128
    # Beside the ring two places for P, what warps tell each other, barriers, the CTA's share. The source asserts that
    # it fits.
    beside = 2 * (4 * 512 + 16 * 4 + 16) + 2 * 32 + (3 * 4 + 2) * 16 * 4 + 6 * 8 + 96
    stages = (SHARED_BYTES_PER_BLOCK["90"] - beside) // (stage + 16)
    return Variant(
        source="mla/few_rows_mla_decode.cu",
        symbol=f"few_rows_mla_decode_{dtype}_latent{latent}",
        sm="90a",
        operation="paged_mla_decode",
        struct="PagedMlaDecodeParams",
        threads=latent // 2 + 256,
        shared_bytes=-(-(stages * (stage + 16) + beside) // 1024) * 1024,
        traits={
            "dtype": dtype,
            "q_dtypes": "bf16,e4m3" if dtype == "e4m3" else "bf16",
            "latent": latent,
            "rope": CONSTANTS.mla_rope_columns,
            "rows": 16,
            "tile_tokens": _MLA_TILE_TOKENS,
            "box_columns": box_columns,
            "swizzle": "128B",
        },
        defines={
            "KV_E4M3": int(dtype == "e4m3"),
            "LATENT": latent,
            "ROWS": 16,
            "TILE_TOKENS": _MLA_TILE_TOKENS,
            "BOX_COLUMNS": box_columns,
            "STAGES": stages,
        },
    )


VARIANTS: tuple[Variant, ...] = (
    *_decode_variants(),
    *(_kv_reduction(sm, *dtypes) for sm in _FOLLOWING_SMS for dtypes in _REDUCTION_DTYPES),
    *(_lse_from_statistics(sm) for sm in _FOLLOWING_SMS),
    _streaming_read("90a"),
    *(_paged_mla_decode(dtype, latent) for dtype in ("bf16", "e4m3") for latent in (512, 256)),
    *(_paged_mla_decode("e4m3", latent, q_e4m3=True) for latent in (512, 256)),
    *(_few_rows_mla_decode(dtype, latent) for dtype in ("bf16", "e4m3") for latent in (512, 256)),
)
