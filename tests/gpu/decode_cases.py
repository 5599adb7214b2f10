"""Paged decode with every option: what a case is, and its tensors on the host. No torch, no device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cubin_runtime.attention.reference import paged_decode_reference
from tests.gpu.decode_masks import keys_before_windows, mask_words
from tests.gpu.decode_queries import Queries
from tests.gpu.decode_values import KINDS, normal_bits, values_of
from tests.gpu.kv_scales import Scales, draw_kv_scales


@dataclass(frozen=True, slots=True)
class DecodeCase(Queries):
    """Sizes and options of one decode.

    ``lengths`` are the keys of each request. ``q_len`` query tokens per request; ``q_lens`` makes them ragged, of bound
    ``max_q_len`` (None: the largest), with ``spare_tokens`` rows in q that no request owns. ``rows`` asks for the
    kernel that takes so many rows at once, where there is one, and ``clusters`` for a cluster per output tile, or
    for none, where there is such a grid. ``spare_pages`` lie unused in the pool.
    ``separate``: values have pages of their own. ``kv_scales`` is the form of the scales of keys and values.
    ``whole_pages``: a page holds a request, and its size follows from the bound.
    """

    lengths: tuple[int, ...]
    max_seq_len: int
    kv_heads: int = 2
    group: int = 8
    page_size: int = 64
    head_dim: int = 128
    kv_dtype: str = "bf16"
    q_dtype: str = ""
    out_dtype: str = ""
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None
    max_q_len: int | None = None
    spare_tokens: int = 0
    mask: str = "none"
    mask_itemsize: int = 2
    sinks: bool = False
    window_left: int = -1
    draft_position: str = "depth"
    scale: float | None = None
    output_scale: float = 1.0
    device_scales: bool = False
    kv_scales: str = ""
    with_lse: bool = True
    batch_invariant: bool = False
    pdl: bool = False
    kv_layout: str = "NHD"
    combined: bool = True
    separate: bool = False
    whole_pages: bool = False
    strided: bool = False
    flat_q: bool = True
    unsigned: bool = False
    spare_columns: int = 0
    spare_pages: int = 3
    rows: int | None = None
    clusters: bool | None = None

    def __post_init__(self) -> None:
        if self.whole_pages:
            object.__setattr__(self, "page_size", max(1, self.max_seq_len) + len(self.lengths) % 2)
            object.__setattr__(self, "spare_columns", 0)

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def q_type(self) -> str:
        """Of q: as the KV cache where the case names none."""
        return self.q_dtype or self.kv_dtype

    @property
    def out_type(self) -> str:
        """Of the output: as q, bf16 where that is e4m3, where the case names none."""
        return self.out_dtype or ("bf16" if self.q_type == "e4m3" else self.q_type)

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def by_index(self) -> bool:
        """Whether windows count from a query token's index."""
        return self.draft_position == "index"

    @property
    def q_shape(self) -> tuple[int, ...]:
        """As the caller passes it."""
        return (*self.lead, self.q_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Request:
    """One request's own content, bits: q ``[q_len, q_heads, D]``, k and v ``[kv_len, kv_heads, D]``, mask words."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None

    @property
    def kv_len(self) -> int:
        return len(self.k)


@dataclass(frozen=True, slots=True)
class HostTensors:
    """A case on the host: q ``[tokens, q_heads, D]``; ``k`` and ``v`` are ``[pages, page_size, kv_heads, D]`` views.

    ``pool`` is the memory below the views: one combined tensor, or K's and V's in the caller's layout.
    """

    requests: tuple[Request, ...]
    q: np.ndarray
    pool: tuple[np.ndarray, ...]
    k: np.ndarray
    v: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    q_cu_seq_lens: np.ndarray | None
    mask: np.ndarray | None
    sinks: np.ndarray | None
    kv_scales: Scales | None = None


def make_request(case: DecodeCase, rng: np.random.Generator, kv_len: int, q_len: int) -> Request:
    """Random content; q and KV normal."""
    kv = (kv_len, case.kv_heads, case.head_dim)
    return Request(
        q=normal_bits(case.q_type, rng, (q_len, case.q_heads, case.head_dim)),
        k=normal_bits(case.kv_dtype, rng, kv),
        v=normal_bits(case.kv_dtype, rng, kv),
        mask=mask_words(case.mask, rng, q_len),
    )


def make_sinks(case: DecodeCase, rng: np.random.Generator) -> np.ndarray | None:
    return (2 * rng.standard_normal(case.q_heads)).astype(np.float32) if case.sinks else None


def make_host(case: DecodeCase, rng: np.random.Generator) -> HostTensors:
    """Random requests, assembled."""
    requests = [make_request(case, rng, *lens) for lens in zip(case.lengths, case.query_lens, strict=True)]
    host = assemble(case, requests, rng, make_sinks(case, rng))
    return replace(host, kv_scales=draw_kv_scales(case.kv_scales, case.batch, case.kv_heads, rng))


def assemble(
    case: DecodeCase,
    requests: Sequence[Request],
    rng: np.random.Generator,
    sinks: np.ndarray | None = None,
    pages: int | None = None,
) -> HostTensors:
    """Requests in one paged cache of ``pages`` (None: those needed and the spare ones), in a random permutation.

    Whatever no row may see is NaN: cache rows past a length, unused pages, pages before every row's window, whose
    table entries are -1 like those past a length. A request that comes twice shares its pages.
    """
    distinct = {id(request): request for request in requests}.values()
    used = [-(-len(request.k) // case.page_size) for request in distinct]
    pages = sum(used) + case.spare_pages if pages is None else pages
    pool, k, v = _empty_cache(case, max(1, pages))
    columns = max(1, -(-case.max_seq_len // case.page_size)) + case.spare_columns
    tables = 2 if case.separate else 1
    table = np.full((len(requests), tables, columns), -1, dtype=np.int32)
    orders = np.array([rng.permutation(pages).astype(np.int32) for _ in range(tables)])
    taken = 0
    for request, count in zip(distinct, used, strict=True):
        own = orders[:, taken : taken + count]
        taken += count
        hidden = keys_before_windows(len(request.k), len(request.q), request.mask, case.window_left, case.by_index)
        freed = hidden // case.page_size if hidden < len(request.k) else count
        for cache, content, at in ((k, request.k, own[0]), (v, request.v, own[-1])):
            padded = np.full((count * case.page_size, *content.shape[1:]), KINDS[case.kv_dtype].nan, content.dtype)
            padded[: len(content)] = content
            cache[at[freed:]] = padded.reshape(count, case.page_size, *content.shape[1:])[freed:]
        for b in (b for b, other in enumerate(requests) if other is request):
            table[b, :, freed:count] = own[:, freed:]
    words = np.uint32 if case.unsigned else np.int32
    q_lens = [len(request.q) for request in requests]
    masks = [request.mask for request in requests if request.mask is not None]
    spare = case.tokens - sum(q_lens)
    spare_q = np.full((spare, case.q_heads, case.head_dim), KINDS[case.q_type].nan, KINDS[case.q_type].bits)
    return HostTensors(
        requests=tuple(requests),
        q=np.concatenate([*(request.q for request in requests), spare_q]),
        pool=pool,
        k=k,
        v=v,
        page_table=table if case.separate else table[:, 0],
        seq_lens=np.array([len(request.k) for request in requests], dtype=words),
        q_cu_seq_lens=None if case.q_lens is None else np.cumsum([0, *q_lens]).astype(words),
        mask=np.concatenate([*masks, np.zeros(spare, np.uint64)]) if case.mask != "none" else None,
        sinks=sinks,
    )


def _empty_cache(case: DecodeCase, pages: int) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    kind = KINDS[case.kv_dtype]
    inner = (case.page_size, case.kv_heads) if case.kv_layout == "NHD" else (case.kv_heads, case.page_size)
    shape = (pages, 2, *inner, case.head_dim) if case.combined else (pages, *inner, case.head_dim)
    pool = tuple(np.full(shape, kind.nan, kind.bits) for _ in range(1 if case.combined else 2))
    k, v = (pool[0][:, 0], pool[0][:, 1]) if case.combined else pool
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return pool, k, v


def reference_of(case: DecodeCase, host: HostTensors) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE in float64 for the tokens that requests own, from the requests' content: one page each."""
    distinct = list({id(request): request for request in host.requests}.values())
    place = {id(request): i for i, request in enumerate(distinct)}
    longest = max(1, *(len(request.k) for request in distinct))
    caches = []
    for name in ("k", "v"):
        cache = np.zeros((len(distinct), longest, case.kv_heads, case.head_dim), np.float32)
        for own, request in zip(cache, distinct, strict=True):
            own[: len(request.k)] = values_of(case.kv_dtype, getattr(request, name))
        caches.append(cache)
    tokens = sum(len(request.q) for request in host.requests)
    k_scale, v_scale = host.kv_scales or (1.0, 1.0)
    return paged_decode_reference(
        values_of(case.q_type, host.q[:tokens]),
        *caches,
        np.array([[place[id(request)]] for request in host.requests]),
        host.seq_lens.astype(np.int32),
        case.softmax_scale,
        output_scale=case.output_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        q_cu_seq_lens=None if host.q_cu_seq_lens is None else host.q_cu_seq_lens.astype(np.int32),
        mask=None if host.mask is None else host.mask[:tokens],
        sinks=host.sinks,
        window_left=case.window_left,
        draft_position=case.draft_position,
    )


def edge_lengths(page_size: int, max_seq_len: int) -> tuple[int, ...]:
    """0, 1, and around pages and tiles, within the bound."""
    edges = (0, 1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 127, 129, max_seq_len - 1, max_seq_len)
    return tuple(sorted({min(max(0, edge), max_seq_len) for edge in edges}))
