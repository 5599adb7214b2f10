"""The constants of the cost model that fit measured launches, and how far predictions are off. No GPU, no torch.

Of rows whose requests are all equally long, every other one is fitted; the others are held back. The model is the one
by which launches are chosen: the work of each measured launch comes from ``grids.estimate_of``, here with a pace that
returns the work itself.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.cost_model import Costs, costs_of, pace_of, restated, stated
from cubin_runtime.kernels.native.decode.grids import ANY_ROWS, Grid, Part, estimate_of, extent_of, tiling_of
from cubin_runtime.launch.driver import DeviceFacts

from .candidates import shape_of
from .rows import Row

# Launches that take longer than the best of their row by this factor do not decide anything.
_FAR = 4.0
_SHARED = ("read_tb_per_s", "merge_us", "cluster_saved_us", "cluster_merge_us", "cta_tb_per_s", "cluster_least_share")


class Work(NamedTuple):
    """What a launch does, as ``Pace.estimate`` takes it."""

    kv_bytes: int
    row_tiles: float
    tiles_per_cta: int
    output_tiles_per_cta: int
    splits: int
    active_ctas: int
    in_clusters: bool


class Sample(NamedTuple):
    """A measured launch: its row, kernel, work and time."""

    row: Row
    kernel: str
    pace: tuple[tuple[str, Any], ...]
    work: Work
    us: float

    def predicted(self, costs: Costs) -> float:
        """Microseconds, with these constants."""
        return pace_of(costs, **dict(self.pace)).estimate(*self.work).microseconds


class _Recorder:
    estimate = Work


def samples_of(measured: Mapping[str, Any], kernels: Sequence[NativeKernel], device: DeviceFacts) -> list[list[Sample]]:
    """The launches of paged decodes of each row of equally long requests."""
    by_name = {kernel.name: kernel for kernel in kernels}
    every = []
    for record in measured["rows"]:
        row = Row.read({name: value for name, value in record.items() if name != "launches"})
        if row.kv_heads and len(set(row.lengths)) == 1:
            every.append(list(_samples(row, record["launches"], by_name, device)))
    return every


def _samples(
    row: Row, launches: Sequence[Mapping[str, Any]], kernels: Mapping[str, NativeKernel], device: DeviceFacts
) -> Iterator[Sample]:
    best = min(launch["us"] for launch in launches)
    shape, part, costs = shape_of(row, row.longest), Part(0, ANY_ROWS, None), costs_of(device.name)
    for launch in launches:
        if launch["us"] > _FAR * best:
            continue
        kernel = kernels[launch["kernel"]]
        tiling = tiling_of(kernel, shape, part, device, costs)
        recorded = tiling._replace(paces=(_Recorder(),) * tiling.resident)
        names = ("ctas", "resident", "cta_group_size", "row_tiles", "cluster_size", "slack_tiles")
        grid = Grid(tiles=0, **{name: launch[name] for name in names})
        work = estimate_of(recorded, extent_of(tiling, shape, part), grid, shape, tiling.tiles)
        pace = {
            "item_bytes": 1 if row.dtype == "e4m3" else 2,
            "q_item_bytes": 2,
            "head_dim": row.head_dim,
            "rows": tiling.rows,
            "tile_tokens": tiling.tile_tokens,
            "resident": launch["resident"],
            "multiprocessors": device.multiprocessors,
        }
        yield Sample(row, launch["kernel"], tuple(pace.items()), work, launch["us"])


def errors(samples: Sequence[Sample], costs: Costs) -> list[float]:
    """The relative errors of the predictions."""
    return [sample.predicted(costs) / sample.us - 1 for sample in samples]


def halves(samples: Sequence[Sequence[Sample]]) -> tuple[list[Sample], list[Sample]]:
    """The launches of every other row, and those of the rows held back."""
    return (
        [sample for row in samples[::2] for sample in row],
        [sample for row in samples[1::2] for sample in row],
    )
