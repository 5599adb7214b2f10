"""What a decode is expected to take, from constants that were measured: small enough to check by hand.

    time = launch + first byte + max(DRAM, L2, tiles) + merge

``DRAM`` reads every key and value once; ``L2`` brings them to the multiprocessors once a row tile; ``tiles`` is
the computing of the CTA with the most tiles, which runs alone however many CTAs share its multiprocessor; ``merge``
grows with the parts that a pair was cut into. To calibrate, time cases that one term decides, compare with the terms
of ``Estimate`` and change the GPU's constants below; ``select_decode(..., costs=restated(H200, {...}))`` tries others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from ...errors import UsageError

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp16": 2, "e4m3": 1})

_BYTES_PER_US = 1e6  # of one TB/s
# What the constants of tiles and of the L2 refer to.
_HEAD_DIM = 128
_TILE_TOKENS = 64
_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class TileCost:
    """Microseconds that a CTA takes for 64 tokens of head_dim 128, ``rows`` query rows, KV of ``item_bytes``."""

    item_bytes: int
    rows: int
    us: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The constants of one GPU: times in microseconds, rates in TB/s.

    ``l2_tb_per_s`` is what 132 multiprocessors draw; fewer draw less. ``merge_us`` is for up to ``merge_parts``
    parts, more take it in proportion. ``equal_within`` is the share by which predictions differ without meaning
    anything. Of the grid: below ``tiles_for_full_residency`` tiles a multiprocessor one CTA with all the loads in
    flight beats two; CTAs next to each other read up to ``heads_together`` KV heads side by side, if at most one
    CTA in ``idle_share`` idles for it.
    """

    gpu: str
    launch_us: float
    first_byte_us: float
    read_tb_per_s: float
    l2_tb_per_s: float
    merge_us: float
    merge_parts: int
    equal_within: float
    tiles_for_full_residency: int
    heads_together: int
    idle_share: int
    tiles: tuple[TileCost, ...]

    def tile_us(self, item_bytes: int, rows: int, head_dim: int, tile_tokens: int = _TILE_TOKENS) -> float:
        """One tile on one CTA: between the known rows by the straight line, beyond them in proportion."""
        known = sorted((t.rows, t.us) for t in self.tiles if t.item_bytes == item_bytes)
        if not known:
            raise UsageError(f"costs of {self.gpu}: none for a KV item of {item_bytes} bytes")
        return _between(known, rows) * head_dim / _HEAD_DIM * tile_tokens / _TILE_TOKENS


@dataclass(frozen=True, slots=True)
class Work:
    """A problem as one kernel and grid would do it.

    ``kv_bytes`` counts every key and value once; ``row_tiles`` is how many times they are read (a mean);
    ``tiles_per_cta`` the most that a CTA gets; ``parts`` the most that a pair is cut into.
    """

    kv_bytes: int
    item_bytes: int
    rows: int
    head_dim: int
    tile_tokens: int
    row_tiles: float
    tiles_per_cta: int
    parts: int
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Estimate:
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
        """What most of the time goes to."""
        terms = {"DRAM reads": self.dram_us, "L2 reads": self.l2_us, "computing": self.tiles_us}
        terms["latency"] = self.fixed_us + self.merge_us
        return max(terms, key=lambda name: terms[name])


# Measured on an H200 (benchmarks/results/grid_choice.json, decode.json): the grid's constants and both bandwidths.
H200 = Costs(
    gpu="H200",
    launch_us=3.0,
    first_byte_us=2.0,
    read_tb_per_s=4.4,
    l2_tb_per_s=5.5,
    merge_us=2.6,
    merge_parts=16,
    equal_within=0.02,
    tiles_for_full_residency=200,
    heads_together=8,
    idle_share=32,
    tiles=tuple(TileCost(item, rows, us) for item in (1, 2) for rows, us in ((8, 0.45), (16, 0.55), (64, 1.1))),
)
H100 = replace(H200, gpu="H100", read_tb_per_s=3.0)
# Where nothing was measured: the order of the kernels counts, not the time.
OTHER = replace(H100, gpu="any other GPU")

# A part of the device's name, in the order looked at.
KNOWN: tuple[Costs, ...] = (H200, H100)


def costs_of(device_name: str) -> Costs:
    """The constants for a device, by its name."""
    return next((costs for costs in KNOWN if costs.gpu in device_name), OTHER)


def stated(costs: Costs) -> dict[str, float]:
    """Every constant by name, for people and for JSON; a tile's is ``tile_us_16bit_rows8``."""
    plain = {f.name: getattr(costs, f.name) for f in fields(costs) if f.name not in ("gpu", "tiles")}
    return plain | {_tile_name(tile): tile.us for tile in costs.tiles}


def restated(costs: Costs, constants: Mapping[str, float]) -> Costs:
    """``costs`` with other values for some of the constants that ``stated`` names.

    Raises:
        UsageError: a name is unknown, or a value is not above 0, or a count is not whole.
    """
    known = stated(costs)
    for name, value in constants.items():
        if name not in known:
            raise UsageError(f"constant {name!r}: expected one of {', '.join(known)}")
        if not value > 0 or (isinstance(known[name], int) and not isinstance(value, int)):
            raise UsageError(f"{name}={value}: expected {type(known[name]).__name__} above 0")
    tiles = tuple(replace(tile, us=constants.get(_tile_name(tile), tile.us)) for tile in costs.tiles)
    plain: dict[str, Any] = {f.name: constants[f.name] for f in fields(costs) if f.name in constants}
    return replace(costs, tiles=tiles, **plain)


def estimate(work: Work, costs: Costs) -> Estimate:
    """What ``work`` takes by ``costs``."""
    l2 = costs.l2_tb_per_s * work.multiprocessors / _MULTIPROCESSORS
    tile = costs.tile_us(work.item_bytes, work.rows, work.head_dim, work.tile_tokens)
    return Estimate(
        fixed_us=costs.launch_us + costs.first_byte_us,
        dram_us=work.kv_bytes / (costs.read_tb_per_s * _BYTES_PER_US),
        l2_us=work.kv_bytes * work.row_tiles / (l2 * _BYTES_PER_US),
        tiles_us=work.tiles_per_cta * tile,
        merge_us=costs.merge_us * max(1.0, work.parts / costs.merge_parts) if work.parts > 1 else 0.0,
    )


def _tile_name(tile: TileCost) -> str:
    return f"tile_us_{8 * tile.item_bytes}bit_rows{tile.rows}"


def _between(known: list[tuple[int, float]], at: int) -> float:
    for (low, low_us), (high, high_us) in pairwise(known):
        if low <= at <= high:
            return low_us + (high_us - low_us) * (at - low) / (high - low)
    rows, us = known[0] if at < known[0][0] else known[-1]
    return us if at < rows else us * at / rows
