"""Batch-invariant decode compiled for the host: which segments each CTA computes, and where their partials lie."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections import Counter
from itertools import accumulate, product

import numpy as np
import pytest

from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.cost_model import OTHER
from cubin_runtime.kernels.native.decode.grids import ANY_ROWS, SEGMENTS, DecodeShape, Grid, Part, splits_of, tiling_of
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.native.problem import Dealing
from cubin_runtime.testing.standin import cuda_include
from kernels_src.build import SOURCES, write_headers
from tests.kernels.decode_kernels import segments_kernel
from tests.kernels_src.host_kernels import HostArrays
from tests.kernels_src.host_scheduler import COLUMNS, DECODE_OPTIONS, MOST_TILES, SEGMENTS_OPTIONS, WALK
from tests.launch.examples import H100

TILE = CONSTANTS.segment_tile_tokens
SEGMENT_TILES = CONSTANTS.segment_tokens // TILE
GROUP, KV_HEADS, ROWS = 3, 4, 8
LAYOUT = LAYOUTS["PagedDecodeCopyParams"]
KERNEL = segments_kernel(ROWS, 128)
Cta = tuple[int, int]


class Launch:
    """A launch of random requests, some without keys or queries, on a random grid.

    With ``contradicts`` their keys are dealt to ranks, all of which together have none: fewer than this rank has.
    """

    def __init__(self, library: ctypes.CDLL, index: int, *, contradicts: bool = False) -> None:
        rng = np.random.default_rng((7, index))
        self.library = library
        batch = int(rng.integers(1, 40))
        self.kv_lens = [int(x) for x in rng.choice([0, 1, 128, 512, 513, 30_000, *rng.integers(0, 9000, 6)], batch)]
        self.q_lens = [int(rng.integers(1, 9)), *(int(x) for x in rng.integers(0, 9, batch - 1))]
        self.bound = int(rng.choice([8192, 20_000]))
        self.window = int(rng.choice([-1, -1, 100, 1500]))
        self.size, self.groups = int(rng.choice([1, 2, 4])), int(rng.integers(1, 60))
        shape = DecodeShape(
            "bf16",
            128,
            group=GROUP,
            kv_heads=KV_HEADS,
            batch=batch,
            q_len=max(self.q_lens),
            tokens=sum(self.q_lens),
            ragged=True,
            max_seq_len=self.bound,
            window_left=self.window,
            batch_invariant=True,
        )
        tiling = tiling_of(KERNEL, shape, Part(0, ANY_ROWS, SEGMENTS), H100, OTHER)
        grid = Grid(self.size * self.groups, 1, self.size, tiling.row_tiles, tiling.tiles)
        self.slots = splits_of(tiling, grid, shape)
        arrays = HostArrays()
        values = {
            "seq_lens": arrays.upload(np.array(self.kv_lens, np.int32)),
            "q_cu_seq_lens": arrays.upload(np.array([0, *accumulate(self.q_lens)], np.int32)),
            "batch": batch,
            "tokens": sum(self.q_lens),
            "q_len": max(self.q_lens),
            "max_seq_len": self.bound,
            "cta_group_size": self.size,
            "splits": self.slots,
            "kv_heads": KV_HEADS,
            "group": GROUP,
            "group_reciprocal": -(-(1 << CONSTANTS.decode_group_reciprocal_bits) // GROUP),
            "head_groups": KV_HEADS // self.size,
            "cluster_size_log2": -1,
            "max_rows": 1 << 20,
            "window_left": self.window,
            **Dealing(world=2).values(),
        }
        if contradicts:
            values["global_seq_lens"] = arrays.upload(np.zeros(batch, np.int32))
        empty = {m.name: None if m.type in ("ptr", "CUtensorMap") else 0 for m in LAYOUT.fields}
        self.arrays, self.parameters = arrays, ctypes.create_string_buffer(LAYOUT.pack(empty | values))
        self.work: dict[Cta, list[list[int]]] = {}
        rows = (ctypes.c_int * (COLUMNS * MOST_TILES))()
        for cta in product(range(self.size), range(self.groups)):
            count = library.walk(self.parameters, self._grid(), self._place(0, *cta), rows)
            self.work[cta] = np.frombuffer(rows, np.int32, COLUMNS * count).reshape(count, COLUMNS).tolist()

    def partials(self, cta: Cta, number: int) -> list[int]:
        to = (ctypes.c_int * MOST_TILES)()
        return to[: self.library.partials(self.parameters, self._grid(), self._place(0, *cta), number, to)]

    def _grid(self) -> ctypes.Array[ctypes.c_int]:
        return self._place(1, self.size, self.groups)

    @staticmethod
    def _place(x: int, y: int, z: int) -> ctypes.Array[ctypes.c_int]:
        return (ctypes.c_int * 3)(x, y, z)

    def tiles(self, request: int) -> tuple[int, int]:
        """The first key tile that a request reads, and the end."""
        kv_len = min(self.kv_lens[request], self.bound)
        begin = 0 if self.window < 0 else max(0, kv_len - self.q_lens[request] - 1 - self.window)
        return begin // TILE, max(-(-kv_len // TILE), begin // TILE + 1)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("segments")
    write_headers(folder / "generated", LAYOUTS)
    options = {**DECODE_OPTIONS, **SEGMENTS_OPTIONS, "MLA": 0}
    source = SOURCES / "fmha/decode/scheduler.cuh"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-w", "-shared", "-fPIC"]
    command += [f"-I{folder / 'generated'}", f"-I{cuda_include('crt/host_defines.h')}", f'-DSOURCE="{source}"']
    command += [*(f"-D{name}={value}" for name, value in options.items()), str(WALK), "-o", str(folder / "walk.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "walk.so"))


@pytest.mark.parametrize("index", range(10))
def test_ctas_take_whole_segments_and_together_all_keys_once(library: ctypes.CDLL, index: int) -> None:
    launch = Launch(library, index)
    taken: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for rows in launch.work.values():
        for request, head, row_tile, first, last, *_ in rows:
            begin, end = launch.tiles(request)
            assert first == begin or first % SEGMENT_TILES == 0
            assert last == end or last % SEGMENT_TILES == 0
            taken.setdefault((request, head, row_tile), []).append((first, last))
    for (request, *_), ranges in taken.items():
        begin, end = launch.tiles(request)
        bounds = [begin, *(last for _, last in sorted(ranges))]
        assert bounds[-1] == end
        assert [first for first, _ in sorted(ranges)] == bounds[:-1]
    pairs = sum(KV_HEADS * -(-q_len * GROUP // ROWS) for q_len in launch.q_lens)
    assert len(taken) == pairs


@pytest.mark.parametrize("contradicts", [False, True])
@pytest.mark.parametrize("index", range(10))
def test_partials_have_slots_of_their_own_and_are_folded_in_the_order_of_segments(
    library: ctypes.CDLL, index: int, contradicts: bool
) -> None:
    launch = Launch(library, index, contradicts=contradicts)
    written: dict[tuple[int, int, int], dict[int, int]] = {}  # the first segment of a partial -> its slot
    for rows in launch.work.values():
        for request, head, row_tile, first, last, split, count, _, base, is_prefix in rows:
            origin = launch.tiles(request)[0] // SEGMENT_TILES
            after = count if last == launch.tiles(request)[1] else last // SEGMENT_TILES - origin
            assert split == (0 if is_prefix else first // SEGMENT_TILES - origin)
            slots = {0: base} if is_prefix else {split + i: base + 1 + i for i in range(after - split)}
            assert all(base <= slot < base + launch.slots for slot in slots.values())
            if not (is_prefix and after == count):
                written.setdefault((request, head, row_tile), {}).update(slots)
    used = Counter(slot for slots in written.values() for slot in slots.values())
    assert not used or max(used.values()) == 1
    assert all(slot < launch.size * launch.groups * launch.slots for slot in used)
    for cta, rows in launch.work.items():
        for number, row in enumerate(rows):
            expected = written.get((row[0], row[1], row[2]))
            if expected is not None:
                assert launch.partials(cta, number) == [expected[segment] for segment in sorted(expected)]


def test_some_of_these_launches_split_output_tiles(library: ctypes.CDLL) -> None:
    counts = [len(rows) for index in range(10) for rows in Launch(library, index).work.values()]
    partial = [
        row for index in range(10) for rows in Launch(library, index).work.values() for row in rows if not row[9]
    ]
    assert max(counts) > 1
    assert len(partial) > 50
