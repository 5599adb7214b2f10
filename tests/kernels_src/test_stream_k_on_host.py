"""The stream-K scheduler of both decode families, compiled for the host: the work tiles of every CTA."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from host_kernels import HostArrays

from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.testing.standin import cuda_include
from kernels_src.build import SOURCES, write_headers

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
MLA_OPTIONS = {"LATENT": 512, "KV_E4M3": 0, "ROWS": 64, "TILE_TOKENS": TILE, "BOX_COLUMNS": 64}


@dataclass(frozen=True)
class Problem:
    """A launch: lengths of the requests (one longer than the bound is clamped), and how it is scheduled.

    ``q_lens``: query tokens of each request; ``group``: query heads per KV head.
    """

    mla: bool
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_heads: int
    group: int
    cta_group_size: int
    cta_groups: int
    splits: int = 0
    bound: int = 20_000

    @property
    def rows(self) -> int:
        return MLA_OPTIONS["ROWS"] if self.mla else DECODE_OPTIONS["ROWS"]

    def row_tiles(self, q_len: int) -> int:
        return -(-q_len * self.group // self.rows)

    def split_count(self, tiles: int) -> int:
        long = -(-tiles // (CONSTANTS.mla_split_tiles if self.mla else CONSTANTS.decode_split_tokens // TILE))
        short = 0 if self.mla else -(-tiles // (CONSTANTS.decode_short_split_tokens // TILE))
        return min(self.splits, max(long, min(CONSTANTS.decode_short_splits, short)))

    def values(self, arrays: HostArrays) -> dict[str, object]:
        q_cu_seq_lens = np.array([0, *accumulate(self.q_lens)], np.int32)
        values: dict[str, object] = {
            "seq_lens": arrays.upload(np.array(self.kv_lens, np.int32)),
            "q_cu_seq_lens": arrays.upload(q_cu_seq_lens),
            "batch": len(self.kv_lens),
            "tokens": sum(self.q_lens),
            "q_len": max(self.q_lens),
            "max_seq_len": self.bound,
            "cta_group_size": self.cta_group_size,
            "splits": self.splits,
        }
        if self.mla:
            return values | {"heads": self.group}
        return values | {
            "kv_heads": self.kv_heads,
            "group": self.group,
            "group_reciprocal": -(-(1 << CONSTANTS.decode_group_reciprocal_bits) // self.group),
            "head_groups": self.kv_heads // self.cta_group_size,
            "cluster_size_log2": -1,
            "max_rows": 1 << 20,
            "window_left": -1,
        }


def tile_groups(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """The request, number in the request and KV tiles of each tile group, in the order of the tile space."""
    for request, (kv_len, q_len) in enumerate(zip(problem.kv_lens, problem.q_lens, strict=True)):
        kv_tiles = max(1, -(-min(max(kv_len, 0), problem.bound) // TILE))
        output_tiles = problem.kv_heads * problem.row_tiles(q_len)
        for number in range(-(-output_tiles // problem.cta_group_size)):
            yield request, number, kv_tiles


def pieces(problem: Problem, offset: int, tiles: int, begins: list[int]) -> list[tuple[int, int, int]]:
    """The CTA group, first and last KV tile of each split of an output tile at ``offset`` of the tile space."""
    if problem.splits:
        count = problem.split_count(tiles)
        cuts = [i * tiles // count for i in range(count + 1)]
    else:
        cuts = [0, *(begin - offset for begin in begins if offset < begin < offset + tiles), tiles]
    return [(sum(b <= offset + first for b in begins) - 1, first, last) for first, last in pairwise(cuts)]


def expected(problem: Problem) -> dict[tuple[int, int], list[list[int]]]:
    """The rows that walk() writes for each (CTA group, CTA of the group)."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    space = list(tile_groups(problem))
    total = sum(tiles for _, _, tiles in space)
    groups = min(problem.cta_groups, total)
    begins = [c * total // groups for c in range(groups)]
    offset = 0
    for request, number, tiles in space:
        parts = pieces(problem, offset, tiles, begins)
        offset += tiles
        row_tiles = problem.row_tiles(problem.q_lens[request])
        for rank in range(problem.cta_group_size):
            output_tile = number * problem.cta_group_size + rank
            head, row_tile = divmod(output_tile, row_tiles)
            if head >= problem.kv_heads:
                continue
            most_row_tiles = problem.row_tiles(max(problem.q_lens))
            ctas = [owner * problem.cta_group_size + rank for owner, _, _ in parts]
            if problem.splits:
                counter = (request * most_row_tiles + row_tile) * problem.kv_heads + head
                slots = [counter * problem.splits + i for i in range(len(parts))]
            else:
                counter = ctas[0]
                slots = [CONSTANTS.partials_per_cta * cta + (i == 0) for i, cta in enumerate(ctas)]
            folded = problem.mla and problem.splits and len(parts) <= CONSTANTS.mla_invariant_splits
            if folded and len(set(ctas)) == 1:
                counter = -1
            for i, (owner, first, last) in enumerate(parts):
                row = [request, head, row_tile, first, last, i, len(parts), counter, slots[i], slots[0]]
                found.setdefault((owner, rank), []).append(row)
    return found


class HostScheduler:
    """A family's scheduler as a function of the host."""

    def __init__(self, mla: bool, folder: Path) -> None:
        self.mla = mla
        self.layout = LAYOUTS["PagedMlaDecodeParams" if mla else "PagedDecodeCopyParams"]
        write_headers(folder / "generated", LAYOUTS)
        source = SOURCES / ("mla/scheduler.cuh" if mla else "fmha/decode/scheduler.cuh")
        options = {"MLA": int(mla), **(MLA_OPTIONS if mla else DECODE_OPTIONS)}
        library = folder / f"walk-{int(mla)}.so"
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-w", "-shared", "-fPIC"]
        command += [f"-I{folder / 'generated'}", f"-I{cuda_include('crt/host_defines.h')}", f'-DSOURCE="{source}"']
        command += [*(f"-D{name}={value}" for name, value in options.items()), str(WALK), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        loaded = ctypes.CDLL(str(library))
        self._walk, self._cta_group = loaded.walk, loaded.cta_group

    def cta_group(self, total: int, groups: int, tile: int, error: float) -> int:
        """The CTA group that computes a tile, with quotients that are off by ``error``, relatively."""
        return int(self._cta_group(total, groups, tile, ctypes.c_float(error)))

    def walk(self, problem: Problem) -> dict[tuple[int, int], list[list[int]]]:
        """The work tiles of each (CTA group, CTA of the group) that has any."""
        arrays, found = HostArrays(), {}
        empty = {m.name: None if m.type in ("ptr", "CUtensorMap") else 0 for m in self.layout.fields}
        parameters = ctypes.create_string_buffer(self.layout.pack(empty | problem.values(arrays)))
        size, groups = problem.cta_group_size, problem.cta_groups
        grid = (size * groups, 1) if self.mla else (size, groups)
        rows = (ctypes.c_int * (COLUMNS * MOST_TILES))()
        for group, rank in np.ndindex(groups, size):
            cta = (group * size + rank, 0) if self.mla else (rank, group)
            count = self._walk(parameters, (ctypes.c_int * 2)(*grid), (ctypes.c_int * 2)(*cta), rows)
            if count:
                numbers = np.frombuffer(rows, np.int32, COLUMNS * count)
                found[group, rank] = numbers.reshape(count, COLUMNS).tolist()
        return found


@pytest.fixture(scope="session")
def schedulers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, HostScheduler]:
    folder = tmp_path_factory.mktemp("scheduler")
    return {mla: HostScheduler(mla, folder) for mla in (False, True)}


def decode(kv_lens: tuple[int, ...], q_lens: tuple[int, ...], size: int, groups: int, splits: int = 0) -> Problem:
    return Problem(False, kv_lens, q_lens, 4, 3, size, groups, splits)


def mla(kv_lens: tuple[int, ...], q_lens: tuple[int, ...], size: int, groups: int, splits: int = 0) -> Problem:
    return Problem(True, kv_lens, q_lens, 1, 48, size, groups, splits)


def random_problem(index: int) -> Problem:
    rng = np.random.default_rng((5, index))
    batch = int(rng.integers(1, 70))
    kv_lens = tuple(int(x) for x in rng.choice([0, 1, 64, 65, 4000, -2, 30_000, *rng.integers(0, 9000, 5)], batch))
    q_lens = (int(rng.integers(1, 9)), *(int(x) for x in rng.integers(0, 9, batch - 1)))
    groups, splits = int(rng.integers(1, 40)), int(rng.choice([0, 1, 4, 16]))
    if index % 2:
        return mla(kv_lens, q_lens, int(rng.integers(1, 5)), groups, splits)
    return decode(kv_lens, q_lens, int(rng.choice([1, 2, 4])), groups, splits)


PROBLEMS = {
    "one tile": decode((5,), (1,), 1, 4),
    "one request over all CTAs": decode((9_999,), (1,), 1, 7),
    "a CTA group per output tile": decode((640, 640), (1, 1), 2, 4),
    "requests without keys or queries": decode((0, 700, 0, 64), (1, 0, 2, 8), 4, 3),
    "more than a warp's requests": decode((64,) * 33 + (6_400,), (1,) * 34, 1, 9),
    "more than a warp's requests for each lane": mla((100,) * 1_100, (1,) * 1_100, 1, 5),
    "invariant splits": decode((300, 1_100, 15_000), (2, 1, 3), 2, 6, 16),
    "row tiles that no CTA of the group has": mla((500, 3_000), (3, 6), 4, 3),
    "invariant splits of one CTA and of several": mla((900, 2_000, 9_000), (1, 2, 3), 2, 5, 4),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_ctas_walk_equal_ranges_of_the_tile_space(schedulers: dict[bool, HostScheduler], name: str) -> None:
    problem = PROBLEMS[name]
    assert schedulers[problem.mla].walk(problem) == expected(problem)


@pytest.mark.parametrize("index", range(24))
def test_random_problems_are_scheduled_alike(schedulers: dict[bool, HostScheduler], index: int) -> None:
    problem = random_problem(index)
    assert schedulers[problem.mla].walk(problem) == expected(problem)


@pytest.mark.parametrize("error", [-(2.0**-22), 0.0, 2.0**-22])
@pytest.mark.parametrize("total", [1_024, 1_025, 1_500, 99_999, (1 << 24) + 1, (1 << 31) - 1])
def test_the_cta_group_of_a_tile_is_exact(schedulers: dict[bool, HostScheduler], total: int, error: float) -> None:
    for groups in (1, 2, 3, 131, 132, 264, 1_023, 1_024):
        begins = [group * total // groups for group in range(groups + 1)]
        found = [
            [schedulers[False].cta_group(total, groups, tile, error) for tile in (first, after - 1)]
            for first, after in pairwise(begins)
        ]
        assert found == [[group, group] for group in range(groups)], groups
