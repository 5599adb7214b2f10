"""The rows of the calibration: decodes as an engine calls them, of even and of mixed lengths. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

MLA_LATENT, MLA_ROPE = 512, 64
SHORT = tuple(product((16, 64, 128, 256, 512), (32, 128, 200, 384, 512, 800)))
# KV heads of 128 columns with 32 query heads, of 64 columns with 64, and one of a tensor-parallel rank.
HEADS = ((32, 8, 128, "bf16"), (64, 8, 64, "bf16"), (8, 1, 128, "bf16"), (32, 8, 128, "e4m3"))
LONG = ((1, 1024), (1, 4096), (1, 16384), (4, 2048), (8, 1024), (8, 4096), (16, 7000), (32, 4096), (64, 1024))
LARGE = ((64, 8192), (128, 2048), (256, 1024))
MIXED = ((16, 400), (64, 200), (64, 1024), (256, 200), (256, 1024), (128, 2048))
# Fewer sizes, for other heads and for query tokens.
SOME = tuple(product((16, 64, 256, 512), (32, 200, 800)))
OTHER_HEADS = ((64, 8, 128, "bf16"), (64, 8, 64, "e4m3"), (8, 1, 128, "e4m3"))
# Single requests, mostly of few KV heads, from short to as long as a model's bound.
ALONE_HEADS = (
    (8, 1, 128, "bf16"),
    (16, 2, 128, "bf16"),
    (16, 4, 128, "bf16"),
    (8, 1, 64, "bf16"),
    (16, 2, 64, "bf16"),
    (4, 1, 256, "bf16"),
    (8, 2, 256, "bf16"),
    (8, 1, 128, "e4m3"),
    (16, 4, 128, "e4m3"),
    (8, 1, 64, "e4m3"),
    (64, 8, 64, "e4m3"),
    (8, 2, 256, "e4m3"),
)
ALONE = tuple((1, 1 << power) for power in range(9, 18))
GROUPS_OF_EIGHT = ((64, 8, 128, "bf16"), (8, 1, 128, "bf16"), (64, 8, 64, "bf16"))
QUERIES = tuple(product((2, 4, 8), ((1, 4096), (16, 200), (16, 2048), (64, 512), (64, 4096))))
# Drafts of single requests and of a few, short and long.
DRAFTED = ((1, 1024), (1, 16384), (1, 65536), (4, 4096), (4, 32768))
DRAFTED_HEADS = ((32, 8, 128, "bf16"), (64, 8, 128, "bf16"), (64, 8, 64, "bf16"), (32, 8, 128, "e4m3"))
MLA_SIZES = tuple(product((1, 16, 64, 128, 256), (32, 200, 512, 1024, 4096)))


@dataclass(frozen=True, slots=True)
class Row:
    """A decode: query and KV heads (0: MLA), the columns of a head, types, query tokens, and every request's keys."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    q_len: int
    lengths: tuple[int, ...]
    name: str

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def bytes_per_key(self) -> int:
        """Of one token in all KV heads, keys and values."""
        columns = 2 * self.kv_heads * self.head_dim if self.kv_heads else MLA_LATENT + MLA_ROPE
        return columns * (1 if self.dtype == "e4m3" else 2)

    @property
    def read_bytes(self) -> int:
        return sum(self.lengths) * self.bytes_per_key

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bounds that the row is planned for: exact, those of the plain function, and those of models."""
        power = 1 << (self.longest - 1).bit_length()
        return tuple(sorted({self.longest, power, *(b for b in (4096, 16384, 131072) if b >= self.longest)}))

    @classmethod
    def read(cls, record: dict[str, Any]) -> Row:
        return cls(**{**record, "lengths": tuple(record["lengths"])})

    def record(self) -> dict[str, object]:
        return asdict(self)


def even(batch: int, keys: int) -> tuple[int, ...]:
    return (keys,) * batch


def mixed(batch: int, keys: int) -> tuple[int, ...]:
    """From a twentieth of ``keys`` to nearly twice as many, the same for every run."""
    rng = random.Random(batch * keys)
    return tuple(max(1, int(keys * rng.uniform(0.05, 1.95))) for _ in range(batch))


def rows() -> Iterator[Row]:
    """All rows: single requests, even and mixed lengths, query tokens, MLA."""
    for heads, q_len, (batch, keys) in product(ALONE_HEADS, (1, 2, 4, 8), ALONE):
        yield _row(*heads, q_len, even(batch, keys), f"{batch}x{keys}")
    for heads in HEADS:
        # The single requests of few heads are above.
        yield from _decodes(heads, SHORT, MIXED, (*LONG[0 if heads not in ALONE_HEADS else 3 :], *LARGE))
    for heads in OTHER_HEADS:
        yield from _decodes(heads, SOME, MIXED[:4], LONG[:3] if heads not in ALONE_HEADS else ())
    yield from _queries()
    for heads, (batch, keys) in product((16, 128), MLA_SIZES):
        if batch * keys <= 128 * 4096:
            yield _row(heads, 0, MLA_LATENT, "bf16", 1, even(batch, keys), f"{batch}x{keys}")
    for heads, (batch, keys) in product((16, 128), ((16, 400), (64, 400), (64, 2000))):
        yield _row(heads, 0, MLA_LATENT, "bf16", 1, mixed(batch, keys), f"{batch}x{keys} mixed")


def _queries() -> Iterator[Row]:
    for q_len, heads, (batch, keys) in product((4, 8), (*HEADS, *OTHER_HEADS), SOME):
        yield _row(*heads, q_len, even(batch, keys), f"{batch}x{keys}")
    for (q_len, (batch, keys)), heads in product(QUERIES, GROUPS_OF_EIGHT):
        is_alone = heads in ALONE_HEADS and (batch, keys) in ALONE
        if not is_alone and (q_len == 2 or (batch, keys) not in SOME):
            yield _row(*heads, q_len, even(batch, keys), f"{batch}x{keys}")

    for q_len, heads, (batch, keys) in product((2, 4, 8), DRAFTED_HEADS, DRAFTED):
        yield _row(*heads, q_len, even(batch, keys), f"{batch}x{keys}")


def _decodes(heads: tuple[int, int, int, str], *sizes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    short, uneven, long = sizes
    for batch, keys in short:
        yield _row(*heads, 1, even(batch, keys), f"{batch}x{keys}")
    for batch, keys in uneven:
        yield _row(*heads, 1, mixed(batch, keys), f"{batch}x{keys} mixed")
    yield _row(*heads, 1, (30_000, *even(31, 300)), "one of 30000, 31 of 300")
    for batch, keys in long:
        yield _row(*heads, 1, even(batch, keys), f"{batch}x{keys}")


def _row(heads: int, kv_heads: int, head_dim: int, dtype: str, q_len: int, lengths: tuple[int, ...], size: str) -> Row:
    form = f"{heads}/{kv_heads} d{head_dim}" if kv_heads else f"MLA {heads}"
    name = f"{form} {dtype}{f' q_len {q_len}' if q_len > 1 else ''} {size}"
    return Row(heads, kv_heads, head_dim, dtype, q_len, lengths, name)
