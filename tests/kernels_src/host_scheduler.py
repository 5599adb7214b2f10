"""The schedulers of both decode families, compiled for the host."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.native.problem import Dealing
from cubin_runtime.testing.standin import cuda_include
from kernels_src.build import SOURCES, write_headers
from tests.kernels_src.host_kernels import HostArrays

WALK = Path(__file__).parent / "host" / "walk_range.cpp"
TILE = 64
COLUMNS = 10  # numbers that walk() writes for a work tile
MOST_TILES = 4096
DECODE_OPTIONS = {
    "HEAD_DIM": 128,
    "KV_E4M3": 0,
    "MMA_FP16": 0,
    "Q_E4M3": 0,
    "ROWS": 8,
    "TILE_TOKENS": TILE,
    "CONSUMER_WARPGROUPS": 1,
    "WARPGROUP_MMA": 0,
    "USE_TMA": 0,
    "STAGES": 6,
    "CTAS_PER_SM": 1,
}
SEGMENTS_OPTIONS = {"TILE_TOKENS": CONSTANTS.segment_tile_tokens, "SEGMENTS": 1}
MLA_OPTIONS = {"LATENT": 512, "ROPE": 64, "KV_E4M3": 0, "ROWS": 64, "TILE_TOKENS": TILE, "BOX_COLUMNS": 64}


class RowBounds(NamedTuple):
    """KV tiles of a request, where keys begin that all query tokens see, and for each query token which of the last
    q_len keys it sees, and the first key of its window.
    """

    first_tile: int
    kv_tiles: int
    visible_from: int
    drafts: list[int]
    begins: list[int]


class HostScheduler:
    """A family's scheduler as a function of the host."""

    def __init__(self, mla: bool, folder: Path, *, segments: bool = False) -> None:
        self.mla, self.tile = mla, CONSTANTS.segment_tile_tokens if segments else TILE
        self.layout = LAYOUTS["PagedMlaDecodeParams" if mla else "PagedDecodeCopyParams"]
        write_headers(folder / "generated", LAYOUTS)
        source = SOURCES / ("mla/scheduler.cuh" if mla else "fmha/decode/scheduler.cuh")
        options = {"MLA": int(mla), **(MLA_OPTIONS if mla else DECODE_OPTIONS)}
        if segments:
            options |= SEGMENTS_OPTIONS
        library = folder / f"walk-{int(mla)}-{int(segments)}.so"
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-w", "-shared", "-fPIC"]
        command += [f"-I{folder / 'generated'}", f"-I{cuda_include('crt/host_defines.h')}", f'-DSOURCE="{source}"']
        command += [*(f"-D{name}={value}" for name, value in options.items()), str(WALK), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        loaded = ctypes.CDLL(str(library))
        self._walk, self._cta_group, self._row_bounds = loaded.walk, loaded.cta_group, loaded.row_bounds
        self._all_rows_see = loaded.all_rows_see_tile if segments else None

    def cta_group(self, total: int, groups: int, tile: int, error: float) -> int:
        """The CTA group that computes a tile, with quotients that are off by ``error``, relatively."""
        return int(self._cta_group(total, groups, tile, ctypes.c_float(error)))

    def _parameters(self, values: Mapping[str, object]) -> Any:
        empty = {m.name: None if m.type in ("ptr", "CUtensorMap") else 0 for m in self.layout.fields}
        return ctypes.create_string_buffer(self.layout.pack({**empty, **Dealing().values(), **values}))

    def row_bounds(self, values: Mapping[str, object], request: int, q_len: int) -> RowBounds:
        """What the query tokens of a request see, by the parameters of a launch."""
        numbers = (ctypes.c_int * (3 + 2 * q_len))()
        self._row_bounds(self._parameters(values), request, numbers)
        first_tile, kv_tiles, visible_from, *rows = numbers
        return RowBounds(first_tile, kv_tiles, visible_from, rows[::2], rows[1::2])

    def all_rows_see(self, values: Mapping[str, object], request: int, tile: int) -> bool:
        """Whether the consumers of segments take a tile to be visible to all rows."""
        assert self._all_rows_see is not None
        return bool(self._all_rows_see(self._parameters(values), request, tile * self.tile))

    def walk(self, problem: Any, error: float = 0.0) -> dict[tuple[int, int], list[list[int]]]:
        """The work tiles of each (CTA group, CTA of the group) that has any; quotients are off by ``error``."""
        arrays, found = HostArrays(), {}
        parameters = self._parameters(problem.values(arrays))
        size, groups, cluster = problem.cta_group_size, problem.cta_groups, problem.cluster_size or 1
        grid = (size * groups, 1, 1) if self.mla else (cluster, size, groups // cluster)
        rows = (ctypes.c_int * (COLUMNS * MOST_TILES))()
        for group, rank in np.ndindex(groups, size):
            cta = (group * size + rank, 0, 0) if self.mla else (group % cluster, rank, group // cluster)
            count = self._walk(
                parameters, (ctypes.c_int * 3)(*grid), (ctypes.c_int * 3)(*cta), rows, ctypes.c_float(error)
            )
            if count:
                numbers = np.frombuffer(rows, np.int32, COLUMNS * count)
                found[group, rank] = numbers.reshape(count, COLUMNS).tolist()
        return found
