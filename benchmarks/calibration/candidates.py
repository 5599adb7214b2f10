"""The launches among which a row's is chosen, for any of its bounds. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.cost_model import costs_of
from cubin_runtime.kernels.native.decode.grids import (
    ANY_ROWS,
    DecodeShape,
    Grid,
    Part,
    estimates_of,
    extent_of,
    grids_of,
    tiling_of,
)
from cubin_runtime.kernels.native.decode.select import DecodeSelection, select_decode
from cubin_runtime.kernels.native.mla.select import MlaSelection, MlaShape, select_mla_decode
from cubin_runtime.launch.driver import DeviceFacts

from .rows import Row

# Requests of at most this many KV tiles are measured with and without whole output tiles.
_MOST_WHOLE_TILES = 16
# Rows of a kernel beyond those of a request, at most: a kernel that is mostly padding is never chosen.
_MOST_PADDING = 64
# Launches that no bound chooses are measured if they are predicted to take at most so many times as long as the best.
_FAR_PREDICTED = 1.7
_NEVER = -(1 << 20)
_ALWAYS = 1 << 20


class Launch(NamedTuple):
    """A launch that is measured: a kernel and what the host chooses of its grid.

    ``slack_tiles`` is the field of that name: with one above all lengths no output tile is split, or each has a
    cluster; with one far below 0, never.
    """

    kernel: NativeKernel
    ctas: int
    resident: int
    cta_group_size: int
    row_tiles: int
    cluster_size: int
    slack_tiles: int

    def record(self) -> dict[str, object]:
        return {**self._asdict(), "kernel": self.kernel.name}

    def selection(self, mla: bool) -> DecodeSelection | MlaSelection:
        """As the planner would have chosen it."""
        common = {
            "kernel": self.kernel,
            "ctas": self.ctas,
            "cta_group_size": self.cta_group_size,
            "row_tiles": self.row_tiles,
            "splits": 0,
            "slack_tiles": self.slack_tiles,
            "explain": lambda: ("", ()),
        }
        if mla:
            return MlaSelection(**common)
        alone = is_alone(self._asdict())
        bounds = {"min_rows": 0, "max_rows": ANY_ROWS}
        return DecodeSelection(**common, **bounds, cluster_size=self.cluster_size, alone=alone, microseconds=0.0)


def is_alone(launch: Mapping[str, Any]) -> bool:
    """Whether a decode's CTAs are the clusters of a single request's output tiles, and no others; of a record."""
    return bool(launch["ctas"] == launch["cluster_size"] * launch["cta_group_size"] * launch["row_tiles"])


def shape_of(row: Row, bound: int) -> DecodeShape:
    """What a decode's launch is chosen by, for a bound on its lengths."""
    return DecodeShape(
        dtype=row.dtype,
        q_dtype="bf16",
        head_dim=row.head_dim,
        group=row.heads // row.kv_heads,
        kv_heads=row.kv_heads,
        batch=row.batch,
        q_len=row.q_len,
        tokens=row.batch * row.q_len,
        max_seq_len=bound,
    )


def mla_shape_of(row: Row, bound: int) -> MlaShape:
    """The same for MLA."""
    return MlaShape(dtype=row.dtype, latent=row.head_dim, heads=row.heads, batch=row.batch, max_seq_len=bound)


def launches(kernels: Sequence[NativeKernel], row: Row, device: DeviceFacts) -> list[Launch]:
    """Every launch that a bound of the row chooses, and those that could be chosen with other constants, each once."""
    every = _decode_launches if row.kv_heads else _mla_launches
    return list(dict.fromkeys(every(kernels, row, device)))


def _decode_launches(kernels: Sequence[NativeKernel], row: Row, device: DeviceFacts) -> Iterator[Launch]:
    costs, part, exact = costs_of(device.name), Part(0, ANY_ROWS, None), shape_of(row, row.longest)
    found: dict[Launch, float] = {}
    chosen_names = set()
    for bound in row.bounds:
        shape = shape_of(row, bound)
        (chosen,) = select_decode(kernels, shape, device)
        chosen_names.add((chosen.kernel.name, chosen.ctas, chosen.cluster_size))
        for kernel in [candidate.kernel for candidate in chosen.candidates if candidate.fit]:
            tiling = tiling_of(kernel, shape, part, device, costs)
            if tiling.rows * tiling.row_tiles - shape.rows >= _MOST_PADDING:
                continue
            extent, tiles = extent_of(tiling, shape, part), -(-row.longest // tiling.tile_tokens)
            for grid in grids_of(tiling, extent, shape, device, costs):
                for slack in _slacks(grid, tiles):
                    (estimate,) = estimates_of(tiling, extent, grid._replace(slack_tiles=slack), exact, [tiles])
                    found[_launch(kernel, grid, slack)] = estimate.microseconds
    limit = min(found.values()) * _FAR_PREDICTED
    for launch, us in found.items():
        if us <= limit or (launch.kernel.name, launch.ctas, launch.cluster_size) in chosen_names:
            yield launch


def _slacks(grid: Grid, longest: int) -> tuple[int, ...]:
    if grid.cluster_size:
        return (_ALWAYS,) if grid.alone else (_ALWAYS, _NEVER)
    return (0, longest) if longest <= _MOST_WHOLE_TILES else (0,)


def _launch(kernel: NativeKernel, grid: Grid, slack: int) -> Launch:
    return Launch(kernel, grid.ctas, grid.resident, grid.cta_group_size, grid.row_tiles, grid.cluster_size, slack)


def _mla_launches(kernels: Sequence[NativeKernel], row: Row, device: DeviceFacts) -> Iterator[Launch]:
    for bound in row.bounds:
        chosen = select_mla_decode(kernels, mla_shape_of(row, bound), device)
        size, most = chosen.cta_group_size, device.multiprocessors // chosen.cta_group_size
        output_tiles = row.batch * -(-chosen.row_tiles // size)
        rounds = -(-output_tiles // most)
        aligned = {-(-output_tiles // rounds), min(most, most // output_tiles * output_tiles or most)}
        longest = -(-row.longest // int(chosen.kernel.traits["tile_tokens"]))
        for groups in sorted({chosen.ctas // size, min(most, output_tiles), most, *aligned}):
            for slack in (0, longest) if longest <= _MOST_WHOLE_TILES else (0,):
                yield Launch(chosen.kernel, groups * size, 1, size, chosen.row_tiles, 0, slack)
