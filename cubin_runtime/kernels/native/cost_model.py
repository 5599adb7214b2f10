"""The predicted time of a decode, from measured constants: small enough to check by hand.

    time = launch + kernel's start + max(DRAM, L2, tiles and output tiles) + merge

``DRAM`` reads every key and value once, or a share of them again where row tiles drift apart; ``L2`` brings them to the
multiprocessors once per row tile; ``tiles`` is the CTA with the most KV tiles at the pace of its kernel; ``merge``
grows with the splits of an output tile. A kernel's start and pace depend on how many of its CTAs share a
multiprocessor: two start later, each is slower, both together are faster. A cluster that has an output tile for itself
starts earlier, as there is no tile space to divide, and merges sooner; where few CTAs run, each gets more of the
bandwidth, up to a limit. To calibrate, time a kernel on cases of few and of many tiles, change the GPU's constants
below and compare with the terms of ``Estimate``; ``select_decode(..., costs=restated(H200, {...}))`` tries others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ...errors import UsageError
from ...values import HashedOnce, dataclass
from .kernel_costs import H200_CALIBRATION, H200_KERNELS, Calibration, KernelCost

_BYTES_PER_US = 1e6  # of one TB/s
# The multiprocessors that the constant of the L2 was measured with.
_MULTIPROCESSORS = 132
_NO_CONSTANTS = ("gpu", "calibration", "kernels")
_OF_KERNELS = ("start_us", "tile_us", "output_tile_us", "least_share", "shared_tile_us", "reread_share")


@dataclass(frozen=True, slots=True)
class Costs:
    """The constants of one GPU: times in microseconds, rates in TB/s.

    ``calibration`` is what they were fitted to. ``l2_tb_per_s`` is the rate of 132 multiprocessors; fewer get less.
    ``merge_us`` is for up to ``merge_parts`` splits of up to ``merge_cells`` numbers (rows times head_dim); the time
    of more is proportional. ``cluster_saved_us`` is by how much earlier a cluster starts, ``alone_saved_us`` that of a
    single request, ``alone_choice_us`` the time that this one takes to choose between its clusters and all CTAs,
    ``cluster_merge_us`` that of a cluster's merge, ``cta_tb_per_s`` the most bandwidth of one CTA when few run.
    Predictions that differ by less than the fraction ``equal_within`` count as equal. Neighbouring CTAs read up to
    ``max_cta_group_size`` KV heads side by side, if at most one CTA in ``idle_share`` idles because of that; as many
    may idle so that work ranges end at boundaries of output tiles.
    """

    gpu: str
    calibration: Calibration
    launch_us: float
    read_tb_per_s: float
    l2_tb_per_s: float
    merge_us: float
    merge_parts: int
    merge_cells: int
    cluster_saved_us: float
    alone_saved_us: float
    alone_choice_us: float
    cluster_merge_us: float
    cta_tb_per_s: float
    equal_within: float
    max_cta_group_size: int
    idle_share: int
    kernels: tuple[KernelCost, ...]

    @property
    def calibration_text(self) -> str:
        """Say what the constants were fitted to, and which of them are this GPU's, where another was measured."""
        if self.gpu in self.calibration.device:
            return str(self.calibration)
        return f"{self.calibration}; here with {self.read_tb_per_s:g} TB/s, as none on an {self.gpu} is in the fit"

    def kernel_us(
        self, item_bytes: int, head_dim: int, rows: int, resident: int, q_item_bytes: int = 2, segments: bool = False
    ) -> KernelCost:
        """The times from the nearest known head_dim below, with those of tiles scaled to this head_dim.

        Between known row counts, linear interpolation; beyond them, the times of tiles in proportion to the rows.
        """
        of_item = [
            kernel
            for kernel in self.kernels
            if kernel.item_bytes == item_bytes
            and kernel.q_item_bytes in (0, q_item_bytes)
            and kernel.segments == segments
        ]
        if not of_item:
            raise UsageError(f"costs of {self.gpu}: none for a KV item of {item_bytes} bytes")
        near = max((k.head_dim for k in of_item if k.head_dim <= head_dim), default=min(k.head_dim for k in of_item))
        of_head = [k for k in of_item if k.head_dim == near]
        matching = [k for k in of_head if k.resident == resident] or of_head
        scale = head_dim / near * max(1.0, rows / max(k.rows for k in matching))

        def at_rows(value: Callable[[KernelCost], float]) -> float:
            return _between(sorted((k.rows, value(k)) for k in matching), rows)

        return KernelCost(
            *(item_bytes, head_dim, rows, resident),
            start_us=at_rows(lambda k: k.start_us),
            tile_us=scale * at_rows(lambda k: k.tile_us),
            output_tile_us=at_rows(lambda k: k.output_tile_us),
            q_item_bytes=q_item_bytes,
            segments=segments,
            least_share=at_rows(lambda k: k.least_share),
            shared_tile_us=scale * at_rows(lambda k: k.shared_tile_us or k.tile_us),
            reread_share=at_rows(lambda k: k.reread_share),
        )


class Estimate(NamedTuple):
    """The terms of a predicted time, in microseconds."""

    fixed_us: float
    dram_us: float
    l2_us: float
    tiles_us: float
    merge_us: float

    @property
    def microseconds(self) -> float:
        """The predicted time."""
        return self.fixed_us + max(self.dram_us, self.l2_us, self.tiles_us) + self.merge_us

    @property
    def limit(self) -> str:
        """The part that most of the time goes to."""
        terms = {"DRAM reads": self.dram_us, "L2 reads": self.l2_us, "a CTA's tiles": self.tiles_us}
        terms["latency"] = self.fixed_us + self.merge_us
        return max(terms, key=lambda name: terms[name])


# Measured on an H200 (results/grid_choice.json, decode_single.json): medians of triton's do_bench, whose launch of
# an empty kernel is `launch_us`. The kernels' times are in tests/kernels/native/decode/test_select_measured.py; those
# of head_dim 256 were not timed one by one.
H200 = Costs(
    gpu="H200",
    calibration=H200_CALIBRATION,
    launch_us=2.0,
    read_tb_per_s=4.1,
    l2_tb_per_s=15.2,
    merge_us=2.26,
    merge_parts=19,
    merge_cells=1023,
    cluster_saved_us=0.12,
    alone_saved_us=1.2,
    alone_choice_us=0.55,
    cluster_merge_us=0.3,
    cta_tb_per_s=0.0897,
    equal_within=0.02,
    max_cta_group_size=8,
    idle_share=32,
    kernels=HashedOnce(H200_KERNELS),
)
H100 = replace(H200, gpu="H100", read_tb_per_s=3.0)
# Nothing was measured there: the order of the kernels counts, not the time.
OTHER = replace(H100, gpu="any other GPU")

# A part of the device's name, in the order looked at.
KNOWN: tuple[Costs, ...] = (H200, H100)


def costs_of(device_name: str) -> Costs:
    """The constants for a device, by its name."""
    return next((costs for costs in KNOWN if costs.gpu in device_name), OTHER)


def stated(costs: Costs) -> dict[str, float]:
    """Every constant by name, for people and for JSON; a kernel's are ``tile_us_16bit_d128_rows8_ctas2`` and so on."""
    plain = {f.name: getattr(costs, f.name) for f in fields(costs) if f.name not in _NO_CONSTANTS}
    of_kernels = {
        _name(kernel, constant): getattr(kernel, constant)
        for kernel in costs.kernels
        for constant in _OF_KERNELS
        if getattr(kernel, constant)
    }
    return plain | of_kernels


def restated(costs: Costs, constants: Mapping[str, float]) -> Costs:
    """``costs`` with other values for some of the constants that ``stated`` names.

    Raises:
        UsageError: a name is unknown, or a value is not above 0, or a count is not whole.
    """
    defaults = stated(costs)
    for name, value in constants.items():
        if name not in defaults:
            raise UsageError(f"constant {name!r}: expected one of {', '.join(defaults)}")
        if not value > 0 or (isinstance(defaults[name], int) and not isinstance(value, int)):
            raise UsageError(f"expected {type(defaults[name]).__name__} above 0", argument=name, value=value)
    kernels = HashedOnce(
        kernel._replace(**{c: constants.get(_name(kernel, c), getattr(kernel, c)) for c in _OF_KERNELS})
        for kernel in costs.kernels
    )
    plain: dict[str, Any] = {f.name: constants[f.name] for f in fields(costs) if f.name in constants}
    return replace(costs, kernels=kernels, **plain)


class Pace(NamedTuple):
    """The times of a kernel on a GPU, independent of the problem's size; made by ``pace_of``.

    ``start_us`` includes the launch, ``tile_us`` is for a KV tile of the kernel's own ``tile_tokens``, and
    ``least_tile_us`` that of a KV tile where few CTAs run, ``shared_tile_us`` that of one whose keys several row tiles
    read, and of which the share ``reread_share`` is read again for each where they drift apart; ``places`` are the
    CTAs that run at the same time.
    """

    start_us: float
    tile_us: float
    shared_tile_us: float
    output_tile_us: float
    read_bytes_per_us: float
    l2_bytes_per_us: float
    merge_us: float
    merge_parts: float
    cluster_start_us: float
    alone_start_us: float
    alone_choice_start_us: float
    cluster_merge_us: float
    least_tile_us: float
    reread_share: float
    places: int

    def estimate(
        self,
        kv_bytes: int,
        row_tiles: float,
        shared: bool,
        tiles_per_cta: int,
        output_tiles_per_cta: int,
        splits: int,
        active_ctas: int,
        in_clusters: bool,
        alone: bool,
        may_choose: bool,
    ) -> Estimate:
        """The terms of a problem's time.

        Args:
            kv_bytes: every key and value once.
            row_tiles: how many times they are read (a mean).
            shared: whether row tiles find in L2 what others of the same keys have read.
            tiles_per_cta: the most that a CTA gets.
            output_tiles_per_cta: the output tiles of such a CTA.
            splits: the most splits of an output tile.
            active_ctas: those that have any tiles.
            in_clusters: whether each output tile has a cluster.
            alone: whether there is a single request, and no CTAs but those of its clusters.
            may_choose: whether a single request's clusters have a choice, or leave room for CTAs that would.
        """
        start, merge = self.start_us, 0.0
        if in_clusters:
            of_clusters = self.alone_start_us if alone else self.cluster_start_us
            start = self.alone_choice_start_us if may_choose else of_clusters
        others = max(0.0, row_tiles - 1.0)
        tile = self.tile_us + (self.shared_tile_us - self.tile_us) * (min(1.0, others) if shared else 0.0)
        reads = 1.0 if shared else 1.0 + others * self.reread_share
        # The fewer CTAs share the bandwidth, the less time a tile takes.
        tile = min(tile, max(self.least_tile_us, tile * active_ctas / self.places))
        if splits > 1:
            merge = self.cluster_merge_us if in_clusters else self.split_merge_us(splits)
        return Estimate(
            start,
            kv_bytes * reads / self.read_bytes_per_us,
            kv_bytes * row_tiles / self.l2_bytes_per_us,
            tiles_per_cta * tile + output_tiles_per_cta * self.output_tile_us,
            merge,
        )

    def split_merge_us(self, splits: int) -> float:
        """The time to merge so many splits of an output tile through memory."""
        return self.merge_us * max(1.0, splits / self.merge_parts)

    def even_slack_tiles(self, splits: int) -> int:
        """The KV tiles beyond an equal share with which a single request's cluster takes as long as ``splits`` CTAs."""
        saved_us = self.start_us - self.alone_choice_start_us + self.split_merge_us(splits) - self.cluster_merge_us
        return int(saved_us / self.least_tile_us)


def pace_of(
    costs: Costs,
    *,
    item_bytes: int,
    q_item_bytes: int,
    head_dim: int,
    rows: int,
    tile_tokens: int,
    resident: int,
    multiprocessors: int,
    segments: bool = False,
) -> Pace:
    """The pace of a kernel of ``rows`` rows and tiles of ``tile_tokens``, ``resident`` CTAs on each multiprocessor.

    Raises:
        UsageError: the constants have no kernel for such items.
    """
    kernel = costs.kernel_us(item_bytes, head_dim, rows, resident, q_item_bytes, segments)
    # One CTA's bandwidth is limited even when few run.
    alone = 2 * 64 * head_dim * item_bytes / (costs.cta_tb_per_s * _BYTES_PER_US)
    of_tile = tile_tokens / 64
    start_us = costs.launch_us + kernel.start_us
    alone_start_us = start_us - costs.alone_saved_us
    return Pace(
        start_us=start_us,
        tile_us=kernel.tile_us * of_tile,
        shared_tile_us=kernel.shared_tile_us * of_tile,
        output_tile_us=kernel.output_tile_us,
        read_bytes_per_us=costs.read_tb_per_s * _BYTES_PER_US,
        l2_bytes_per_us=costs.l2_tb_per_s * multiprocessors / _MULTIPROCESSORS * _BYTES_PER_US,
        merge_us=costs.merge_us,
        merge_parts=costs.merge_parts / max(1.0, rows * head_dim / costs.merge_cells),
        cluster_start_us=start_us - costs.cluster_saved_us,
        alone_start_us=alone_start_us,
        alone_choice_start_us=alone_start_us + costs.alone_choice_us,
        cluster_merge_us=costs.cluster_merge_us,
        least_tile_us=max(alone, kernel.tile_us * kernel.least_share) * of_tile,
        reread_share=kernel.reread_share,
        places=multiprocessors * resident,
    )


def _name(kernel: KernelCost, constant: str) -> str:
    queries = f"_q{8 * kernel.q_item_bytes}bit" if kernel.q_item_bytes else ""
    name = f"{constant}_{8 * kernel.item_bytes}bit{queries}_d{kernel.head_dim}_rows{kernel.rows}_ctas{kernel.resident}"
    return name + ("_segments" if kernel.segments else "")


def _between(points: list[tuple[int, float]], at: int) -> float:
    for (low, low_us), (high, high_us) in pairwise(points):
        if low <= at <= high:
            return low_us + (high_us - low_us) * (at - low) / (high - low)
    return points[0][1] if at < points[0][0] else points[-1][1]
