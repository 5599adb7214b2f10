"""The work tiles of MLA decode over random launches, as a selection sizes them: what must hold however they are cut."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.launches import scratch_regions
from cubin_runtime.kernels.native.mla.select import MlaSelection, MlaShape, select_mla_decode
from tests.kernels.mla_examples import WIDE
from tests.kernels_src.host_kernels import HostArrays
from tests.kernels_src.host_scheduler import TILE, HostScheduler
from tests.kernels_src.test_stream_k_on_host import Problem, tiles_of
from tests.launch.examples import H100

# Two units in the last place of a quotient.
ERRORS = (0.0, 2.0**-22, -(2.0**-22))
WIDEST = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class Launch(Problem):
    """A launch of ``selection`` for requests of up to ``most_queries`` query tokens each, which begin at ``sums``.

    ``q_lens`` are those that follow if the sums are clamped to ``tokens``.
    """

    selection: MlaSelection
    sums: tuple[int, ...]
    tokens: int
    most_queries: int

    def values(self, arrays: HostArrays) -> dict[str, object]:
        sums = arrays.upload(np.array(self.sums, np.int32))
        return super().values(arrays) | {"q_cu_seq_lens": sums, "tokens": self.tokens, "q_len": self.most_queries}

    def sizes(self) -> tuple[int, int]:
        """Counters and partials that the host reserves."""
        output_tiles, splits = len(self.kv_lens) * self.selection.row_tiles, self.selection.splits
        _, counters, statistics, _ = scratch_regions(output_tiles, splits, self.selection.ctas, 1, 1)
        return counters.nbytes // 4, statistics.nbytes


def kv_lens_of(rng: np.random.Generator, batch: int, bound: int) -> tuple[int, ...]:
    scale = int(rng.choice([100, 1_000, 4_000, 30_000, bound, 2 * bound]))
    lengths = (
        rng.integers(-5, scale, batch),
        rng.exponential(scale, batch),
        scale + rng.integers(-64, 64, batch),
        rng.choice([0, -3, 1, 64, 65, bound, scale], batch),
        rng.pareto(1.0, batch) * scale / 10,
        np.where(np.arange(batch) == rng.integers(batch), bound, rng.integers(0, 500, batch)),
        rng.choice([-WIDEST - 1, WIDEST, 7], batch),
    )
    return tuple(int(min(length, WIDEST)) for length in lengths[rng.integers(len(lengths))])


def sums_of(rng: np.random.Generator, batch: int, most: int) -> tuple[tuple[int, ...], int]:
    """Running sums of query tokens, and how many there are; few sums are such that no caller may pass them."""
    form = rng.integers(10)
    lens = np.full(batch, most) if form < 4 else rng.integers(0, most + 1, batch)
    sums = np.concatenate([[0], np.cumsum(lens)])
    tokens = max(1, int(sums[-1]))
    if form == 9:
        sums = rng.choice([*sums, -7, tokens + 9, -WIDEST - 1, WIDEST], batch + 1)
    return tuple(int(x) for x in sums), tokens


def random_launch(index: int) -> Launch:
    rng = np.random.default_rng((7, index))
    batch, most = int(rng.choice([1, 2, 3, 5, 8, 17, 33, 64, 100, 131, 200, 400])), int(rng.choice([1, 1, 2, 3, 4, 16]))
    heads, bound = int(rng.choice([17, 20, 48, 64, 100, 128])), int(rng.choice([5_000, 163_840, 4_000_000, 1 << 27]))
    # The operator refuses more tiles than an int32 counts, in row tiles of 8.
    bound = min(bound, ((1 << 31) // (batch * -(-most * heads // 8)) - 1) * TILE)
    sums, tokens = sums_of(rng, batch, most)
    ends = np.clip(np.array(sums, np.int64), 0, tokens)
    q_lens = tuple(int(x) for x in np.clip(ends[1:] - ends[:-1], 0, most))
    shape = MlaShape(
        "bf16",
        512,
        heads,
        batch,
        q_len=most,
        ragged=True,
        max_seq_len=bound,
        batch_invariant=bool(rng.integers(5) == 0),
    )
    selection = select_mla_decode(WIDE, shape, replace(H100, multiprocessors=int(rng.choice([132, 114, 78, 144]))))
    return Launch(
        mla=True,
        kv_lens=kv_lens_of(rng, batch, bound),
        q_lens=q_lens,
        kv_heads=1,
        group=heads,
        cta_group_size=selection.cta_group_size,
        cta_groups=selection.ctas // selection.cta_group_size,
        splits=selection.splits,
        slack_tiles=selection.slack_tiles,
        spread_tiles=selection.spread_tiles,
        start_tiles=selection.start_tiles,
        bound=bound,
        selection=selection,
        sums=sums,
        tokens=tokens,
        most_queries=most,
    )


@dataclass(frozen=True)
class Part:
    """KV tiles [first, last) of an output tile, which one CTA computes."""

    first: int
    last: int
    index: int
    count: int
    counter: int
    slot: int
    first_slot: int

    @property
    def stored(self) -> bool:
        """Whether a partial goes through the workspace."""
        return self.count > 1 and self.counter >= 0


def check_output_tile(parts: Sequence[Part], tiles: int) -> None:
    """All tiles are computed once, and all its CTAs agree on what they merge."""
    assert [part.index for part in parts] == list(range(len(parts)))
    assert {(part.count, part.counter, part.first_slot) for part in parts} == {
        (len(parts), parts[0].counter, parts[0].slot)
    }
    assert len(parts) <= CONSTANTS.mla_max_splits
    assert [0, *(part.last for part in parts)] == [*(part.first for part in parts), tiles]
    assert all(part.first < part.last for part in parts)


@pytest.mark.parametrize("index", range(48))
def test_every_tile_is_computed_once_and_no_partial_shares_its_slot(
    schedulers: dict[bool, HostScheduler], index: int
) -> None:
    launch = random_launch(index)
    work = schedulers[True].walk(launch, error=ERRORS[index % len(ERRORS)])
    by_output_tile: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for rows in work.values():
        parts = [Part(*row[3:]) for row in rows]
        for row, part in zip(rows, parts, strict=True):
            by_output_tile[row[0], row[2]].append(part)
        if not launch.splits:
            partials = Counter(part.index == 0 for part in parts if part.stored)
            assert max(partials.values(), default=0) <= 1
    expected = {
        (request, row_tile): tiles_of(launch, kv_len)
        for request, (kv_len, q_len) in enumerate(zip(launch.kv_lens, launch.q_lens, strict=True))
        for row_tile in range(launch.row_tiles(q_len))
    }
    assert set(by_output_tile) == set(expected)
    for output_tile, parts in by_output_tile.items():
        check_output_tile(sorted(parts, key=lambda part: part.index), expected[output_tile])
    stored = [part for parts in by_output_tile.values() for part in parts if part.stored]
    counters, slots = launch.sizes()
    assert len({part.slot for part in stored}) == len(stored)
    assert all(0 <= part.slot < slots and part.counter < counters for part in stored)
    merged = [parts[0].counter for parts in by_output_tile.values() if parts[0].stored]
    assert len(set(merged)) == len(merged)


def test_the_launches_are_of_every_kind() -> None:
    launches = [random_launch(index) for index in range(48)]
    assert {launch.cta_group_size for launch in launches} == {1, 2, 3, 4}
    assert {launch.splits > 0 for launch in launches} == {False, True}
    assert any(launch.spread_tiles > 0 and len(launch.kv_lens) > 1 for launch in launches)
