"""Which keys and heads a rank has."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.distributed import HeadShare, KvPartition
from cubin_runtime.errors import UsageError

SHAPES = [(world, interleave) for world in (1, 2, 3, 8) for interleave in (1, 2, 5, 16)]


@pytest.mark.parametrize(("world", "interleave"), SHAPES)
def test_keys_are_counted_as_they_are_dealt(world: int, interleave: int) -> None:
    ranks = [KvPartition(world, rank, interleave) for rank in range(world)]
    held = [0] * world
    for keys in range(100):
        assert [rank.own_keys(keys) for rank in ranks] == held
        held[ranks[0].holder(keys)] += 1


def test_no_keys_are_none_and_fewer_are_none_too() -> None:
    assert [KvPartition(4, 1).own_keys(keys) for keys in (0, -1, -9)] == [0, 0, 0]


def test_blocked_keys_begin_on_the_first_rank() -> None:
    ranks = [KvPartition.blocked(4, rank, 1000) for rank in range(4)]
    assert [rank.own_keys(1000) for rank in ranks] == [250, 250, 250, 250]
    assert [rank.own_keys(300) for rank in ranks] == [250, 50, 0, 0]


@pytest.mark.torch
@pytest.mark.parametrize(("world", "interleave"), SHAPES)
def test_lengths_on_the_device_are_those_of_the_host(world: int, interleave: int) -> None:
    torch = pytest.importorskip("torch")
    lens = torch.arange(-2, 100, dtype=torch.int32)
    for rank in range(world):
        partition, out = KvPartition(world, rank, interleave), torch.empty_like(lens)
        assert partition.own_lens(lens, out) is out
        assert out.tolist() == [partition.own_keys(keys) for keys in range(-2, 100)]
        assert partition.own_lens(lens).dtype == torch.int32


@pytest.mark.torch
@pytest.mark.parametrize(("world", "interleave"), SHAPES)
def test_a_position_is_stored_on_its_holder_behind_the_keys_before_it(world: int, interleave: int) -> None:
    torch = pytest.importorskip("torch")
    positions = torch.arange(-3, 100)
    for rank in range(world):
        partition = KvPartition(world, rank, interleave)
        expected = [partition.own_keys(p) if p >= 0 and partition.holder(p) == rank else -1 for p in positions.tolist()]
        assert partition.own_positions(positions).tolist() == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, 0), "world=0: expected 1 or more"),
        ((2, 2), "rank=2: expected 0 to 1"),
        ((2, -1), "rank=-1: expected 0 to 1"),
        ((2, 0, 0), "interleave=0: expected 1 or more"),
        ((2, 0, 1 << 30), "interleave=1073741824: expected at most 1073741823 on each of 2 ranks"),
        (("2", 0), "world='2': expected an integer"),
        ((2, None), "rank=None: expected an integer"),
        ((2, 0, 1.5), "interleave=1.5: expected an integer"),
    ],
)
def test_a_partition_of_no_sense_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KvPartition(*given)


def test_blocks_are_of_keys_that_a_request_may_have() -> None:
    assert KvPartition.blocked(4, 3, 1 << 30).own_keys(1 << 30) == 1 << 28
    with pytest.raises(UsageError, match="max_seq_len=2147483647: expected at most 1073741824"):
        KvPartition.blocked(2, 0, 2**31 - 1)
    with pytest.raises(UsageError, match="max_seq_len='9': expected an integer"):
        KvPartition.blocked(2, 0, "9")  # type: ignore[arg-type]


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "float32"])
def test_lengths_and_positions_of_other_dtypes_are_refused(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    numbers, partition = torch.ones(3, dtype=getattr(torch, dtype)), KvPartition(8, 0, 1 << 13)
    with pytest.raises(UsageError, match=f"global_lens: dtype {dtype}, expected int32 or int64"):
        partition.own_lens(numbers)
    with pytest.raises(UsageError, match=f"positions: dtype {dtype}, expected int32 or int64"):
        partition.own_positions(numbers)


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ((64, 8, 1, 0), HeadShare(0, 64, 0, 8, 1)),
        ((64, 8, 4, 3), HeadShare(48, 16, 6, 2, 1)),
        ((64, 8, 8, 5), HeadShare(40, 8, 5, 1, 1)),
        ((64, 8, 16, 5), HeadShare(20, 4, 2, 1, 2)),
        ((128, 1, 8, 7), HeadShare(112, 16, 0, 1, 8)),
    ],
)
def test_a_rank_has_heads_and_the_kv_heads_that_they_read(given: Any, share: HeadShare) -> None:
    assert HeadShare.of(*given) == share


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((64, 8, 4, 4), "rank=4: expected 0 to 3"),
        ((64, 0, 4, 0), "kv_heads=0: expected 1 or more"),
        ((0, 8, 4, 0), "q_heads=0: expected a multiple of kv_heads=8"),
        ((-64, 8, 4, 0), "q_heads=-64: expected a multiple of kv_heads=8"),
        ((64, 8, 4.0, 0), "world=4.0: expected an integer"),
        ((63, 8, 4, 0), "q_heads=63: expected a multiple of kv_heads=8"),
        ((64, 8, 5, 0), "q_heads=64: expected a multiple of the world's 5 ranks"),
        ((24, 6, 4, 0), "kv_heads=6: expected a multiple or a divisor of the world's 4 ranks"),
    ],
)
def test_heads_that_do_not_divide_are_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HeadShare.of(*given)
