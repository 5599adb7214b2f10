"""What the MLA benchmark measures: every case with the bar that it has to meet. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .bars import NO_BAR, Bar, at_least, at_most, ratio_or_share
from .cases import ITEM_BYTES

ROPE = 64
LATENT_READ_SHARE = 0.85
INVARIANT_LIMIT = 1.15


@dataclass(frozen=True, slots=True)
class MlaCase:
    """One row: sizes, types, and the bar. All requests have ``length`` keys and ``q_len`` query tokens."""

    section: str
    batch: int
    length: int
    heads: int = 128
    q_len: int = 1
    latent: int = 512
    page: int = 64
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    batch_invariant: bool = False
    peer: bool = False
    bar: Bar = NO_BAR

    @property
    def label(self) -> str:
        tokens = f", q_len {self.q_len}" if self.q_len > 1 else ""
        types = "" if self.kv_dtype == "bf16" else f", {self.q_dtype} q, {self.kv_dtype} KV"
        return f"{self.heads} heads, {self.batch} x {self.length}{tokens}{types}"

    @property
    def width(self) -> int:
        """Columns of a row of the cache."""
        return self.latent + ROPE

    @property
    def pages(self) -> int:
        return self.batch * -(-self.length // self.page)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache that one call must read."""
        return self.batch * self.length * self.width * ITEM_BYTES[self.kv_dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions of both matrix products, without padding, as if no key were masked."""
        return 2 * self.batch * self.q_len * self.heads * self.length * (self.width + self.latent)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What a case has in common with its counterpart of another type."""
        return self.batch, self.length, self.heads, self.q_len


def _at_least(key: str, limit: float) -> Bar:
    return Bar(((at_least(key, limit),),))


def bf16() -> list[MlaCase]:
    """Beside the peer."""
    ratios = {
        (1, 4096, 1): 1.6,
        (16, 4096, 1): 1.25,
        (64, 4096, 1): 1.10,
        (128, 4096, 1): 1.10,
        (128, 8192, 1): 1.10,
        (64, 4096, 2): 1.10,
    }
    many = [
        MlaCase("bf16", batch, length, q_len=q_len, peer=True, bar=_at_least("ratio", ratio))
        for (batch, length, q_len), ratio in ratios.items()
    ]
    few = ratio_or_share(1.2, LATENT_READ_SHARE)
    in_sequence = ((64, 4096, _at_least("ratio", 1.08)), (16, 4096, _at_least("ratio", 1.15)))
    fewer = (*in_sequence, *((16, length, few) for length in (1024, 8192)))
    return many + [MlaCase("bf16", 128, length, heads=heads, peer=True, bar=bar) for heads, length, bar in fewer]


def fp8() -> list[MlaCase]:
    """Over our own bf16."""
    bars = {("e4m3", 128): 1.25, ("bf16", 128): 0.85, ("bf16", 16): 1.4, ("e4m3", 16): None}
    return [
        MlaCase(
            "fp8",
            128,
            8192,
            heads=heads,
            q_dtype=q_dtype,
            kv_dtype="e4m3",
            bar=NO_BAR if limit is None else _at_least("over_bf16", limit),
        )
        for (q_dtype, heads), limit in bars.items()
    ]


def invariant() -> list[MlaCase]:
    """``batch_invariant`` over the default."""
    sizes = ((1, 4096, 128), (16, 4096, 128), (64, 4096, 128), (128, 8192, 128), (128, 1024, 16), (128, 8192, 16))
    bar = Bar(((at_most("over_default", INVARIANT_LIMIT),),))
    return [
        MlaCase("invariant", b, n, heads=heads, batch_invariant=True, bar=bar if b >= 16 else NO_BAR)
        for b, n, heads in sizes
    ]


SECTIONS = {"bf16": bf16, "fp8": fp8, "invariant": invariant}


def mla_cases(peer: bool = True) -> list[MlaCase]:
    """All cases, bf16 first, which the others refer to; ``peer``: beside it."""
    return [replace(case, peer=case.peer and peer) for make in SECTIONS.values() for case in make()]
