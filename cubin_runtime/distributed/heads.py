"""Tensor parallelism of attention: the query and KV heads of a rank."""

from __future__ import annotations

from ..attention.checks import integer
from ..errors import UsageError
from ..values import dataclass


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank: ``q_heads`` from ``first_q_head`` on, and the ``kv_heads`` that they read.

    ``sharers`` ranks have the same KV heads, because there are more ranks than KV heads. They are neighbours, and can
    divide the keys of these heads between them by context parallelism instead of each holding all.
    """

    first_q_head: int
    q_heads: int
    first_kv_head: int
    kv_heads: int
    sharers: int

    @classmethod
    def of(cls, q_heads: int, kv_heads: int, world: int, rank: int) -> HeadShare:
        """The share of ``rank`` among ``world`` ranks.

        Raises:
            UsageError: the rank is not below ``world``, the heads do not divide evenly, or one is no integer.
        """
        q_heads, kv_heads = integer("q_heads", q_heads), integer("kv_heads", kv_heads)
        world, rank = integer("world", world), integer("rank", rank)
        if not 0 <= rank < world:
            raise UsageError(f"expected 0 to {world - 1}, below the world's {world}", argument="rank", value=rank)
        if kv_heads < 1:
            raise UsageError("expected 1 or more", argument="kv_heads", value=kv_heads)
        if q_heads < 1 or q_heads % kv_heads:
            raise UsageError(f"expected a multiple of kv_heads={kv_heads}", argument="q_heads", value=q_heads)
        if q_heads % world:
            raise UsageError(f"expected a multiple of the world's {world} ranks", argument="q_heads", value=q_heads)
        if world % kv_heads and kv_heads % world:
            raise UsageError(
                f"expected a multiple or a divisor of the world's {world} ranks", argument="kv_heads", value=kv_heads
            )
        sharers = max(1, world // kv_heads)
        own_kv_heads = max(1, kv_heads // world)
        own_q_heads = q_heads // world
        return cls(rank * own_q_heads, own_q_heads, rank // sharers * own_kv_heads, own_kv_heads, sharers)
