"""Which keys a query token sees, by the kernels' own arithmetic compiled for the host, against counting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cubin_runtime.kernels.native.problem import Dealing
from tests.kernels_src.host_kernels import HostArrays
from tests.kernels_src.host_scheduler import TILE, HostScheduler, RowBounds

CASES = 400
BOUND = 5_000


@dataclass(frozen=True)
class Divided:
    """One request of ``keys`` on all ranks, of which one rank's are looked at; ``world`` 1: it has all."""

    keys: int
    q_len: int
    world: int
    rank: int
    interleave: int
    window: int

    @property
    def own(self) -> np.ndarray:
        """The global positions of this rank's keys."""
        every = np.arange(self.keys)
        return every[every // self.interleave % self.world == self.rank]

    def expected(self) -> np.ndarray:
        """``[q_len, own keys]``: whether a query token sees a key."""
        position = self.keys - self.q_len + np.arange(self.q_len)[:, None]
        return (self.own <= position) & ((self.own >= position - self.window) | (self.window < 0))

    def parameters(self, arrays: HostArrays, mla: bool) -> dict[str, object]:
        own = len(self.own)
        values: dict[str, object] = {
            "seq_lens": arrays.upload(np.array([7, own], np.int32)),
            "batch": 2,
            "tokens": 2 * self.q_len,
            "q_len": self.q_len,
            "max_seq_len": BOUND,
            "cta_group_size": 1,
        }
        if self.world > 1:
            values["global_seq_lens"] = arrays.upload(np.array([7 * self.world, self.keys], np.int32))
            values |= Dealing(self.world, self.rank, self.interleave).values()
        if mla:
            values |= {"heads": 16}
        else:
            values |= {"kv_heads": 1, "group": 1, "group_reciprocal": 1 << 16, "head_groups": 1}
            values |= {"cluster_size_log2": -1, "max_rows": 1 << 20, "window_left": self.window}
        return values

    def bounds(self, scheduler: HostScheduler) -> RowBounds:
        arrays = HostArrays()
        return scheduler.row_bounds(self.parameters(arrays, scheduler.mla), 1, self.q_len)


def seen(bounds: RowBounds, own: int, q_len: int) -> np.ndarray:
    """``[q_len, own keys]``, as the masks of scores put it together."""
    key = np.arange(own)
    draft = key - (own - q_len)
    words, begins = np.array(bounds.drafts)[:, None], np.array(bounds.begins)[:, None]
    return (key >= begins) & ((draft < 0) | (words >> np.maximum(draft, 0) & 1 == 1))


def random_case(index: int, *, window: bool, world: int | None = None) -> Divided:
    rng = np.random.default_rng((7, index))
    ranks = world or int(rng.integers(2, 10))
    return Divided(
        keys=int(rng.choice([rng.integers(0, 40), rng.integers(0, 300), rng.integers(0, 4_000)])),
        q_len=int(rng.integers(1, 17)),
        world=ranks,
        rank=int(rng.integers(ranks)),
        interleave=int(rng.choice([1, 2, 3, 16, 64, 1_000])) if ranks > 1 else 1,
        window=int(rng.choice([0, 1, 5, 100, 128, 1_000])) if window else -1,
    )


def check(case: Divided, scheduler: HostScheduler) -> None:
    bounds, expected = case.bounds(scheduler), case.expected()
    assert np.array_equal(seen(bounds, len(case.own), case.q_len), expected), case
    key = np.arange(len(case.own))
    assert not expected[:, key < bounds.first_tile * scheduler.tile].any(), case
    end = -(-len(case.own) // scheduler.tile)
    assert bounds.first_tile + bounds.kv_tiles == max(end, bounds.first_tile + 1), case
    to_all = (key >= bounds.visible_from) & (key < len(case.own) - case.q_len)
    assert expected[:, to_all].all(), case


@pytest.mark.parametrize("mla", [False, True])
def test_drafts_on_one_of_several_ranks_see_what_lies_before_them(
    schedulers: dict[bool, HostScheduler], mla: bool
) -> None:
    for index in range(CASES):
        check(random_case(index, window=False), schedulers[mla])


def test_windows_end_where_they_end_on_one_rank(schedulers: dict[bool, HostScheduler]) -> None:
    for index in range(CASES):
        check(random_case(index, window=True), schedulers[False])


@pytest.mark.parametrize("mla", [False, True])
def test_a_rank_with_all_keys_is_as_it_was(schedulers: dict[bool, HostScheduler], mla: bool) -> None:
    for index in range(CASES):
        check(random_case(index, window=not mla and index % 2 == 0, world=1), schedulers[mla])


@pytest.mark.parametrize("by_index", [False, True])
def test_windows_of_a_mask_count_from_depth_or_index(schedulers: dict[bool, HostScheduler], by_index: bool) -> None:
    for index in range(CASES):
        case = random_case(index, window=True, world=1)
        words = np.random.default_rng((8, index)).integers(0, 1 << 32, case.q_len, dtype=np.uint32)
        arrays = HostArrays()
        values = {**case.parameters(arrays, mla=False), "positions_by_index": int(by_index)}
        values["mask"] = arrays.upload(np.concatenate([words, words]))
        bounds = schedulers[False].row_bounds(values, 1, case.q_len)
        own = words.astype(np.int64) & ((1 << case.q_len) - 1)
        place = np.arange(case.q_len) if by_index else np.array([int(word).bit_count() - 1 for word in own])
        begins = case.keys - case.q_len + place - case.window
        follows = np.arange(case.q_len) >= case.q_len - case.keys  # the others see no key
        assert np.array(bounds.begins)[follows].tolist() == np.maximum(0, begins)[follows].tolist(), case
        assert np.array(bounds.drafts)[follows].tolist() == own[follows].tolist(), case
        assert bounds.first_tile * TILE <= max(0, begins.min()), case
        assert bounds.visible_from >= begins.max(), case


def test_tiles_in_front_of_a_window_are_skipped(schedulers: dict[bool, HostScheduler]) -> None:
    case = Divided(keys=4_000, q_len=4, world=4, rank=1, interleave=16, window=400)
    assert case.bounds(schedulers[False]).first_tile == int(case.expected().any(axis=0).argmax()) // TILE > 10


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("divided", [False, True])
def test_segments_leave_out_no_mask_that_a_row_needs(
    segments_scheduler: HostScheduler, divided: bool, window: bool
) -> None:
    without_mask, tile = 0, segments_scheduler.tile
    for index in range(CASES):
        case, arrays = random_case(index, window=window, world=None if divided else 1), HostArrays()
        check(case, segments_scheduler)
        parameters, expected = case.parameters(arrays, False), case.expected()
        for number in range(len(case.own) // tile):
            if segments_scheduler.all_rows_see(parameters, 1, number):
                assert expected[:, number * tile : (number + 1) * tile].all(), (case, number)
                without_mask += 1
    assert without_mask > 100 or (divided and window)  # all tiles of these have masks
