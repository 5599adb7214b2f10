"""The keys of a request that a rank holds with context parallelism: its lengths and positions from global ones."""

from __future__ import annotations

from typing import Any

from ..attention.checks import integer
from ..attention.paged_cache import MOST_KEYS
from ..errors import UsageError
from ..tensor import dtype_word
from ..values import dataclass

_MOST_IN_ROUND = 2**31 - 1  # keys, with which lengths and positions of 32 bits are divided


@dataclass(frozen=True, slots=True)
class KvPartition:
    """Keys dealt to ``world`` ranks in rounds: ``interleave`` neighbouring keys to each rank in turn.

    The keys of a rank keep their order, and are numbered from 0 on that rank. Its page table and ``seq_lens`` count
    them alone.

    Args:
        world: ranks that hold keys, 1 or more.
        rank: this one, 0 to world - 1.
        interleave: neighbouring keys of a rank, 1 or more, and below 2^31 on all ranks. A multiple of the page size
            keeps pages whole.

    Raises:
        UsageError: one is out of range, or no integer.
    """

    world: int
    rank: int
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "rank", "interleave"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        if self.world < 1:
            raise UsageError("expected 1 or more", argument="world", value=self.world)
        if not 0 <= self.rank < self.world:
            raise UsageError(
                f"expected 0 to {self.world - 1}, below the world's {self.world}", argument="rank", value=self.rank
            )
        if self.interleave < 1:
            raise UsageError("expected 1 or more", argument="interleave", value=self.interleave)
        if self.world * self.interleave > _MOST_IN_ROUND:
            raise UsageError(
                f"expected at most {_MOST_IN_ROUND // self.world} on each of {self.world} ranks",
                argument="interleave",
                value=self.interleave,
            )

    @classmethod
    def blocked(cls, world: int, rank: int, max_seq_len: int) -> KvPartition:
        """The first part of all ``max_seq_len`` keys on rank 0, the last on the last rank.

        Short requests then lie on the first ranks alone, and new tokens are appended on one rank.
        """
        if integer("max_seq_len", max_seq_len) > MOST_KEYS:
            raise UsageError(f"expected at most {MOST_KEYS}", argument="max_seq_len", value=max_seq_len)
        return cls(world, rank, max(1, -(-max_seq_len // max(integer("world", world), 1))))

    def holder(self, position: int) -> int:
        """The rank that holds the key at a global position."""
        return position // self.interleave % self.world

    def own_keys(self, keys: int) -> int:
        """This rank's keys among the first ``keys`` of a request: its length here, or the bound on all lengths here."""
        rounds, rest = divmod(max(keys, 0), self.world * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def own_lens(self, global_lens: Any, out: Any = None) -> Any:
        """This rank's ``seq_lens``, as ``own_keys`` of each length: in stream order, without waiting for the device.

        Args:
            global_lens: an int32 or int64 torch tensor of any shape, keys of each request on all ranks.
            out: an integer tensor of that shape to write to, for example the one that a captured graph reads. None
                makes one like ``global_lens``.

        Returns:
            ``out``.

        Raises:
            UsageError: ``global_lens`` has another dtype.
        """
        _check_dtype("global_lens", global_lens)
        keys = global_lens.clamp(min=0)
        rest = (keys % (self.world * self.interleave)) - self.rank * self.interleave
        lens = (keys // (self.world * self.interleave)) * self.interleave + rest.clamp(0, self.interleave)
        return lens if out is None else out.copy_(lens)

    def own_positions(self, positions: Any, out: Any = None) -> Any:
        """Return where this rank stores the keys at global ``positions``, for ``append_kv``; -1: another rank does.

        Args:
            positions: an int32 or int64 torch tensor of any shape; below 0: padding.
            out: as for ``own_lens``.

        Returns:
            ``out``.

        Raises:
            UsageError: ``positions`` has another dtype.
        """
        _check_dtype("positions", positions)
        rest = positions % (self.world * self.interleave) - self.rank * self.interleave
        index = (positions // (self.world * self.interleave)) * self.interleave + rest
        held = (positions >= 0) & (rest >= 0) & (rest < self.interleave)
        local = index.masked_fill(~held, -1)
        return local if out is None else out.copy_(local)


def _check_dtype(name: str, tensor: Any) -> None:
    """Check that the numbers of keys and of a round fit the elements; torch has no arithmetic on uint32."""
    dtype = dtype_word(tensor.dtype)
    if dtype not in ("int32", "int64"):
        raise UsageError(f"dtype {dtype}, expected int32 or int64", argument=name)
