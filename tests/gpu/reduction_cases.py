"""Made-up partials of split decodes, what must come of them in float64, and running our kernels over them. No torch.

The same cases run on a device (``test_reduction_gpu``) and, compiled for the host, in CI (``test_reduction_on_host``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubin_runtime.attention.reference import bfloat16_bits, bfloat16_values
from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.reduction.plan import KV_REDUCTION, LSE_FROM_STATISTICS, OperationLaunch

LOG2_E = math.log2(math.e)
TILE_KV = 128
THREADS = CONSTANTS.reduction_threads
# What each output type may differ by: relative (of one rounding), and absolute (of the smallest numbers).
TOLERANCES = {"bf16": (2**-8, 1e-30), "fp16": (2**-10, 2**-24), "e4m3": (2**-4, 2**-10)}
STATISTICS_TOLERANCE = 2e-5
POISON_BYTE = 0xA5


@dataclass(frozen=True, slots=True)
class ReductionCase:
    """Sizes and options of one reduction; ``lengths`` are keys and ``q_lens`` query tokens of each request."""

    lengths: tuple[int, ...]
    q_lens: tuple[int, ...] = ()
    heads_q: int = 64
    heads_per_cta: int = 64
    tokens_per_cta: int = 1
    ctas_kv: int = 4
    tile_q: int = 64
    head_dim: int = 128
    value_ctas: int = 4
    ctas_per_tile: int = 2
    partial: str = "bf16"
    out: str = "bf16"
    scale: float = 0.1
    sum_scale: float = 1.0
    sinks: bool = False
    device_scale: bool = False
    top_k: int = 0
    varies_top_k: bool = False
    statistics: bool = True
    pdl: bool = False

    @property
    def queries(self) -> tuple[int, ...]:
        return self.q_lens or (1,) * len(self.lengths)

    @property
    def max_q(self) -> int:
        return max(self.queries)

    @property
    def ctas_q(self) -> int:
        return -(-self.max_q // self.tokens_per_cta)

    @property
    def tokens(self) -> int:
        return sum(self.queries)


CASES: dict[str, ReductionCase] = {
    "one split of one key": ReductionCase((1,), ctas_kv=1),
    "one split more than keys give work": ReductionCase((128, 129, 256, 257)),
    "lengths around the splits": ReductionCase((511, 512, 513, 100_000)),
    "requests without keys": ReductionCase((0, 300, 0)),
    "requests without keys and sinks": ReductionCase((0, 300, 0), sinks=True),
    "negative lengths": ReductionCase((-5, 300)),
    "a request without queries": ReductionCase((200, 300, 400), q_lens=(1, 0, 2)),
    "draft tokens hide the last keys": ReductionCase((129, 513, 2), q_lens=(3, 3, 3)),
    "ragged queries": ReductionCase((129, 513, 2000), q_lens=(1, 3, 2)),
    "tokens and heads in one tile": ReductionCase(
        (400, 130), q_lens=(5, 5), heads_q=32, heads_per_cta=16, tokens_per_cta=4, value_ctas=1
    ),
    "two tiles of heads": ReductionCase((700, 40), heads_q=128, head_dim=256, value_ctas=2),
    "whole heads": ReductionCase((700, 40), head_dim=512, value_ctas=1, ctas_per_tile=8),
    "more CTAs than slices": ReductionCase((700,), head_dim=64, value_ctas=1, ctas_per_tile=3),
    "one CTA a tile": ReductionCase((700,), head_dim=512, value_ctas=1, ctas_per_tile=1),
    "a tile of 128 rows": ReductionCase((700,), heads_q=128, heads_per_cta=128, tile_q=128),
    "many splits": ReductionCase((40_000, 5000), ctas_kv=37),
    "fp16": ReductionCase((700, 90, 0), partial="fp16", out="fp16"),
    "e4m3 of 8-bit probabilities": ReductionCase((700, 90, 0), partial="fp16", out="e4m3", sum_scale=448.0, sinks=True),
    "bf16 of 8-bit probabilities": ReductionCase((700, 90), sum_scale=448.0, sinks=True),
    "the scale on the device": ReductionCase((700, 90), device_scale=True),
    "no statistics": ReductionCase((700, 90), statistics=False),
    "sparse keys": ReductionCase((700, 90, 4000), top_k=256),
    "sparse keys by token": ReductionCase((700, 90, 4000), q_lens=(2, 2, 2), top_k=512, varies_top_k=True),
    "dependent launch": ReductionCase((700, 90), pdl=True),
}


@dataclass(frozen=True, slots=True)
class Partials:
    """The inputs of a case on the host, partial outputs as bits."""

    out: np.ndarray
    statistics: np.ndarray
    seq_lens: np.ndarray
    cum_q: np.ndarray | None
    sinks: np.ndarray | None
    scale: np.ndarray | None
    top_k_lens: np.ndarray | None

    def arrays(self) -> dict[str, np.ndarray | None]:
        """By the fields of the parameter struct that point to them."""
        return {
            "partial_out": self.out,
            "partial_statistics": self.statistics,
            "seq_lens": self.seq_lens,
            "cum_seq_lens_q": self.cum_q,
            "sinks": self.sinks,
            "device_softmax_scale_log2": self.scale,
            "top_k_lens": self.top_k_lens,
        }


def encode(values: np.ndarray, word: str) -> np.ndarray:
    """float values as the bits of a 2-byte type."""
    return bfloat16_bits(values) if word == "bf16" else values.astype(np.float16).view(np.uint16)


def decode(bits: np.ndarray, word: str) -> np.ndarray:
    """float64 values of the bits of an output type."""
    if word == "e4m3":
        return _E4M3[bits]
    return (bfloat16_values(bits) if word == "bf16" else bits.view(np.float16)).astype(np.float64)


def _e4m3_values() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes > 127, -values, values)


_E4M3 = _e4m3_values()


def splits_of(case: ReductionCase, partials: Partials, request: int, tile: int) -> tuple[int, int]:
    """Valid tokens of a tile, and how many splits have parts for it."""
    q_len = case.queries[request]
    tokens = min(q_len - tile * case.tokens_per_cta, case.tokens_per_cta)
    if tokens <= 0:
        return 0, 0
    keys = case.lengths[request] - q_len + tile * case.tokens_per_cta + tokens
    if partials.top_k_lens is not None:
        keys = int(partials.top_k_lens[sum(case.queries[:request]) + tile * case.tokens_per_cta])
    elif case.top_k:
        keys = min(keys, case.top_k)
    return tokens, min(-(-max(keys, 0) // TILE_KV), case.ctas_kv)


def make_partials(case: ReductionCase, rng: np.random.Generator) -> Partials:
    """Random parts; whatever no CTA would have written is NaN, and some parts saw no key."""
    heads = case.heads_q // case.heads_per_cta * case.value_ctas
    shape = (len(case.lengths), heads, case.ctas_q, case.ctas_kv, case.tile_q)
    statistics = np.full((*shape, 2), np.nan, dtype=np.float32)
    out = np.full((*shape, case.head_dim), 0x7FFF, dtype=np.uint16)  # NaN in both 2-byte types
    partials = Partials(
        out=out,
        statistics=statistics,
        seq_lens=np.asarray(case.lengths, dtype=np.int32),
        cum_q=np.cumsum((0, *case.queries), dtype=np.int32) if len(set(case.queries)) > 1 else None,
        sinks=rng.normal(0, 2, case.heads_q).astype(np.float32) if case.sinks else None,
        scale=np.asarray([case.scale * 1.7], dtype=np.float32) if case.device_scale else None,
        top_k_lens=rng.integers(0, case.top_k + 1, case.tokens).astype(np.int32) if case.varies_top_k else None,
    )
    for request, tile in np.ndindex(len(case.lengths), case.ctas_q):
        tokens, splits = splits_of(case, partials, request, tile)
        rows = tokens * case.heads_per_cta
        for head_cta in range(heads // case.value_ctas):
            one = np.empty((splits, rows, 2), dtype=np.float32)
            one[..., 0] = rng.normal(0, 30, (splits, rows))
            one[..., 1] = rng.uniform(0.5, 60, (splits, rows)) * case.sum_scale
            # Draft rows of a tile may see less than its last one: parts with nothing in them, by either mark.
            unseen = rng.random((splits, rows)) < 0.1
            one[unseen] = (-math.inf, 0.0)
            one[unseen & (rng.random((splits, rows)) < 0.5)] = (np.finfo(np.float32).min, 0.0)
            for part in range(case.value_ctas):
                place = (request, head_cta * case.value_ctas + part, tile)
                statistics[place][:splits, :rows] = one
                values = rng.normal(0, 4, (splits, rows, case.head_dim)).astype(np.float32)
                out[place][:splits, :rows] = encode(values, case.partial)
                out[place][:splits, :rows][unseen] = 0x7FFF
    return partials


def expected_of(case: ReductionCase, partials: Partials) -> tuple[np.ndarray, np.ndarray]:
    """Output [tokens, heads, dims] and statistics [tokens, heads, 2] in float64."""
    dims = case.head_dim * case.value_ctas
    out = np.zeros((case.tokens, case.heads_q, dims))
    statistics = np.zeros((case.tokens, case.heads_q, 2))
    statistics[..., 0] = -math.inf
    scale = float(partials.scale[0]) if partials.scale is not None else float(np.float32(case.scale))
    for request, tile in np.ndindex(len(case.lengths), case.ctas_q):
        tokens, splits = splits_of(case, partials, request, tile)
        first = sum(case.queries[:request]) + tile * case.tokens_per_cta
        for row, head_cta in np.ndindex(tokens * case.heads_per_cta, case.heads_q // case.heads_per_cta):
            token = first + row // case.heads_per_cta
            head = head_cta * case.heads_per_cta + row % case.heads_per_cta
            parts = partials.statistics[request, head_cta * case.value_ctas, tile, :splits, row].astype(np.float64)
            seen = np.flatnonzero(parts[:, 0] > np.finfo(np.float32).min)
            exponents = [*(parts[seen, 0] * scale)]
            sums = [*parts[seen, 1]]
            if partials.sinks is not None:
                exponents.append(float(partials.sinks[head]) * LOG2_E)
                sums.append(case.sum_scale)
            if not exponents:
                continue
            top = max(exponents)
            weights = np.exp2(np.asarray(exponents) - top)
            total = float(weights @ np.asarray(sums))
            statistics[token, head] = (top / LOG2_E, total / case.sum_scale)
            for part in range(case.value_ctas):
                bits = partials.out[request, head_cta * case.value_ctas + part, tile, seen, row]
                merged = weights[: len(seen)] @ decode(bits, case.partial)
                place = slice(part * case.head_dim, (part + 1) * case.head_dim)
                out[token, head, place] = merged * case.sum_scale / total
    return out, statistics


def reduction_of(case: ReductionCase, addresses: Mapping[str, int]) -> OperationLaunch:
    """The launch; ``addresses`` by field, what is missing is null."""
    heads = case.heads_q // case.heads_per_cta * case.value_ctas
    pointers = dict.fromkeys(
        (
            *("out", "partial_out", "partial_statistics", "softmax_statistics", "seq_lens", "cum_seq_lens_q"),
            *("top_k_lens", "sinks", "device_softmax_scale_log2"),
        ),
        0,
    )
    values: dict[str, object] = {
        **pointers,
        **addresses,
        "max_q": case.max_q,
        "ctas_q": case.ctas_q,
        "ctas_kv": case.ctas_kv,
        "ctas_per_tile": case.ctas_per_tile,
        "value_ctas": case.value_ctas,
        "heads_q": case.heads_q,
        "heads_per_cta": case.heads_per_cta,
        "tokens_per_cta": case.tokens_per_cta,
        "tile_q": case.tile_q,
        "tile_kv": TILE_KV,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim * case.value_ctas,
        "top_k": case.top_k,
        "softmax_scale_log2": case.scale,
        "sum_scale": case.sum_scale,
    }
    grid = (case.ctas_q * case.ctas_per_tile, heads, len(case.lengths))
    traits = {"dtype_partial": case.partial, "dtype_out": case.out}
    return OperationLaunch(KV_REDUCTION, traits, grid, (THREADS, 1, 1), values, case.pdl)


def lse_of(
    rows: tuple[int, int], strides: tuple[int, int], statistics: int, lse: int, *, pdl: bool = False
) -> OperationLaunch:
    """The launch of the LSE for ``rows`` (tokens, heads)."""
    number = rows[0] * rows[1]
    threads = min(1024, 1 << max(0, number - 1).bit_length())
    values: dict[str, object] = {
        "statistics": statistics,
        "lse": lse,
        "token_stride": strides[0],
        "head_stride": strides[1],
        "rows": number,
        "heads_q": rows[1],
    }
    return OperationLaunch(LSE_FROM_STATISTICS, {}, (-(-number // threads), 1, 1), (threads, 1, 1), values, pdl)


# Runs a launch over memory that it is told of, and says where arrays are.
Upload = Callable[[np.ndarray], int]
Launch = Callable[[OperationLaunch], None]


def run_reduction(
    case: ReductionCase, partials: Partials, upload: Upload, launch: Launch, download: Callable[[int, np.ndarray], None]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Output bits and statistics of one run into poisoned memory."""
    out_dtype = np.uint8 if case.out == "e4m3" else np.uint16
    out = np.full((case.tokens, case.heads_q, case.head_dim * case.value_ctas), POISON_BYTE, dtype=np.uint8)
    out = np.frombuffer(bytes([POISON_BYTE]) * (out.size * np.dtype(out_dtype).itemsize), out_dtype).reshape(out.shape)
    out = out.copy()
    statistics = np.full((case.tokens, case.heads_q, 2), np.nan, dtype=np.float32)
    addresses = {name: upload(array) for name, array in partials.arrays().items() if array is not None}
    addresses["out"] = upload(out)
    if case.statistics:
        addresses["softmax_statistics"] = upload(statistics)
    launch(reduction_of(case, addresses))
    download(addresses["out"], out)
    if not case.statistics:
        return out, None
    download(addresses["softmax_statistics"], statistics)
    return out, statistics


def assert_merged(case: ReductionCase, partials: Partials, got: tuple[np.ndarray, np.ndarray | None]) -> None:
    """Compare a run with float64."""
    bits, statistics = got
    want_out, want_statistics = expected_of(case, partials)
    out = decode(bits, case.out)
    assert np.isfinite(out).all(), "the output holds NaN or infinity"
    relative, absolute = TOLERANCES[case.out]
    # Besides the rounding of the output: float32 sums of numbers that may cancel.
    excess = np.abs(out - want_out) - relative * np.abs(want_out) - absolute - 1e-5
    assert excess.max() <= 0, f"off by {excess.max():.2e} more than allowed"
    if statistics is not None:
        assert_statistics(statistics, want_statistics)


def assert_statistics(got: np.ndarray, want: np.ndarray) -> None:
    """Maximum and sum stand for one number each: sum times e to the maximum."""
    empty = np.isneginf(want[..., 0])
    assert np.array_equal(np.isneginf(got[..., 0]), empty)
    assert not got[empty][:, 1].any()
    with np.errstate(divide="ignore"):
        got_lse, want_lse = got[..., 0] * LOG2_E + np.log2(got[..., 1]), want[..., 0] * LOG2_E + np.log2(want[..., 1])
    assert_logarithms(got_lse[~empty], want_lse[~empty])


def assert_logarithms(got: np.ndarray, want: np.ndarray) -> None:
    """Exponents go through a few roundings of float32, and so does what is subtracted from them."""
    assert (np.abs(got - want) <= STATISTICS_TOLERANCE + 4 * 2.0**-24 * np.abs(want)).all()


def random_case(rng: np.random.Generator) -> ReductionCase:
    """A case drawn from everything that the kernel takes."""
    batch = int(rng.integers(1, 6))
    tile_q = int(rng.choice([64, 128]))
    heads_per_cta = int(rng.choice([h for h in (8, 16, 32, 64, 128) if h <= tile_q]))
    tokens_per_cta = int(rng.choice([1, tile_q // heads_per_cta]))
    head_dim = int(rng.choice([64, 128, 256, 512]))
    longest_q = int(rng.integers(1, 6))
    q_lens = tuple(int(q) for q in rng.integers(0, longest_q + 1, batch)) if rng.random() < 0.5 else ()
    if not any(q_lens):
        q_lens = (longest_q,) * batch
    partial, out = [("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "e4m3")][int(rng.integers(3))]
    top_k = int(rng.choice([0, 0, 256, 640]))
    return ReductionCase(
        lengths=tuple(int(n) for n in rng.choice([0, 1, 127, 128, 129, 400, 1000, 9000], batch)),
        q_lens=q_lens,
        heads_q=heads_per_cta * int(rng.integers(1, 3)),
        heads_per_cta=heads_per_cta,
        tokens_per_cta=tokens_per_cta,
        ctas_kv=int(rng.integers(1, 20)),
        tile_q=tile_q,
        head_dim=head_dim,
        value_ctas=int(rng.choice([n for n in (1, 2, 4) if n * head_dim <= 512])),
        ctas_per_tile=int(rng.integers(1, 10)),
        partial=partial,
        out=out,
        scale=float(rng.choice([0.02, 0.1, 1.0])),
        sum_scale=float(rng.choice([1.0, 448.0])),
        sinks=bool(rng.integers(2)),
        device_scale=bool(rng.integers(2)),
        top_k=top_k,
        varies_top_k=bool(top_k and rng.integers(2)),
        statistics=bool(rng.integers(2)),
        pdl=bool(rng.integers(2)),
    )


def lse_case(rows: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Statistics [tokens, heads, 2] with rows that saw nothing, and the LSE in float64."""
    statistics = np.empty((*rows, 2), dtype=np.float32)
    statistics[..., 0] = rng.normal(0, 20, rows)
    statistics[..., 1] = rng.uniform(1, 5000, rows)
    unseen = rng.random(rows) < 0.2
    statistics[unseen] = (-math.inf, 0.0)
    statistics[unseen & (rng.random(rows) < 0.3)] = (3.0, 0.0)
    want: Any = np.full(rows, -math.inf)
    exact = statistics[~unseen].astype(np.float64)
    want[~unseen] = exact[:, 0] * LOG2_E + np.log2(exact[:, 1])
    return statistics, want


def assert_lse(got: np.ndarray, want: np.ndarray) -> None:
    """Compare an LSE with float64."""
    empty = np.isneginf(want)
    assert np.array_equal(np.isneginf(got), empty)
    assert_logarithms(got[~empty], want[~empty])
