"""The cases of the benchmark of context attention, with the bar that each one's ratio has to meet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PrefillCase:
    """One problem. ``page`` 0: keys are ragged; ``bar``: the ratio that is asked for."""

    section: str
    name: str
    head_dim: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    causal: bool = True
    window_left: int = -1
    page: int = 0
    bar: float | None = None

    @property
    def value_dim(self) -> int:
        """Columns of a value."""
        return 128 if self.head_dim == 192 else self.head_dim

    @property
    def flop(self) -> float:
        """Floating-point operations of the products that the mask leaves."""
        return 2.0 * self.heads * (self.head_dim + self.value_dim) * sum(map(self._cells, self.q_lens, self.kv_lens))

    def _cells(self, q_len: int, kv_len: int) -> float:
        if not self.causal:
            return q_len * kv_len
        if self.window_left < 0:
            return q_len * (kv_len - q_len) + q_len * q_len / 2
        return sum(min(self.window_left + 1, kv_len - q_len + i + 1) for i in range(q_len))

    def small(self) -> PrefillCase:
        """The same with one short request, which needs the same kernels."""
        return replace(self, q_lens=(128,), kv_lens=(256,))


def prefill_cases() -> Iterator[PrefillCase]:
    """All cases."""
    bars = {128: (1.10, 1.03, 1.03), 64: (1.05, 1.0, 1.0)}
    for head_dim, of_lengths in bars.items():
        for length, bar in zip((2048, 8192, 16384), of_lengths, strict=True):
            name = f"causal D {head_dim} S {length}"
            yield PrefillCase(f"causal {head_dim}", name, head_dim, (length,), (length,), bar=bar)
    for head_dim, heads, kv_heads, own in ((256, 16, 4, (1.0, 0.97, 0.97)), (192, 16, 16, (0.97, 0.97, 0.97))):
        for length, bar in zip((2048, 8192, 16384), own, strict=True):
            name = f"causal D {head_dim} S {length}"
            yield PrefillCase(f"causal {head_dim}", name, head_dim, (length,), (length,), heads, kv_heads, bar=bar)
    for head_dim, bar in ((128, 0.95), (64, None)):
        name = f"full D {head_dim} S 8192"
        yield PrefillCase("full", name, head_dim, (8192,), (8192,), causal=False, bar=bar)
    yield PrefillCase("window", "window 1024 D 64 S 16384", 64, (16384,), (16384,), window_left=1023)
    rng = random.Random(1)
    lengths = tuple(sorted((rng.randrange(128, 8193) for _ in range(32)), key=lambda _: rng.random()))
    for page, bar in ((64, 1.15), (16, None)):
        name = f"paged {page}: 32 requests of 128 to 8192"
        yield PrefillCase("paged", name, 128, lengths, lengths, page=page, bar=bar)
    for kv_len in (8192, 32768):
        name = f"paged 64: 4 chunks of 512 of {kv_len}"
        yield PrefillCase("chunks", name, 128, (512,) * 4, (kv_len,) * 4, page=64, bar=1.15)
    for requests, length, bar in ((16, 512, 1.0), (64, 128, 1.0), (256, 64, 1.0)):
        name = f"{requests} prompts of {length} D 128"
        yield PrefillCase("short", name, 128, (length,) * requests, (length,) * requests, bar=bar)
    rng = random.Random(2)
    short = tuple(rng.randrange(16, 513) for _ in range(64))
    yield PrefillCase("short", "64 prompts of 16 to 512 D 128", 128, short, short, bar=1.0)
