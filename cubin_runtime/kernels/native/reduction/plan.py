"""Launches of the two kernels that follow a trtllm-gen kernel: the reduction over KV splits, and the LSE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ....artifacts.tables.native_kernels import NativeKernel
from ....launch.plan import LaunchAttributes, LaunchPlan
from ....values import dataclass
from ..constants import CONSTANTS
from ..launches import KernelFile

KV_REDUCTION = "kv_reduction"
LSE_FROM_STATISTICS = "lse_from_statistics"
# Bytes of 2-byte partial output that one CTA of the reduction merges.
REDUCTION_SLICE_BYTES = CONSTANTS.reduction_threads * CONSTANTS.reduction_values * 2


@dataclass(frozen=True, slots=True)
class OperationLaunch:
    """A launch of the kernel that performs ``operation`` with ``traits``.

    ``values`` are all fields of its struct, null pointers 0; ``inputs`` are those of ``LaunchPlan``. ``pdl`` lets it
    start before the previous kernel has ended.
    """

    operation: str
    traits: Mapping[str, str]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    values: Mapping[str, Any]
    pdl: bool
    inputs: Mapping[str, str] = field(default_factory=dict)

    def launch_plan(self, kernel: NativeKernel, file: KernelFile) -> LaunchPlan:
        """The launch on ``kernel``, whose cubin is ``file``."""
        return LaunchPlan(
            kernel=kernel.name,
            symbol=kernel.symbol,
            path=file.path,
            sha256=file.sha256,
            layout=file.layout,
            grid=self.grid,
            block=self.block,
            shared_bytes=kernel.dynamic_shared_bytes,
            attributes=LaunchAttributes(programmatic_serialization=self.pdl),
            values=self.values,
            why=f"{self.operation} behind a trtllm-gen kernel",
            inputs=self.inputs,
        )


def kv_reduction(
    values: Mapping[str, Any], traits: Mapping[str, str], *, batch: int, multiprocessors: int, pdl: bool
) -> OperationLaunch:
    """Merge the partial results of CTAs that shared a sequence's KV.

    ``values`` are all fields but ``ctas_per_tile``: as many CTAs share a tile as fill each multiprocessor twice, but at
    most one per slice of the tile.
    """
    tile_ctas = values["heads_q"] // values["heads_per_cta"] * values["value_ctas"]
    slices = values["head_dim"] * 2 * values["tile_q"] // REDUCTION_SLICE_BYTES
    room = 2 * multiprocessors // (values["ctas_q"] * tile_ctas * batch)
    ctas = max(1, min(room, slices))
    grid = (values["ctas_q"] * ctas, tile_ctas, batch)
    return OperationLaunch(
        KV_REDUCTION, traits, grid, (CONSTANTS.reduction_threads, 1, 1), {**values, "ctas_per_tile": ctas}, pdl
    )


def lse_from_statistics(
    tokens: int, heads_q: int, strides: tuple[int, int], statistics: int, lse: int, *, pdl: bool
) -> OperationLaunch:
    """Compute the base-2 LSE from the maximum and sum of each row; ``strides`` are the LSE's, of tokens and heads."""
    rows = tokens * heads_q
    threads = min(CONSTANTS.lse_threads, 1 << max(0, rows - 1).bit_length())
    values = {
        "statistics": statistics,
        "lse": lse,
        "token_stride": strides[0],
        "head_stride": strides[1],
        "rows": rows,
        "heads_q": heads_q,
    }
    grid = (max(1, -(-rows // threads)), 1, 1)
    return OperationLaunch(LSE_FROM_STATISTICS, {}, grid, (threads, 1, 1), values, pdl)
