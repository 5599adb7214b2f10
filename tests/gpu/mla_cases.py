"""MLA decode with every option: what a case is, and its tensors on the host. No torch, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cubin_runtime.attention.reference import mla_decode_reference
from tests.gpu.decode_compare import score_error
from tests.gpu.decode_masks import mask_words, visible_keys
from tests.gpu.decode_queries import Queries
from tests.gpu.decode_values import KINDS, normal_bits, values_of

GAP = 64  # columns between rows of the cache where they are strided


@dataclass(frozen=True, slots=True)
class MlaCase(Queries):
    """Sizes and options of one MLA decode; fields that ``DecodeCase`` has too mean the same.

    ``strided`` puts gaps between tokens of q and out and between rows of the cache; ``nested`` gives the cache its
    dimension of one head. ``separate_values``: they do not lie in their keys. ``separate_rope``: rope columns of
    queries do not lie behind their latent ones. ``portable``: by the kernel that is built for several SMs, not by one
    for this SM alone.
    """

    lengths: tuple[int, ...]
    max_seq_len: int
    heads: int = 16
    latent: int = 512
    rope: int = 64
    page_size: int = 64
    kv_dtype: str = "bf16"
    q_dtype: str = "bf16"
    out_dtype: str = "bf16"
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None
    max_q_len: int | None = None
    spare_tokens: int = 0
    mask: str = "none"
    mask_itemsize: int = 2
    sinks: bool = False
    scale: float = 192**-0.5
    output_scale: float = 1.0
    device_scales: bool = False
    with_lse: bool = True
    batch_invariant: bool = False
    pdl: bool = False
    strided: bool = False
    nested: bool = False
    flat_q: bool = True
    unsigned: bool = False
    portable: bool = False
    separate_values: bool = False
    separate_rope: bool = False
    spare_columns: int = 0
    spare_pages: int = 3

    @property
    def width(self) -> int:
        return self.latent + self.rope

    @property
    def q_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        """Columns of the output, which bounds on its error count."""
        return self.latent

    @property
    def q_type(self) -> str:
        return self.q_dtype

    @property
    def out_type(self) -> str:
        return self.out_dtype

    @property
    def softmax_scale(self) -> float:
        return self.scale

    @property
    def of_scores(self) -> float:
        """What scores may be off by beyond rounding: e4m3 queries and keys are multiplied as they are."""
        as_they_are = self.q_dtype == self.kv_dtype == "e4m3"
        return score_error(self.width, self.scale) if as_they_are else 0.0


@dataclass(frozen=True, slots=True)
class MlaRequest:
    """One request's own content, bits: q ``[q_len, heads, width]``, kv ``[kv_len, width]``, mask words.

    ``separate``: values ``[kv_len, latent]`` that do not lie in their keys.
    """

    q: np.ndarray
    kv: np.ndarray
    mask: np.ndarray | None
    separate: np.ndarray | None = None

    @property
    def kv_len(self) -> int:
        return len(self.kv)


@dataclass(frozen=True, slots=True)
class MlaHost:
    """A case on the host; ``pool`` is the memory of the cache ``[pages, page_size, columns]``, gaps and all.

    ``value_pool`` is that of values in memory of their own.
    """

    requests: tuple[MlaRequest, ...]
    q: np.ndarray
    pool: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    q_cu_seq_lens: np.ndarray | None
    mask: np.ndarray | None
    sinks: np.ndarray | None
    kv_scales: None = None  # MLA decode has none
    value_pool: np.ndarray | None = None


def mla_request(case: MlaCase, rng: np.random.Generator, kv_len: int, q_len: int) -> MlaRequest:
    """Random content; q and KV normal."""
    return MlaRequest(
        q=normal_bits(case.q_dtype, rng, (q_len, case.heads, case.width)),
        kv=normal_bits(case.kv_dtype, rng, (kv_len, case.width)),
        mask=mask_words(case.mask, rng, q_len),
        separate=normal_bits(case.kv_dtype, rng, (kv_len, case.latent)) if case.separate_values else None,
    )


def values_of_keys(case: MlaCase, request: MlaRequest) -> np.ndarray:
    """The values ``[kv_len, latent]`` of a request."""
    return values_of(case.kv_dtype, request.kv[:, : case.latent] if request.separate is None else request.separate)


def mla_sinks(case: MlaCase, rng: np.random.Generator) -> np.ndarray | None:
    return (2 * rng.standard_normal(case.heads)).astype(np.float32) if case.sinks else None


def mla_host(case: MlaCase, rng: np.random.Generator) -> MlaHost:
    """Random requests, assembled."""
    requests = [mla_request(case, rng, *lens) for lens in zip(case.lengths, case.query_lens, strict=True)]
    return assemble_mla(case, requests, rng, mla_sinks(case, rng))


def assemble_mla(
    case: MlaCase,
    requests: Sequence[MlaRequest],
    rng: np.random.Generator,
    sinks: np.ndarray | None = None,
    pages: int | None = None,
) -> MlaHost:
    """Requests in one paged cache of ``pages`` (None: those needed and the spare ones), in a random permutation.

    Cache rows past a length, unused pages and gaps are NaN; table entries past a length are -1. A request that comes
    twice shares its pages.
    """
    distinct = {id(request): request for request in requests}.values()
    used = [-(-len(request.kv) // case.page_size) for request in distinct]
    pages = max(1, sum(used) + case.spare_pages if pages is None else pages)
    kind = KINDS[case.kv_dtype]
    gap = GAP * case.strided
    pool = np.full((pages, case.page_size, case.width + gap), kind.nan, kind.bits)
    value_pool = np.full((pages, case.page_size, case.latent + gap), kind.nan, kind.bits)
    columns = max(1, -(-case.max_seq_len // case.page_size)) + case.spare_columns
    table = np.full((len(requests), columns), -1, dtype=np.int32)
    order, taken = rng.permutation(pages).astype(np.int32), 0
    for request, count in zip(distinct, used, strict=True):
        own = order[taken : taken + count]
        taken += count
        for memory, rows in ((pool, request.kv), (value_pool, request.separate)):
            if rows is not None:
                padded = np.full((count * case.page_size, rows.shape[1]), kind.nan, kind.bits)
                padded[: len(rows)] = rows
                memory[own, :, : rows.shape[1]] = padded.reshape(count, case.page_size, rows.shape[1])
        for b in (b for b, other in enumerate(requests) if other is request):
            table[b, :count] = own
    words = np.uint32 if case.unsigned else np.int32
    q_lens = [len(request.q) for request in requests]
    masks = [request.mask for request in requests if request.mask is not None]
    spare = case.tokens - sum(q_lens)
    q_kind = KINDS[case.q_dtype]
    return MlaHost(
        requests=tuple(requests),
        q=np.concatenate([*(r.q for r in requests), np.full((spare, case.heads, case.width), q_kind.nan, q_kind.bits)]),
        pool=pool,
        page_table=table,
        seq_lens=np.array([len(request.kv) for request in requests], dtype=words),
        q_cu_seq_lens=None if case.q_lens is None else np.cumsum([0, *q_lens]).astype(words),
        mask=np.concatenate([*masks, np.zeros(spare, np.uint64)]) if case.mask != "none" else None,
        sinks=sinks,
        value_pool=value_pool if case.separate_values else None,
    )


def mla_reference_of(case: MlaCase, host: MlaHost) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE in float64 for the tokens that requests own, from the requests' content: one page each."""
    distinct = list({id(request): request for request in host.requests}.values())
    place = {id(request): i for i, request in enumerate(distinct)}
    longest = max(1, *(len(request.kv) for request in distinct))
    cache = np.zeros((len(distinct), longest, case.width), np.float32)
    values = np.zeros((len(distinct), longest, case.latent), np.float32)
    for own, own_values, request in zip(cache, values, distinct, strict=True):
        own[: len(request.kv)] = values_of(case.kv_dtype, request.kv)
        own_values[: len(request.kv)] = values_of_keys(case, request)
    tokens = sum(len(request.q) for request in host.requests)
    return mla_decode_reference(
        values_of(case.q_dtype, host.q[:tokens]),
        cache,
        np.array([[place[id(request)]] for request in host.requests]),
        host.seq_lens.astype(np.int32),
        case.scale,
        latent=case.latent,
        output_scale=case.output_scale,
        q_cu_seq_lens=None if host.q_cu_seq_lens is None else host.q_cu_seq_lens.astype(np.int32),
        mask=None if host.mask is None else host.mask[:tokens],
        sinks=host.sinks,
        v_cache=values,
    )


def mla_means(case: MlaCase, rng: np.random.Generator) -> MlaHost:
    """Requests whose queries are zero: every visible key weighs the same, so the output is the mean of its values."""
    requests = [mla_request(case, rng, *lens) for lens in zip(case.lengths, case.query_lens, strict=True)]
    zeroed = [replace(request, q=np.zeros_like(request.q)) for request in requests]
    return assemble_mla(case, zeroed, rng, mla_sinks(case, rng))


def mla_means_of(case: MlaCase, host: MlaHost) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What must come out of ``mla_means``: output ``[tokens, heads, latent]`` and LSE in base 2, float64.

    Behind them by how much the output may be off, since the parts of a request are fp16 on their way to each other.
    """
    sinks = np.zeros(case.heads) if host.sinks is None else np.exp(host.sinks.astype(np.float64))
    outs, lses, errors = [], [], []
    for request in host.requests:
        seen = visible_keys(len(request.kv), len(request.q), request.mask).astype(np.float64)
        values = values_of_keys(case, request).astype(np.float64)
        weight = seen.sum(axis=1)[:, None] + sinks
        share = np.divide(case.output_scale, weight, out=np.zeros_like(weight), where=weight > 0)
        outs.append((seen @ values)[:, None] * share[..., None])
        errors.append((seen @ np.abs(values))[:, None] * np.abs(share[..., None]) * KINDS["fp16"].roundoff)
        with np.errstate(divide="ignore"):
            lses.append(np.log2(weight))
    return np.concatenate(outs), np.concatenate(lses), np.concatenate(errors)
