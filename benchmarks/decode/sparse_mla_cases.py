"""What the sparse MLA benchmark measures: every case with the bar that it has to meet. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .bars import Bar, at_least, at_most
from .mla_cases import INVARIANT_LIMIT, MlaCase

TOP_K = 2048
# Of the cache's rows by type: those of e4m3 are 512 e4m3, 4 float32 scales and 64 bf16.
ROW_BYTES = {"e4m3": 656, "bf16": 1152}
ONE_TOKEN_INVARIANT_LIMIT = 1.9


@dataclass(frozen=True, slots=True)
class SparseMlaCase(MlaCase):
    """One row: every query token, ``batch`` times ``q_len``, has a list of ``length`` rows of its own."""

    length: int = TOP_K

    @property
    def label(self) -> str:
        tokens = f"{self.batch} x {self.q_len}" if self.q_len > 1 else str(self.batch)
        return f"{self.heads} heads, {tokens} token{'s' if tokens != '1' else ''}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of the rows that the lists name."""
        return self.batch * self.q_len * self.length * ROW_BYTES[self.kv_dtype]


def e4m3() -> list[MlaCase]:
    """Rows of 656 bytes, beside the peer."""
    few: Mapping[int, Bar] = {
        64: Bar(((at_most("time_us", 32.0), at_least("ratio", 2.0)),)),
        256: Bar(((at_most("time_us", 105.0),),)),
        1: Bar(((at_most("time_us", 13.0),),)),
    }
    bars = {(heads, batch, 1): bar for heads in (16, 8) for batch, bar in few.items()}
    bars |= {
        (32, 64, 1): Bar(((at_most("time_us", 44.0),),)),
        (64, 128, 2): Bar(((at_least("ratio", 1.4),),)),
        (128, 128, 2): Bar(((at_least("ratio", 1.0),),)),
    }
    return [
        SparseMlaCase("e4m3", batch, heads=heads, q_len=q_len, kv_dtype="e4m3", peer=True, bar=bar)
        for (heads, batch, q_len), bar in bars.items()
    ]


def bf16() -> list[MlaCase]:
    """Rows of bf16, which the peer does not decode."""
    return [SparseMlaCase("bf16", 64, heads=16, bar=Bar(((at_least("read_share", 0.75),),)))]


def invariant() -> list[MlaCase]:
    """``batch_invariant`` over the default."""
    limits = {1: ONE_TOKEN_INVARIANT_LIMIT, 16: INVARIANT_LIMIT, 64: INVARIANT_LIMIT}
    return [
        SparseMlaCase(
            "invariant",
            batch,
            heads=16,
            kv_dtype="e4m3",
            batch_invariant=True,
            bar=Bar(((at_most("over_default", limit),),)),
        )
        for batch, limit in limits.items()
    ]


SECTIONS = {"e4m3": e4m3, "invariant": invariant, "bf16": bf16}


def sparse_mla_cases(peer: bool = True) -> list[MlaCase]:
    """All cases, those of one type of rows together; ``peer``: beside it."""
    return [replace(case, peer=case.peer and peer) for make in SECTIONS.values() for case in make()]
