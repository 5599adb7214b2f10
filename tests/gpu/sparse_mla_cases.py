"""Sparse MLA decode with every option: what a case is, and its tensors on the host. No torch, no device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.gpu.decode_values import KINDS, normal_bits, values_of

LATENT, BLOCK = 512, 128
# Form of a row -> columns, and bytes.
FORMS = {"scaled_e4m3": (576, 656), "bf16": (576, 1152), "bf16_nope": (512, 1024)}
HOLES = ("none", "tail", "random", "most", "all", "first tiles")


@dataclass(frozen=True, slots=True)
class SparseMlaCase:
    """Sizes and options of one sparse MLA decode.

    ``lens`` are the lengths of the lists; None: all entries count. ``holes`` says where entries are negative;
    ``outside``: some are slots behind the cache. ``spread`` is the range of the rows' scales as a base-2 exponent,
    ``blind`` makes queries see rope columns alone. ``page_size`` rows of a page have ``page_gap`` rows' room behind
    them. ``view`` is how the caller passes the cache.
    """

    tokens: int = 5
    heads: int = 16
    width: int = 300
    cache: str = "scaled_e4m3"
    lens: tuple[int, ...] | None = None
    holes: str = "none"
    outside: bool = False
    pool: int = 4096
    page_size: int = 64
    page_gap: int = 0
    view: str = "pages"
    byte_dtype: str = "uint8"
    out_dtype: str = "bf16"
    spread: int = 2
    blind: bool = False
    sinks: bool = False
    scale: float = 192**-0.5
    output_scale: float = 1.0
    device_scales: bool = False
    with_lse: bool = True
    lse_base: str = "2"
    lse_sink: bool = True
    batch_invariant: bool = False
    pdl: bool = False
    strided: bool = False

    @property
    def columns(self) -> int:
        return FORMS[self.cache][0]

    @property
    def row_bytes(self) -> int:
        return FORMS[self.cache][1]

    # What views of queries and outputs are made by; see ``decode_queries``.
    @property
    def q_heads(self) -> int:
        return self.heads

    @property
    def q_type(self) -> str:
        return "bf16"

    @property
    def q_len(self) -> int:
        return 1

    @property
    def lead(self) -> tuple[int, ...]:
        return (self.tokens,)

    @property
    def out_type(self) -> str:
        return self.out_dtype


@dataclass(frozen=True, slots=True)
class SparseMlaHost:
    """A case on the host: ``memory`` holds the cache, bytes ``[pages, page_size + page_gap, row bytes]``."""

    q: np.ndarray
    memory: np.ndarray
    indices: np.ndarray
    lens: np.ndarray | None
    sinks: np.ndarray | None


def sparse_mla_host(case: SparseMlaCase, rng: np.random.Generator) -> SparseMlaHost:
    """Random content: rows that no list names, and gaps, are NaN."""
    q = normal_bits("bf16", rng, (case.tokens, case.heads, case.columns))
    if case.blind:
        q[..., :LATENT] = 0
    lens = None if case.lens is None else np.asarray(case.lens, np.int32)
    indices = random_lists(case, rng)
    pages = -(-case.pool // case.page_size)
    memory = np.full((pages, case.page_size + case.page_gap, case.row_bytes), 0xFF, np.uint8)
    named = np.unique(np.concatenate(list(listed(case, indices, lens)) or [np.zeros(0, np.int64)]))
    memory[named // case.page_size, named % case.page_size] = random_rows(case, rng, len(named))
    sinks = (2 * rng.standard_normal(case.heads)).astype(np.float32) if case.sinks else None
    return SparseMlaHost(q, memory, indices, lens, sinks)


def rows_of_pool(case: SparseMlaCase) -> int:
    return -(-case.pool // case.page_size) * case.page_size


def random_lists(case: SparseMlaCase, rng: np.random.Generator) -> np.ndarray:
    """Slots in random order, some of them twice, with the holes that the case asks for."""
    shape = (case.tokens, case.width)
    lists = rng.integers(0, rows_of_pool(case), shape).astype(np.int32)
    position = np.arange(case.width)[None]
    hole = {
        "none": np.zeros(shape, bool),
        "tail": position >= rng.integers(0, case.width + 1, (case.tokens, 1)),
        "random": rng.random(shape) < 0.3,
        "most": rng.random(shape) < 7 / 8,
        "all": np.ones(shape, bool),
        "first tiles": np.broadcast_to(position < 2 * case.width // 3, shape),
    }[case.holes]
    lists[hole] = rng.choice(np.array([-1, -1, -7, -(2**31)], np.int32), shape)[hole]
    if case.outside:
        beyond = rng.random(shape) < 0.1
        lists[beyond] = rng.choice(np.array([rows_of_pool(case), 2**31 - 1], np.int32), shape)[beyond]
        lists[0, 0] = rows_of_pool(case)
    return lists


def listed(case: SparseMlaCase, indices: np.ndarray, lens: np.ndarray | None) -> list[np.ndarray]:
    """The slots that each query token attends to, in order."""
    found = []
    for token, slots in enumerate(indices):
        count = case.width if lens is None else min(max(int(lens[token]), 0), case.width)
        own = slots[:count].astype(np.int64)
        found.append(own[(own >= 0) & (own < rows_of_pool(case))])
    return found


def random_rows(case: SparseMlaCase, rng: np.random.Generator, count: int) -> np.ndarray:
    """Rows as bytes."""
    if case.cache != "scaled_e4m3":
        return normal_bits("bf16", rng, (count, case.columns)).view(np.uint8)
    scales = np.exp2(rng.uniform(-case.spread, case.spread, (count, LATENT // BLOCK))).astype(np.float32)
    return np.concatenate(
        [
            normal_bits("e4m3", rng, (count, LATENT)),
            scales.view(np.uint8),
            normal_bits("bf16", rng, (count, case.columns - LATENT)).view(np.uint8),
        ],
        axis=1,
    )


def row_values(case: SparseMlaCase, rows: np.ndarray) -> np.ndarray:
    """The values of rows of bytes, float64 ``[rows, columns]``."""
    rows = np.ascontiguousarray(rows)
    if case.cache != "scaled_e4m3":
        return values_of("bf16", rows.view(np.uint16)).astype(np.float64)
    blocks = LATENT // BLOCK
    scales = np.ascontiguousarray(rows[:, LATENT : LATENT + 4 * blocks]).view(np.float32).astype(np.float64)
    latent = values_of("e4m3", rows[:, :LATENT]).astype(np.float64) * np.repeat(scales, BLOCK, axis=1)
    rope = values_of("bf16", np.ascontiguousarray(rows[:, LATENT + 4 * blocks :]).view(np.uint16))
    return np.concatenate([latent, rope], axis=1)


def sparse_mla_reference(case: SparseMlaCase, host: SparseMlaHost) -> tuple[np.ndarray, np.ndarray]:
    """Output ``[tokens, heads, 512]`` and log-sum-exp ``[tokens, heads]`` in float64."""
    out = np.zeros((case.tokens, case.heads, LATENT))
    lse = np.full((case.tokens, case.heads), -np.inf)
    q = values_of("bf16", host.q).astype(np.float64)
    sinks = np.full(case.heads, -np.inf) if host.sinks is None else host.sinks.astype(np.float64)
    for token, slots in enumerate(listed(case, host.indices, host.lens)):
        keys = row_values(case, host.memory[slots // case.page_size, slots % case.page_size])
        scores = q[token] @ keys.T * case.scale
        top = np.maximum(scores.max(axis=1, initial=-np.inf), sinks)
        top = np.where(np.isneginf(top), 0.0, top)
        weights = np.exp(scores - top[:, None])
        seen, with_sink = weights.sum(axis=1), weights.sum(axis=1) + np.exp(sinks - top)
        if len(slots):
            out[token] = weights @ keys[:, :LATENT] / with_sink[:, None] * case.output_scale
        with np.errstate(divide="ignore"):
            lse[token] = np.log(with_sink if case.lse_sink else seen) + top
    return out, lse if case.lse_base == "e" else lse / np.log(2)


def score_rounding(case: SparseMlaCase, host: SparseMlaHost) -> float:
    """The most that scores, base-2 exponents, change by the rounding of scales, which multiply converted keys in fp16.

    Kernels for more than 32 heads do so. Each block's part of a score has the relative error of two roundings.
    """
    if case.cache != "scaled_e4m3" or case.heads <= 32:
        return 0.0
    q, largest = values_of("bf16", host.q).astype(np.float64)[..., :LATENT], 0.0
    for token, slots in enumerate(listed(case, host.indices, host.lens)):
        keys = row_values(case, host.memory[slots // case.page_size, slots % case.page_size])[:, :LATENT]
        queries, keys = (m.reshape(len(m), LATENT // BLOCK, BLOCK).transpose(1, 0, 2) for m in (q[token], keys))
        parts = np.abs(queries @ keys.transpose(0, 2, 1)).sum(axis=0)
        largest = max(largest, float(parts.max(initial=0.0)))
    return largest * abs(case.scale) / np.log(2) * 2.0**-11


def random_sparse_mla_case(rng: np.random.Generator) -> SparseMlaCase:
    """A case with each option drawn on its own, so that pairs of options meet."""

    def one(*values):
        return values[int(rng.integers(len(values)))]

    tokens, width = int(rng.integers(1, 9)), int(one(1, 2, 63, 64, 65, 128, 200, 513, 1024, 2048))
    edges = sorted({0, 1, min(63, width), min(64, width), min(65, width), width // 2, width})
    case = SparseMlaCase(
        tokens=tokens,
        heads=int(one(1, 2, 3, 7, 8, 12, 16, 17, 24, 32, 48, 64, 128)),
        width=width,
        cache=one(*FORMS),
        lens=one(None, tuple(int(rng.choice(edges)) for _ in range(tokens))),
        holes=one(*HOLES, "none", "random"),
        page_size=int(one(1, 32, 64, 128)),
        page_gap=int(one(0, 0, 3)),
        view=one("pages", "one head after", "one head before"),
        byte_dtype=one("uint8", "float8_e4m3fn"),
        out_dtype=one("bf16", "fp16", "e4m3"),
        sinks=bool(rng.integers(2)),
        device_scales=bool(rng.integers(2)),
        output_scale=float(one(1.0, 1.0, -1.7)),
        with_lse=bool(rng.integers(4)),
        lse_base=one("2", "e"),
        lse_sink=bool(rng.integers(2)),
        batch_invariant=bool(rng.integers(2)),
        pdl=bool(rng.integers(2)),
        strided=bool(rng.integers(2)),
    )
    return replace(case, view="rows") if case.page_gap == 0 and rng.integers(4) == 0 else case


def out_kind(case: SparseMlaCase) -> str:
    return KINDS[case.out_dtype].view
