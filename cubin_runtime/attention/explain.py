"""Explains what a call of given sizes launches on native kernels, and why; needs no tensors, device or driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..artifacts.tables.native_kernels import NativeKernel
from ..dtypes import DTYPES
from ..errors import UsageError
from ..kernels.explanation import Explanation
from ..kernels.native.append.select import AppendShape, select_append
from ..kernels.native.constants import CONSTANTS
from ..kernels.native.decode.select import select_decode
from ..kernels.native.decode.shape import MAX_QUERIES, DecodeShape
from ..kernels.native.draft_mask.select import DraftMaskShape, select_draft_mask
from ..kernels.native.explanation import explain_launches
from ..kernels.native.merge.select import MergeShape, select_merge
from ..kernels.native.mla.select import MAX_HEADS, MlaShape, select_mla_decode
from ..kernels.native.mla.select import MAX_QUERIES as MAX_MLA_QUERIES
from ..kernels.native.mla.select import PAGE_SIZES as MLA_PAGE_SIZES
from ..kernels.native.prefill.select import HEAD_DIMS as CONTEXT_HEAD_DIMS
from ..kernels.native.prefill.select import MAX_GROUP as MAX_CONTEXT_GROUP
from ..kernels.native.prefill.select import VALUE_DIMS, ContextShape, select_context_attention
from ..kernels.native.selection import Selection
from ..kernels.native.sparse_mla.select import MAX_WIDTH, SparseMlaShape, select_sparse_mla
from ..launch.driver import DeviceFacts
from ..values import dataclass
from .backends import NATIVE
from .latent_cache import Q_DTYPES as MLA_Q_DTYPES
from .latent_cache import ROPE
from .operators.context_attention import Q_DTYPES as CONTEXT_Q_DTYPES
from .paged_cache import MAX_GROUP, PAGE_SIZES, Q_DTYPES

OUT_DTYPES = ("bf16", "fp16", "e4m3")
_MOST = (1 << 31) - 1
# Columns of a row of an MLA cache -> the latent ones of them; any other head dimension is paged decode's.
_LATENTS = {latent + ROPE: latent for latent in (512, 256)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """The sizes, types and options of a call; None is the operator's default.

    ``operation`` is decode, context, sparse_mla, append, merge or draft_mask. ``q_len`` and ``kv_len`` are bounds on
    the lengths; of sparse_mla, ``kv_len`` are the entries of a list. ``tokens``, the query (or new) tokens of all
    requests, is given where query lengths differ. ``head_dim`` is that of Q and K, 576 or 320 for MLA. Types are bf16,
    fp16 or e4m3. ``window`` counts visible tokens, 0 for all. ``soft_cap``: context attention with a logit soft cap.
    ``pdl``: programmatic dependent launch.
    """

    operation: str = "decode"
    batch: int = 1
    q_len: int = 1
    kv_len: int = 1024
    tokens: int | None = None
    heads_q: int = 32
    heads_kv: int | None = None
    head_dim: int = 128
    head_dim_v: int | None = None
    page: int = 32
    dtype_q: str | None = None
    dtype_kv: str = "bf16"
    dtype_out: str | None = None
    window: int = 0
    batch_invariant: bool = False
    soft_cap: bool = False
    pdl: bool = False

    def check(self, max_q_len: int, max_heads: int, page_sizes: Sequence[int]) -> None:
        """Check what all operators have against their bounds.

        Raises:
            UsageError: the message begins with ``name=value``.
        """
        bounds = {"batch": _MOST, "q_len": max_q_len, "kv_len": _MOST, "heads_q": max_heads, "head_dim": _MOST}
        for name, most in bounds.items():
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name}={getattr(self, name)}: expected 1 to {most}")
        if self.page not in page_sizes:
            raise UsageError(f"page={self.page}: expected one of {', '.join(map(str, page_sizes))}")
        if self.tokens is not None and not 0 <= self.tokens <= self.batch * self.q_len:
            raise UsageError(f"tokens={self.tokens}: expected 0 to batch x q_len, {self.batch * self.q_len}")

    def query_dtype(self, q_dtypes: Mapping[str, Sequence[str]]) -> str:
        """The type of the queries: as given, or the first of those that ``q_dtypes`` has for the cache's.

        Raises:
            UsageError: a type is not supported; the message begins with ``name=value``.
        """
        by_cache = {DTYPES[kv].short: [DTYPES[q].short for q in taken] for kv, taken in q_dtypes.items()}
        q_types = by_cache.get(self.dtype_kv)
        if q_types is None:
            raise UsageError(f"dtype_kv={self.dtype_kv!r}: expected one of {', '.join(by_cache)}")
        dtype = self.dtype_q or q_types[0]
        if dtype not in q_types:
            raise UsageError(f"dtype_q={self.dtype_q!r}: expected {' or '.join(q_types)} with dtype_kv={self.dtype_kv}")
        if (self.dtype_out or dtype) not in OUT_DTYPES:
            raise UsageError(f"dtype_out={self.dtype_out!r}: expected one of {', '.join(OUT_DTYPES)}")
        return dtype


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation of an operator: which calls are its own, what their problem is, and what is chosen for it."""

    operator: str
    operation: str
    takes: Callable[[CallSizes], bool]
    shape: Callable[[CallSizes], Any]
    select: Callable[[Sequence[NativeKernel], Any, DeviceFacts], Sequence[Selection]]


def explained_operator(sizes: CallSizes) -> Explained:
    """The native operator that takes a call.

    Raises:
        UsageError: there is none for the operation.
    """
    entry_of_call = next(
        (entry for entry in EXPLAINED if entry.operation == sizes.operation and entry.takes(sizes)), None
    )
    if entry_of_call is None:
        operations = ", ".join(dict.fromkeys(entry.operation for entry in EXPLAINED))
        raise UsageError(f"operation={sizes.operation!r}: the {NATIVE} backend has {operations}")
    return entry_of_call


def explain(sizes: CallSizes, kernels: Sequence[NativeKernel], device: DeviceFacts) -> Explanation:
    """Explain which of ``kernels`` a call would launch on ``device``.

    Raises:
        UsageError: a size is outside what the operator takes, then the message begins with ``name=value``; or no
            kernel fits.
    """
    operator = explained_operator(sizes)
    if sizes.soft_cap and operator.operation != "context":
        raise UsageError(f"soft_cap=True: {operator.operator} has none, expected `operation` context")
    shape = operator.shape(sizes)
    names = {"backend": NATIVE, "operator": operator.operator, "operation": operator.operation}
    return explain_launches(names, shape, device, operator.select(kernels, shape, device), pdl=sizes.pdl)


def _decode_shape(sizes: CallSizes) -> DecodeShape:
    heads_q, heads_kv, head_dim = sizes.heads_q, 8 if sizes.heads_kv is None else sizes.heads_kv, sizes.head_dim
    if sizes.head_dim_v not in (None, head_dim):
        raise UsageError(f"head_dim_v={sizes.head_dim_v}: expected {head_dim}, like `head_dim`")
    if not 1 <= heads_kv <= _MOST:
        raise UsageError(f"heads_kv={heads_kv}: expected 1 to {_MOST}")
    sizes.check(MAX_QUERIES, _MOST, PAGE_SIZES)
    if heads_q % heads_kv:
        raise UsageError(f"heads_q={heads_q}: expected a multiple of heads_kv={heads_kv}")
    if heads_q > MAX_GROUP * heads_kv:
        raise UsageError(f"heads_q={heads_q}: expected at most {MAX_GROUP} for each of `heads_kv`")
    if sizes.window < 0:
        raise UsageError(f"window={sizes.window}: expected at least 0")
    return DecodeShape(
        dtype=sizes.dtype_kv,
        q_dtype=sizes.query_dtype(Q_DTYPES),
        head_dim=head_dim,
        group=heads_q // heads_kv,
        kv_heads=heads_kv,
        batch=sizes.batch,
        q_len=sizes.q_len,
        tokens=sizes.batch * sizes.q_len if sizes.tokens is None else sizes.tokens,
        ragged=sizes.tokens is not None,
        max_seq_len=sizes.kv_len,
        window_left=sizes.window - 1,
        batch_invariant=sizes.batch_invariant,
    )


def _mla_shape(sizes: CallSizes) -> MlaShape:
    latent = _LATENTS[sizes.head_dim]
    sizes.check(MAX_MLA_QUERIES, MAX_HEADS, MLA_PAGE_SIZES)
    for name, only in (("head_dim_v", latent), ("heads_kv", 1)):
        if getattr(sizes, name) not in (None, only):
            raise UsageError(
                f"{name}={getattr(sizes, name)}: expected {only} with head_dim={sizes.head_dim}, which is MLA"
            )
    if sizes.window:
        raise UsageError(f"window={sizes.window}: MLA decode sees all keys, expected 0")
    return MlaShape(
        dtype=sizes.dtype_kv,
        q_dtype=sizes.query_dtype(MLA_Q_DTYPES),
        latent=latent,
        rope=ROPE,
        heads=sizes.heads_q,
        batch=sizes.batch,
        q_len=sizes.q_len,
        ragged=sizes.tokens is not None,
        max_seq_len=sizes.kv_len,
        batch_invariant=sizes.batch_invariant,
    )


def _context_shape(sizes: CallSizes) -> ContextShape:
    heads_kv = 8 if sizes.heads_kv is None else sizes.heads_kv
    sizes.check(_MOST, _MOST, PAGE_SIZES)
    if sizes.head_dim not in CONTEXT_HEAD_DIMS:
        raise UsageError(f"head_dim={sizes.head_dim}: expected one of {', '.join(map(str, CONTEXT_HEAD_DIMS))}")
    value_dim = VALUE_DIMS[sizes.head_dim]
    if sizes.head_dim_v not in (None, value_dim):
        raise UsageError(f"head_dim_v={sizes.head_dim_v}: expected {value_dim} with head_dim={sizes.head_dim}")
    if not 1 <= heads_kv <= _MOST or sizes.heads_q % heads_kv or sizes.heads_q > MAX_CONTEXT_GROUP * heads_kv:
        raise UsageError(f"heads_q={sizes.heads_q}: expected 1 to {MAX_CONTEXT_GROUP} for each of heads_kv={heads_kv}")
    dtype = sizes.query_dtype(CONTEXT_Q_DTYPES)
    if sizes.dtype_out not in (None, dtype):
        raise UsageError(f"dtype_out={sizes.dtype_out!r}: expected {dtype}, like the queries")
    return ContextShape(
        dtype=dtype,
        kv_dtype=sizes.dtype_kv,
        head_dim=sizes.head_dim,
        group=sizes.heads_q // heads_kv,
        kv_heads=heads_kv,
        batch=sizes.batch,
        tokens=sizes.batch * sizes.q_len if sizes.tokens is None else max(1, sizes.tokens),
        max_seq_len=sizes.kv_len,
        soft_cap=sizes.soft_cap,
        batch_invariant=sizes.batch_invariant,
    )


def _select_context(kernels: Sequence[NativeKernel], shape: ContextShape, device: DeviceFacts) -> Sequence[Selection]:
    return (select_context_attention(kernels, shape, device),)


def _select_mla(kernels: Sequence[NativeKernel], shape: MlaShape, device: DeviceFacts) -> Sequence[Selection]:
    return (select_mla_decode(kernels, shape, device),)


def _tokens(sizes: CallSizes) -> int:
    tokens = sizes.batch * sizes.q_len if sizes.tokens is None else sizes.tokens
    for name, value in (("batch", sizes.batch), ("q_len", sizes.q_len), ("tokens", tokens)):
        if not 1 <= value <= _MOST:
            raise UsageError(f"{name}={value}: expected 1 to {_MOST}")
    return tokens


def _append_shape(sizes: CallSizes) -> AppendShape:
    return AppendShape(dtype=sizes.query_dtype(Q_DTYPES), kv_dtype=sizes.dtype_kv, tokens=_tokens(sizes))


def _merge_shape(sizes: CallSizes) -> MergeShape:
    if sizes.heads_q < 1 or sizes.head_dim < 1 or sizes.head_dim % CONSTANTS.merge_values:
        raise UsageError(
            f"head_dim={sizes.head_dim}: expected a multiple of {CONSTANTS.merge_values}, of 1 head or more"
        )
    tokens = _tokens(sizes)
    return MergeShape(dtype=sizes.dtype_q or "bf16", tokens=tokens, heads=sizes.heads_q, head_dim=sizes.head_dim)


# Types of a cache that lists name rows of, by (type, columns) -> the form of its rows.
_SPARSE_ROWS = {("e4m3", 576): "scaled_e4m3", ("bf16", 576): "bf16", ("bf16", 512): "bf16_nope"}


def _sparse_mla_shape(sizes: CallSizes) -> SparseMlaShape:
    form = _SPARSE_ROWS.get((sizes.dtype_kv, sizes.head_dim))
    if form is None:
        forms = ", ".join(f"{dtype} with {columns}" for dtype, columns in _SPARSE_ROWS)
        raise UsageError(f"head_dim={sizes.head_dim}: with dtype_kv={sizes.dtype_kv}, expected one of {forms}")
    if sizes.dtype_q not in (None, "bf16"):
        raise UsageError(f"dtype_q={sizes.dtype_q!r}: expected bf16")
    if sizes.dtype_out not in (None, *OUT_DTYPES):
        raise UsageError(f"dtype_out={sizes.dtype_out!r}: expected one of {', '.join(OUT_DTYPES)}")
    for name, only in (("head_dim_v", 512), ("heads_kv", 1)):
        if getattr(sizes, name) not in (None, only):
            raise UsageError(f"{name}={getattr(sizes, name)}: expected {only} of sparse MLA")
    for name, most in (("heads_q", MAX_HEADS), ("kv_len", MAX_WIDTH)):
        if not 1 <= getattr(sizes, name) <= most:
            raise UsageError(f"{name}={getattr(sizes, name)}: expected 1 to {most}")
    return SparseMlaShape(
        cache_rows=form,
        heads=sizes.heads_q,
        batch=_tokens(sizes),
        width=sizes.kv_len,
        batch_invariant=sizes.batch_invariant,
    )


def _select_sparse_mla(
    kernels: Sequence[NativeKernel], shape: SparseMlaShape, device: DeviceFacts
) -> Sequence[Selection]:
    return (select_sparse_mla(kernels, shape, device),)


def _draft_mask_shape(sizes: CallSizes) -> DraftMaskShape:
    for name, most in (("batch", _MOST), ("q_len", MAX_QUERIES)):
        if not 1 <= getattr(sizes, name) <= most:
            raise UsageError(f"{name}={getattr(sizes, name)}: expected 1 to {most}")
    return DraftMaskShape(batch=sizes.batch, q_len=sizes.q_len)


def _select_draft_mask(
    kernels: Sequence[NativeKernel], shape: DraftMaskShape, device: DeviceFacts
) -> Sequence[Selection]:
    return (select_draft_mask(kernels, shape, device),)


# The first entry that takes a call explains it.
EXPLAINED = (
    Explained("mla_decode", "decode", lambda sizes: sizes.head_dim in _LATENTS, _mla_shape, _select_mla),
    Explained("paged_decode", "decode", lambda sizes: True, _decode_shape, select_decode),
    Explained("context_attention", "context", lambda sizes: True, _context_shape, _select_context),
    Explained("append_kv", "append", lambda sizes: True, _append_shape, lambda *values: (select_append(*values),)),
    Explained("merge_states", "merge", lambda sizes: True, _merge_shape, lambda *values: (select_merge(*values),)),
    Explained("draft_mask", "draft_mask", lambda sizes: True, _draft_mask_shape, _select_draft_mask),
    Explained("sparse_mla_decode", "sparse_mla", lambda sizes: True, _sparse_mla_shape, _select_sparse_mla),
)
