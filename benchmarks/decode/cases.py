"""What the decode benchmark measures: every case of every section, with the bar that it has to meet. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .bars import MATRIX_SHARE, NO_BAR, READ_SHARE, Bar, at_least, at_most, ratio_or_share

ITEM_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1}
PEERS = ("xqa", "fa2", "cudnn")
# Speedups that a published release states for its grouped kernels, by model, query tokens and batch.
PUBLISHED_BATCHES = (8, 16, 32, 40, 64)
PUBLISHED = {
    "Qwen3-480B": {
        2: (1.24, 1.33, 1.27, 1.10, 1.29),
        4: (2.27, 2.55, 2.21, 1.93, 2.11),
        8: (3.48, 3.49, 3.06, 2.92, 3.01),
    },
    "GPT-OSS": {
        2: (1.70, 1.81, 1.81, 1.56, 1.67),
        4: (2.61, 2.69, 2.44, 2.09, 2.44),
        8: (4.82, 5.11, 5.13, 4.49, 5.27),
    },
}
# 96 and 64 query heads over 8 KV heads.
MODELS = {"Qwen3-480B": (96, 128), "GPT-OSS": (64, 64)}
RAGGED_SEED = 1
FA3_SPLITS = 32  # as vLLM asks for where it captures graphs


@dataclass(frozen=True, slots=True)
class Case:
    """One row: sizes, types, what is compared and the bar.

    ``lengths`` are the keys of each request; ``peers`` who is measured beside; ``host`` whether host costs are too.
    """

    section: str
    label: str
    lengths: tuple[int, ...]
    q_len: int = 1
    q_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    batch_invariant: bool = False
    peers: tuple[str, ...] = ()
    host: bool = False
    model: str = ""
    bar: Bar = NO_BAR

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def columns(self) -> int:
        """Of the page table."""
        return -(-self.longest // self.page)

    @property
    def pages(self) -> int:
        return sum(-(-length // self.page) for length in self.lengths)

    @property
    def page_bytes(self) -> int:
        """Of keys and values together."""
        return 2 * self.page * self.kv_heads * self.head_dim * ITEM_BYTES[self.kv_dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        return 2 * sum(self.lengths) * self.kv_heads * self.head_dim * ITEM_BYTES[self.kv_dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions of both matrix products, without padding, as if no key were masked."""
        return 4 * sum(self.lengths) * self.q_len * self.q_heads * self.head_dim


def same(batch: int, length: int) -> tuple[int, ...]:
    return (length,) * batch


def mixed(draw: random.Random, batch: int, mean: int) -> tuple[int, ...]:
    """Lengths from a twentieth to nearly twice the mean."""
    return tuple(max(1, int(mean * draw.uniform(0.05, 1.95))) for _ in range(batch))


def exponential(draw: random.Random, batch: int, mean: int) -> tuple[int, ...]:
    """Many short lengths and few long ones, of at most eight times the mean."""
    return tuple(max(1, min(8 * mean, int(draw.expovariate(1 / mean)))) for _ in range(batch))


def gqa() -> list[Case]:
    sizes = (((1, 1024), 1.5), ((1, 16384), 1.4), ((8, 4096), 1.25), ((32, 4096), 1.04), ((128, 2048), 1.03))
    bars = {size: ratio_or_share(ratio) for size, ratio in sizes}
    bars[64, 8192] = Bar(((at_least("ratio", 0.99), at_least("read_share", 0.95)),))
    return [
        Case("gqa", f"{b} x {n}", same(b, n), peers=PEERS, host=(b, n) in ((1, 1024), (64, 8192)), bar=bar)
        for (b, n), bar in sorted(bars.items())
    ]


def speculative() -> list[Case]:
    cases = []
    for head_dim in (128, 64):
        for q_len in (1, 2, 4, 8):
            for batch in (8, 16, 32, 64):
                bar = ratio_or_share(_speculative_ratio(head_dim, q_len, batch))
                label = f"D {head_dim}, q_len {q_len}, {batch} x 16384"
                case = Case("speculative", label, same(batch, 16384), q_len, head_dim=head_dim, bar=bar)
                cases.append(replace(case, peers=("xqa", "fa2"), host=(q_len, batch, head_dim) == (4, 8, 128)))
    return cases


def _speculative_ratio(head_dim: int, q_len: int, batch: int) -> float | None:
    if head_dim == 64:
        if q_len == 8:
            return 1.7
        return 1.05 if batch <= 16 else 1.0
    if q_len == 8:
        return 1.55
    if q_len == 1:
        return None
    return 1.06 if batch == 8 else 0.99


def fp8() -> list[Case]:
    bar = ratio_or_share(1.2, 0.85)
    return [
        Case("fp8", f"q {q}, {b} x {n}", same(b, n), q_dtype=q, kv_dtype="e4m3", peers=("xqa", "fa2"), bar=bar)
        for q in ("bf16", "e4m3")
        for b, n in ((1, 8192), (32, 4096), (128, 2048))
    ]


def ragged() -> list[Case]:
    draw = random.Random(RAGGED_SEED)
    uniform = tuple(draw.randint(1, 16384) for _ in range(64))
    one_long = (131072, *same(63, 512))
    bar = Bar(
        (
            (at_least("read_share", 1 / 1.15), at_least("ratio_fa2", 0.97), at_least("ratio_fa2_plan_run", 1.2)),
            (at_least("read_share", READ_SHARE),),
        )
    )
    peers = ("xqa", "fa2", "fa2_plan_run")
    return [
        Case("ragged", "64 of uniform 1..16384", uniform, peers=peers, bar=bar),
        Case("ragged", "131072 beside 63 of 512", one_long, peers=peers, bar=bar),
    ]


def grouped(kv_dtype: str = "e4m3") -> list[Case]:
    """Rows of one model and batch follow each other, one query token first."""
    cases = []
    section = "grouped" if kv_dtype == "e4m3" else f"grouped_{kv_dtype}"
    for model, (q_heads, head_dim) in MODELS.items():
        for batch in PUBLISHED_BATCHES:
            for q_len in (1, 2, 4, 8):
                limit = 1.25 if q_len == 8 else 1.10
                bar = Bar(((at_most("time_over_q1", limit),), (at_least(MATRIX_SHARE, 0.70),)))
                label = f"{model}, q_len {q_len}, {batch} x 16384"
                case = Case(section, label, same(batch, 16384), q_len, q_heads, head_dim=head_dim, model=model)
                case = replace(case, q_dtype=kv_dtype, kv_dtype=kv_dtype, bar=NO_BAR if q_len == 1 else bar)
                cases.append(case)
    return cases


def invariant() -> list[Case]:
    sizes = ((1, 1024), (1, 16384), (8, 4096), (8, 16384), (32, 4096), (128, 2048))
    return [
        Case(
            "invariant",
            f"{b} x {n}",
            same(b, n),
            batch_invariant=True,
            bar=Bar(((at_most("over_default", 1.15 if b >= 8 else 1.3),),)),
        )
        for b, n in sizes
    ]


def sweep() -> list[Case]:
    return [
        Case("sweep", f"{b} x {n}", same(b, n), peers=("xqa", "fa2"))
        for n in (512, 2048, 8192, 16384)
        for b in (1, 4, 16, 64, 128)
    ]


SECTIONS = {
    "gqa": gqa,
    "speculative": speculative,
    "fp8": fp8,
    "ragged": ragged,
    "grouped": grouped,
    "grouped_bf16": lambda: grouped("bf16"),
    "invariant": invariant,
    "sweep": sweep,
}


def published_speedup(model: str, q_len: int, batch: int) -> float:
    """What the published release states for its own grouped kernels on its own GPU."""
    return PUBLISHED[model][q_len][PUBLISHED_BATCHES.index(batch)]


def sections_of(text: str) -> list[str]:
    """The names of a comma-separated list, in the order of the table.

    Raises:
        ValueError: one is no section, or there is none.
    """
    names = [name for name in text.split(",") if name]
    if not names or set(names) - set(SECTIONS):
        raise ValueError(f"{text!r}: expected some of {','.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


def cases_of(sections: Iterable[str], peers: Sequence[str]) -> list[Case]:
    """All cases of the sections, beside those of their peers that are wanted."""
    found = [case for name in sections for case in SECTIONS[name]()]
    return [replace(case, peers=tuple(peer for peer in case.peers if peer in peers)) for case in found]
