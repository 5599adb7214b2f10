"""Every kernel that we build, one entry a cubin. Adding a variant: see CONTRIBUTING."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
# Where a GPU run of this repository measured the kernel; elsewhere it was only compiled.
MEASURED_SMS = frozenset({"90a"})

_SM = re.compile(r"(\d{2,3})([af]?)")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel compiled for one SM.

    ``source`` is relative to ``kernels_src``; ``symbol`` the name of its ``extern "C" __global__`` function;
    ``defines`` become ``-D`` options; ``traits`` are what a planner selects by; ``struct`` names one of the
    layouts of ``cubin_runtime.launch.hopper.params``. ``shared_bytes`` is dynamic shared memory.
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


def _paged_decode(sm: str, rows: int) -> Variant:
    tma = sm == "90a"
    stages = 3 if SHARED_BYTES_PER_BLOCK[sm.rstrip("af")] >= 227 << 10 else 2
    # Two CTAs on an SM leave 168 registers a thread, which spills with 16 rows on SM100 and 120.
    ctas = 2 if sm == "90a" else 1
    merge_buffers = 4 if rows == 8 else 1
    # The ring, merge rows, statistics of 4 warps and of their merger, two barriers a buffer, a flag; the source
    # asserts the sum.
    shared = 2 * stages * 16384 + merge_buffers * rows * 132 * 4 + 2 * (4 + 1) * rows * 4 + 4 * stages * 8 + 4
    return Variant(
        source="fmha/paged_decode.cu",
        symbol=f"fmha_paged_decode_bf16_d128_rows{rows}",
        sm=sm,
        operation="paged_decode",
        struct="PagedDecodeTmaParams" if tma else "PagedDecodeCopyParams",
        threads=160,
        shared_bytes=-(-shared // 1024) * 1024,
        traits={
            "dtype": "bf16",
            "head_dim": 128,
            "rows": rows,
            "tile_tokens": 64,
            "ctas_per_multiprocessor": ctas,
            "tma": tma,
        },
        defines={"ROWS": rows, "STAGES": stages, "CTAS_PER_SM": ctas, "USE_TMA": int(tma)},
    )


# Partials and output of a reduction; a 2-byte output has its partials' type.
_REDUCTION_DTYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "e4m3"))
_FOLLOWING_SMS = ("90a", "100", "103")


def _kv_reduction(sm: str, partial: str, out: str) -> Variant:
    return Variant(
        source="trtllm_gen/kv_reduction.cu",
        symbol=f"trtllm_gen_kv_reduction_{partial}_to_{out}",
        sm=sm,
        operation="kv_reduction",
        struct="KvReductionParams",
        threads=512,
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
        threads=1024,
        shared_bytes=0,
    )


def _paged_mla_decode(dtype: str, latent: int, cluster: int) -> Variant:
    box = 64 * 128
    boxes = latent // 64 + 1
    # Queries and two buffers of keys in boxes of 64 x 64, maxima and sums of two warpgroups, barriers, a ticket, the
    # CTA's share; e4m3: two raw boxes, their barriers, a power of two for each row. The source asserts that they fit.
    shared = 3 * boxes * box + 4 * 64 * 4 + (2 * boxes + 2 * 2 + 2) * 8 + 4 + 32
    if dtype == "e4m3":
        shared += 2 * box // 2 + 2 * 8 + 64 * 4 + 128
    return Variant(
        source="mla/paged_mla_decode.cu",
        symbol=f"paged_mla_decode_{dtype}_latent{latent}" + (f"_cluster{cluster}" if cluster > 1 else ""),
        sm="90a",
        operation="paged_mla_decode",
        struct="PagedMlaDecodeParams",
        threads=384,
        shared_bytes=-(-shared // 1024) * 1024,
        traits={
            "dtype": dtype,
            "q_dtypes": "bf16,e4m3" if dtype == "e4m3" else "bf16",
            "latent": latent,
            "rope": 64,
            "rows": 64,
            "tile_tokens": 64,
            "cluster": cluster,
        },
        defines={"KV_E4M3": int(dtype == "e4m3"), "LATENT": latent, "CLUSTER": cluster, "PREFETCH_TILES": 0},
    )


VARIANTS: tuple[Variant, ...] = (
    *(_paged_decode(sm, rows) for sm in ("80", "86", "89", "90a", "100", "120") for rows in (8, 16)),
    *(_kv_reduction(sm, *dtypes) for sm in _FOLLOWING_SMS for dtypes in _REDUCTION_DTYPES),
    *(_lse_from_statistics(sm) for sm in _FOLLOWING_SMS),
    *(_paged_mla_decode(dtype, latent, 1) for dtype in ("bf16", "e4m3") for latent in (512, 256)),
)
