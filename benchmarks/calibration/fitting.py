"""The constants of the cost model that fit measured launches, and how far predictions are off. No GPU, no torch.

Of rows whose requests are all equally long, every other one is fitted; the others are held back. The model is the one
by which launches are chosen: the work of each measured launch comes from ``grids.estimates_of``, here with a pace that
returns the work itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.cost_model import Costs, costs_of, pace_of, restated, stated
from cubin_runtime.kernels.native.decode.grids import ANY_ROWS, Grid, Part, estimates_of, extent_of, tiling_of
from cubin_runtime.launch.driver import DeviceFacts

from .candidates import is_alone, shape_of
from .rows import Row

# Where the committed rows were measured.
H200 = DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 232448, 233472, 60 << 20, 13000)
H100 = replace(H200, name="NVIDIA H100 80GB HBM3", l2_bytes=50 << 20)
# Launches that take longer than the best of their row by this factor do not decide anything.
_FAR = 4.0
_SHARED = ("read_tb_per_s", "merge_us", "cluster_saved_us", "cluster_merge_us", "cta_tb_per_s")
_STATED = "d{head_dim}_rows{rows}_ctas{resident}"
_STEPS = (0.2, 0.1, 0.05, 0.02)


class Work(NamedTuple):
    """What a launch does, as ``Pace.estimate`` takes it."""

    kv_bytes: int
    row_tiles: float
    shared: bool
    tiles_per_cta: int
    output_tiles_per_cta: int
    splits: int
    active_ctas: int
    in_clusters: bool
    alone: bool
    may_choose: bool


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
    places = H200.multiprocessors


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
        grid = Grid(tiles=0, alone=is_alone(launch), **{name: launch[name] for name in names})
        (work,) = estimates_of(recorded, extent_of(tiling, shape, part), grid, shape, [tiling.tiles])
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


def expanded(measured: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rows as ``calibrate.py measure`` writes them, also of the smaller form with a list for each launch."""
    if measured["schema"] == 1:
        return measured
    columns, rows = measured["columns"], []
    for row in measured["rows"]:
        plain = {name: value for name, value in row.items() if name not in ("batch", "keys", "launches")}
        launches = [dict(zip(columns, values, strict=True)) for values in row["launches"]]
        launches = [{**launch, "kernel": measured["kernels"][launch["kernel"]]} for launch in launches]
        lengths = row.get("lengths") or [row["keys"]] * row["batch"]
        rows.append({**plain, "lengths": lengths, "launches": launches})
    return {**measured, "rows": rows}


def fitted(samples: Sequence[Sample], costs: Costs) -> Costs:
    """Constants with which more predictions are within 15%, then with a smaller mean error.

    Each in turn takes a step up or down where that helps.
    """
    kernels = {_STATED.format(**dict(sample.pace)) for sample in samples}
    names = [name for name in stated(costs) if name in _SHARED or any(name.endswith(k) for k in kernels)]

    def loss(tried: Costs) -> tuple[float, float]:
        relative = errors(samples, tried)
        return -within(relative), statistics.fmean(map(abs, relative))

    least = loss(costs)
    for step in _STEPS:
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                tried = restated(costs, {name: stated(costs)[name] * factor})
                if (error := loss(tried)) < least:
                    costs, least = tried, error
    return costs


def device_of(measured: Mapping[str, Any]) -> DeviceFacts:
    """The device that rows were measured on: an H100 or an H200 with 132 multiprocessors."""
    name = measured["environment"]["gpu"]["name"]
    return replace(H200 if "H200" in name else H100, name=name)


def report(measured: Mapping[str, Any], kernels: Sequence[NativeKernel]) -> None:
    """Print the constants that fit half of the rows, and how many predictions of either half are within 15%."""
    device = device_of(measured)
    kept, held_back = halves(samples_of(expanded(measured), kernels, device))
    before = costs_of(device.name)
    after = fitted(kept, before)
    for name, value in stated(after).items():
        if value != stated(before)[name]:
            print(f"{name}: {stated(before)[name]} -> {value:.4g}")
    for half, samples in (("fitted", kept), ("held back", held_back)):
        for state, costs in (("before", before), ("after", after)):
            print(f"{half}, {state}: {within(errors(samples, costs)):.3f} of {len(samples)} within 15%")


def within(relative: Sequence[float], limit: float = 0.15) -> float:
    """The share of errors within a limit."""
    return sum(abs(error) <= limit for error in relative) / len(relative)
