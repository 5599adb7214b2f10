"""The stream-K scheduler of both decode families, compiled for the host: the work tiles of every CTA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import pytest

from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.mla.select import cta_groups
from tests.kernels_src.host_kernels import HostArrays
from tests.kernels_src.host_scheduler import DECODE_OPTIONS, MLA_OPTIONS, TILE, HostScheduler

MAX_PIECE = 512  # KV tiles


@dataclass(frozen=True)
class Problem:
    """A launch: lengths of the requests (one longer than the bound is clamped), and how it is scheduled.

    ``q_lens``: query tokens of each request; ``group``: query heads per KV head. ``cluster_size``: the CTAs of the
    cluster that an output tile may have, 0: none.
    """

    mla: bool
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_heads: int
    group: int
    cta_group_size: int
    cta_groups: int
    splits: int = 0
    slack_tiles: int = 0
    spread_tiles: int = 0
    start_tiles: int = 0
    cluster_size: int = 0
    bound: int = 20_000

    @property
    def rows(self) -> int:
        return MLA_OPTIONS["ROWS"] if self.mla else DECODE_OPTIONS["ROWS"]

    def row_tiles(self, q_len: int) -> int:
        return -(-q_len * self.group // self.rows)

    def is_whole(self, longest: int, share: int) -> bool:
        return longest <= self.slack_tiles or longest - share <= self.spread_tiles > 0

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
            "slack_tiles": self.slack_tiles,
        }
        if self.mla:
            return values | {
                "heads": self.group,
                "spread_tiles": self.spread_tiles,
                "start_tiles": self.start_tiles,
            }
        return values | {
            "kv_heads": self.kv_heads,
            "group": self.group,
            "group_reciprocal": -(-(1 << CONSTANTS.decode_group_reciprocal_bits) // self.group),
            "head_groups": self.kv_heads // self.cta_group_size,
            "cluster_size_log2": self.cluster_size.bit_length() - 1,
            "max_rows": 1 << 20,
            "window_left": -1,
        }


def tiles_of(problem: Problem, kv_len: int) -> int:
    return max(1, -(-min(max(kv_len, 0), problem.bound) // TILE))


def tile_groups(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """The request, number in the request and KV tiles of each tile group, in the order of the tile space."""
    for request, (kv_len, q_len) in enumerate(zip(problem.kv_lens, problem.q_lens, strict=True)):
        kv_tiles = tiles_of(problem, kv_len)
        output_tiles = problem.kv_heads * problem.row_tiles(q_len)
        for number in range(-(-output_tiles // problem.cta_group_size)):
            yield request, number, kv_tiles


def parts_of(
    problem: Problem, offset: int, front: int, tiles: int, begins: list[int], whole: bool
) -> list[tuple[int, int, int]]:
    """The CTA group, first and last KV tile of each split of an output tile at ``offset`` of the tile space.

    ``front`` are the tiles without keys in front of it.
    """
    if whole:
        middle = (front + tiles) // 2
        return [(sum(begin <= offset + middle for begin in begins) - 1, 0, tiles)]
    offset += front
    if problem.splits:
        count = problem.split_count(tiles)
        cuts = [i * tiles // count for i in range(count + 1)]
    else:
        cuts = [0, *(begin - offset for begin in begins if offset < begin < offset + tiles), tiles]
    return [(sum(b <= offset + first for b in begins) - 1, first, last) for first, last in pairwise(cuts)]


def useful_groups(problem: Problem, total: int, longest: int) -> int:
    """CTA groups that have work: none computes so few tiles of a long request that merging costs more."""
    groups = min(problem.cta_groups, total)
    if not problem.mla or problem.splits:
        return groups
    many = max(CONSTANTS.mla_many_splits, longest)
    return min(groups, max(1, total // CONSTANTS.mla_merged_tiles, total * CONSTANTS.mla_many_splits // many))


def piece_of(problem: Problem, lengths: list[int], longest: int, groups: int) -> int:
    """KV tiles of the pieces of output tiles of ``lengths``, one for each CTA group; 0: none are cut.

    ``longest`` is the longest request, also one without queries.
    """
    total, batch = sum(lengths), len(problem.kv_lens)
    share = total // max(groups, 1)
    if not problem.spread_tiles or batch == 1 or share >= MAX_PIECE or (share < 3 and batch < 8):
        return 0
    longest_piece = min(share + 8, MAX_PIECE)
    most_output_tiles = batch * -(-problem.row_tiles(max(problem.q_lens)) // problem.cta_group_size)
    if longest * most_output_tiles <= total + total // 8:
        longest_piece = share + 1
        if most_output_tiles * -(-longest // longest_piece) > groups:
            return 0
    elif total > longest_piece * (groups - batch // 2):
        return 0
    piece = -(-total // groups)
    while piece <= longest_piece:
        excess = sum(-(-tiles // piece) for tiles in lengths) * piece - groups * piece
        if excess <= 0:
            return piece
        piece += int(np.float32(excess) * np.float32(piece) / np.float32(max(total - excess, 1))) + 1
    return 0


def expected(problem: Problem) -> dict[tuple[int, int], list[list[int]]]:
    """The rows that walk() writes for each (CTA group, CTA of the group)."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    space = list(tile_groups(problem))
    total = sum(problem.start_tiles + tiles for _, _, tiles in space)
    longest = problem.start_tiles + max(tiles_of(problem, kv_len) for kv_len in problem.kv_lens)
    groups = useful_groups(problem, total, longest)
    whole = problem.is_whole(longest, total // max(groups, 1))
    lengths = [problem.start_tiles + tiles for _, _, tiles in space]
    piece = 0 if whole or not problem.mla else piece_of(problem, lengths, longest, groups)
    if piece:
        lengths = [-(-length // piece) * piece for length in lengths]
        total = sum(lengths)
        groups = total // piece
    begins = [c * total // groups for c in range(groups)]
    offset = 0
    for (request, number, tiles), length in zip(space, lengths, strict=True):
        parts = parts_of(problem, offset, length - tiles, tiles, begins, whole)
        offset += length
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


def decode(kv_lens: tuple[int, ...], q_lens: tuple[int, ...], size: int, groups: int, splits: int = 0) -> Problem:
    return Problem(False, kv_lens, q_lens, 4, 3, size, groups, splits)


def mla(kv_lens: tuple[int, ...], q_lens: tuple[int, ...], size: int, groups: int, splits: int = 0) -> Problem:
    return Problem(True, kv_lens, q_lens, 1, 48, size, groups, splits)


def whole(problem: Problem, slack_tiles: int) -> Problem:
    return replace(problem, slack_tiles=slack_tiles)


def random_problem(index: int) -> Problem:
    rng = np.random.default_rng((5, index))
    batch = int(rng.integers(1, 70))
    kv_lens = tuple(int(x) for x in rng.choice([0, 1, 64, 65, 4000, -2, 30_000, *rng.integers(0, 9000, 5)], batch))
    q_lens = (int(rng.integers(1, 9)), *(int(x) for x in rng.integers(0, 9, batch - 1)))
    groups, splits = int(rng.integers(1, 40)), int(rng.choice([0, 1, 4, 16]))
    if index % 2:
        problem = mla(kv_lens, q_lens, int(rng.integers(1, 5)), groups, splits)
        if splits:
            return problem
        return replace(problem, start_tiles=int(rng.integers(0, 6)), spread_tiles=int(rng.integers(0, 9)))
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
    "more CTA groups than one request is worth": mla((3_000,), (1,), 1, 66),
    "more CTA groups than short requests are worth": mla((700, 3_000, 64), (1, 2, 1), 1, 132),
    "a long request of MLA without queries": mla((9_000, 5, 9_000), (0, 1, 0), 1, 66),
    "no queries of MLA": mla((9_000, 5), (0, 0), 1, 66),
    "whole output tiles": whole(decode((300, 64, 0, 200, 310, 5), (1, 8, 1, 0, 2, 1), 2, 7), 5),
    "a CTA group for each half of an output tile": whole(decode((128,) * 6, (1,) * 6, 4, 12), 2),
    "whole output tiles of MLA": whole(mla((100, 200, 300) * 9, (1, 2, 1) * 9, 2, 11), 5),
    "starts of output tiles": replace(mla((100, 5_000, 64, 3_000) * 9, (1,) * 36, 2, 24), start_tiles=4),
    "starts of whole output tiles": replace(mla((100, 200, 0) * 9, (1, 2, 1) * 9, 2, 5), start_tiles=4, slack_tiles=12),
    "a CTA group for each long output tile": replace(mla((640, 900, 700) * 6, (1,) * 18, 1, 20), spread_tiles=6),
    "one output tile longer than its CTA group may have": replace(
        mla((640, 900, 1_300) * 6, (1,) * 18, 1, 20), spread_tiles=6
    ),
    "pieces of an equal share": replace(mla((640, 900, 9_000), (1,) * 3, 1, 15), spread_tiles=6),
    "pieces of requests that are equally long": replace(mla((1_300,) * 20, (1,) * 20, 1, 66), spread_tiles=2),
    "equally long requests that no piece of an equal share fits": replace(
        mla((2_000,) * 28, (1,) * 28, 1, 66), spread_tiles=2
    ),
    "pieces of more tiles than an equal share at first": replace(
        mla((640, 1_900, 2_300, 64) * 10, (1,) * 40, 1, 66), spread_tiles=8
    ),
    "pieces that would be too long": replace(mla((640,) * 9 + (9_000,), (1,) * 10, 1, 11), spread_tiles=6),
    "pieces of output tiles that a CTA group shares": replace(
        mla((640, 900, 0, 9_000), (3, 0, 8, 5), 3, 20), spread_tiles=6
    ),
    "pieces with starts": replace(mla((640, 900, 9_000), (1,) * 3, 1, 20), spread_tiles=6, start_tiles=3),
    "one key tile too many for whole output tiles": whole(decode((300, 321), (1, 1), 1, 3), 5),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_ctas_walk_equal_ranges_of_the_tile_space(schedulers: dict[bool, HostScheduler], name: str) -> None:
    problem = PROBLEMS[name]
    assert schedulers[problem.mla].walk(problem) == expected(problem)


@pytest.mark.parametrize("index", range(24))
def test_random_problems_are_scheduled_alike(schedulers: dict[bool, HostScheduler], index: int) -> None:
    problem = random_problem(index)
    assert schedulers[problem.mla].walk(problem) == expected(problem)


@pytest.mark.parametrize("index", range(24))
def test_random_problems_are_cut_into_pieces_alike(schedulers: dict[bool, HostScheduler], index: int) -> None:
    rng = np.random.default_rng((6, index))
    kv_lens = tuple(int(x) for x in rng.exponential(rng.integers(200, 4_000), rng.integers(2, 60)))
    q_lens = tuple(int(x) for x in rng.integers(0, 3, len(kv_lens) - 1))
    groups = int(rng.integers(len(kv_lens), 133))
    problem = replace(mla(kv_lens, (2, *q_lens), int(rng.integers(1, 4)), groups), spread_tiles=2)
    assert schedulers[True].walk(problem) == expected(problem)


@pytest.mark.parametrize("index", range(24))
def test_short_requests_are_not_split(schedulers: dict[bool, HostScheduler], index: int) -> None:
    problem = random_problem(index)
    kv_lens = tuple(kv_len % 700 for kv_len in problem.kv_lens)
    short = replace(problem, kv_lens=kv_lens, splits=0, slack_tiles=11)
    assert schedulers[problem.mla].walk(short) == expected(short)


@pytest.mark.parametrize(("batch", "tiles"), [(1, 1), (1, 16), (1, 17), (1, 40), (2, 30), (4, 20), (16, 9)])
def test_a_loose_bound_uses_the_cta_groups_of_an_exact_one(
    schedulers: dict[bool, HostScheduler], batch: int, tiles: int
) -> None:
    loose = mla((tiles * TILE,) * batch, (1,) * batch, 1, cta_groups(132, batch, 2_048))
    exact = replace(loose, cta_groups=cta_groups(132, batch, tiles))
    assert schedulers[True].walk(loose) == schedulers[True].walk(exact)


def in_clusters(size: int, kv_lens: tuple[int, ...], slack_tiles: int, clusters: int = 0) -> Problem:
    """Requests of 8 query rows and 4 KV heads: a grid of ``clusters`` per KV head, or of one for each request."""
    problem = decode(kv_lens, (2,) * len(kv_lens), 4, size * max(clusters, len(kv_lens)))
    return replace(problem, slack_tiles=slack_tiles, cluster_size=size)


@pytest.mark.parametrize(
    "problem",
    [
        in_clusters(2, (640, 600, 500), 1),
        in_clusters(4, (100, 0, 130), 0, clusters=7),
        in_clusters(2, (1_500, 200, 1_000), 6),
        in_clusters(1, (300, 64, 0), 5),
        in_clusters(8, (30_000,), 0),
        in_clusters(8, (3_000,), 10, clusters=3),
    ],
)
def test_a_cluster_takes_an_output_tile_where_requests_are_even(
    schedulers: dict[bool, HostScheduler], problem: Problem
) -> None:
    size, taken = problem.cluster_size, schedulers[False].walk(problem)
    for (group, head), work in taken.items():
        request, split = divmod(group, size)
        cuts = [tiles_of(problem, problem.kv_lens[request]) * i // size for i in range(size + 1)]
        assert [row[:5] for row in work] == [[request, head, 0, *cuts[split : split + 2]]]
    ctas = sum(size if tiles_of(problem, kv_len) > 1 else 1 for kv_len in problem.kv_lens)
    assert len(taken) == 4 * ctas


@pytest.mark.parametrize(
    "problem",
    [
        in_clusters(2, (30_000, 300, 300), 3),
        in_clusters(2, (1_500, 200, 1_000), 4),
        in_clusters(4, (5_000, 64), 8, clusters=9),
        in_clusters(8, (30_000,), 0, clusters=3),
    ],
)
def test_clusters_share_the_tile_space_where_one_request_is_long(
    schedulers: dict[bool, HostScheduler], problem: Problem
) -> None:
    taken = schedulers[False].walk(problem)
    assert {in_tile_space(problem, *place): work for place, work in taken.items()} == expected(problem)


def in_tile_space(problem: Problem, group: int, rank: int) -> tuple[int, int]:
    """The CTA group and the number in it of the CTA that would have these if groups followed the grid."""
    size, clusters = problem.cta_group_size, problem.cta_groups // problem.cluster_size
    cluster, cta = divmod(group, problem.cluster_size)
    if problem.cluster_size % size:
        return cta * clusters + cluster, rank
    of_cluster, rank_in_cluster = divmod(cta, size)
    return of_cluster * size * clusters + cluster * size + rank, rank_in_cluster


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
