"""The four entry points: tensors and scalars, as the reference launcher takes them, to a ``Problem``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

from ...errors import UsageError
from .carving import Carving, carve
from .problem import Pointers, Problem, Strides, is_mla
from .refusals import ArgumentRefused, PlanRefused
from .traits import (
    INT32_MAX,
    TENSOR_DTYPES,
    KernelType,
    MaskType,
    QkvLayout,
    SparseType,
    TileScheduler,
    float32,
    int32,
)

LOG2_E = 1.4426950408889634  # the double nearest to log2(e)
OUT_SCALE_BLOCK = 16
TOP_K_MULTIPLE = 4
DSV4_WINDOW_LEFT = 127


class Tensor(Protocol):
    """Device memory as a tensor: strides in elements; a uint8 tensor holds two FP4 numbers a byte."""

    @property
    def pointer(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A ``Tensor`` as a plain value."""

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """What the planner knows of the GPU: model (100, 103) and multiprocessors."""

    sm: int
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Scale:
    """A factor as a number, or on the device (then ``value`` is not looked at)."""

    value: float = 1.0
    pointer: int = 0


@dataclass(frozen=True, slots=True)
class Common:
    """What all entry points take.

    ``query`` is [tokens, heads, head_dim]; ``out`` likewise with V's head dimension (any shape that ends so).
    ``bmm1`` scales the scores, ``bmm2`` the output; a ``bmm1`` on the device has log2(e) in it already.
    ``lse_strides`` are those of tokens and heads. ``multi_ctas_enabled`` off keeps one CTA a tile of queries
    for any length of KV. ``workspace`` is (address, bytes).
    """

    device: Device
    query: Tensor
    out: Tensor
    seq_lens: Tensor
    workspace: tuple[int, int]
    batch: int
    max_q: int
    bmm1: Scale = Scale()
    bmm2: Scale = Scale()
    cum_seq_lens_q: Tensor | None = None
    sinks: Tensor | None = None
    lse: Tensor | None = None
    lse_strides: tuple[int, int] = (0, 0)
    window_left: int = -1
    skip_softmax_factor: float = 0.0
    multi_ctas_enabled: bool = True
    pdl: bool = False
    allows_tile_kv_64: bool = False


@dataclass(frozen=True, slots=True)
class PagedKv:
    """A pool of pages: [pages, heads, page size, head_dim] by strides, and FP4 block scales where it is FP4.

    ``table`` is [batch, pages] of page numbers (or [batch, 2, pages] with ``shares_index`` off).
    """

    key: Tensor
    value: Tensor
    table: Tensor
    max_kv: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    shares_index: bool = True


@dataclass(frozen=True, slots=True)
class OutScales:
    """Block scales of an FP4 output: ``block`` numbers share one (16; -1: no FP4 output)."""

    scales: Tensor | None = None
    scale: float = -1.0
    block: int = -1
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class Sage:
    """SageAttention scales of Q, K, P and V, and how many elements share one."""

    scales: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None, None, None, None)
    blocks: tuple[int, int, int, int] = (0, 0, 0, 0)


def decode(
    common: Common,
    kv: PagedKv,
    out_scales: OutScales = OutScales(),
    *,
    top_k: int = 0,
    top_k_lens: Tensor | None = None,
) -> Problem:
    """Paged decoding, GQA and MLA; ``top_k`` > 0 is sparse MLA over that many KV tokens a query.

    Raises:
        ArgumentRefused, PlanRefused: an argument that no kernel takes.
        WorkspaceRefused: the workspace does not hold counters and statistics.
        UsageError: a dtype or rank that does not exist here.
    """
    _check_out_scales(out_scales)
    _check_top_k(top_k)
    heads = _heads(common, kv.key.shape[-3])
    sparse = SparseType.NONE if top_k <= 0 else SparseType.DYNAMIC if top_k_lens is not None else SparseType.STATIC
    mla = is_mla(heads.dim_qk, heads.dim_v, sparse != SparseType.NONE)
    if sparse and not mla:
        raise ArgumentRefused(f"top_k={top_k} with heads {heads.dim_qk}/{heads.dim_v}: sparse KV needs MLA heads")
    carving = _carve(common, heads.query, mergeable=True)
    return _paged(
        common,
        kv,
        out_scales,
        heads,
        carving,
        mask=MaskType.DENSE if mla else MaskType.CAUSAL,
        kernel_type=KernelType.GENERATION,
        sparse=sparse,
        top_k=max(top_k, 0),
        top_k_lens=top_k_lens,
        cum_seq_lens_kv=None,
    )


def context(
    common: Common,
    kv: PagedKv,
    cum_seq_lens_kv: Tensor,
    out_scales: OutScales = OutScales(),
    *,
    causal: bool = True,
) -> Problem:
    """Paged context (prefill); errors as ``decode``."""
    _check_out_scales(out_scales)
    heads = _heads(common, kv.key.shape[-3])
    if common.window_left != -1 and not causal:
        raise ArgumentRefused(f"window_left={common.window_left} without causal: paged dense attention has no window")
    carving = _carve(common, heads.query, mergeable=False)
    return _paged(
        common,
        kv,
        out_scales,
        heads,
        carving,
        mask=MaskType.CAUSAL if causal else MaskType.DENSE,
        kernel_type=KernelType.CONTEXT,
        sparse=SparseType.NONE,
        top_k=0,
        top_k_lens=None,
        cum_seq_lens_kv=cum_seq_lens_kv,
    )


def ragged(
    common: Common,
    key: Tensor,
    value: Tensor,
    cum_seq_lens_kv: Tensor,
    max_kv: int,
    *,
    causal: bool = True,
    sage: Sage = Sage(),
    out_scale: float = -1.0,
) -> Problem:
    """Context over keys [tokens, heads, head_dim] and values that are not paged; errors as ``decode``.

    The query is taken as contiguous, whatever its strides say.
    """
    heads = _heads(common, key.shape[1], value.shape[2])
    carving = _carve(common, heads.query, mergeable=True)
    return Problem(
        **_shared(common, heads),
        layout=QkvLayout.SEPARATE,
        mask=MaskType.CAUSAL if causal else MaskType.DENSE,
        kernel_type=KernelType.CONTEXT,
        scheduler=TileScheduler.PERSISTENT,
        multi_ctas=False,
        dtype_k=_dtype("key", key),
        dtype_v=_dtype("value", value),
        max_kv=max_kv,
        tokens_kv=key.shape[0],
        page=0,
        pages=0,
        table_width=0,
        pointers=_pointers(
            common,
            carving,
            key=key.pointer,
            value=value.pointer,
            cum_seq_lens_kv=cum_seq_lens_kv.pointer,
            sage_q=_at(sage.scales[0]),
            sage_k=_at(sage.scales[1]),
            sage_p=_at(sage.scales[2]),
            sage_v=_at(sage.scales[3]),
        ),
        strides=Strides(key=_ragged_strides(key), value=_ragged_strides(value), lse=_lse_strides(common)),
        sage_blocks=sage.blocks,
        scale_out_scales=float32(out_scale),
    )


def decode_dsv4(
    common: Common, pool: Tensor, window_pool: Tensor, indices: Tensor, top_k_lens: Tensor | None
) -> Problem:
    """Sparse MLA over single tokens of two pools, [pages, 1, page size, 512] each; errors as ``decode``.

    ``indices`` [tokens, top_k] name KV tokens; a query visits ``top_k_lens`` [tokens] of them.
    """
    top_k = indices.shape[-1]
    _check_top_k(top_k)
    heads = _heads(common, pool.shape[-3])
    carving = _carve(common, heads.query, mergeable=True)
    token, head = int32(pool.strides[-2]), int32(pool.strides[-3])
    strides = (token, head, token)
    dtype = _dtype("primary_kv_cache", pool)
    shared = _shared(common, heads)
    shared["window"] = DSV4_WINDOW_LEFT + 1
    return Problem(
        **shared,
        layout=QkvLayout.PAGED,
        mask=MaskType.DENSE,
        kernel_type=KernelType.GENERATION,
        scheduler=_generation_scheduler(common),
        multi_ctas=common.multi_ctas_enabled,
        dtype_k=dtype,
        dtype_v=dtype,
        max_kv=top_k,
        tokens_kv=0,
        page=1,
        pages=int32(pool.shape[0] * pool.shape[-2]),
        table_width=top_k,
        pointers=_pointers(
            common,
            carving,
            key=pool.pointer,
            value=pool.pointer,
            page_table=indices.pointer,
            window_pool=window_pool.pointer,
            top_k_lens=_at(top_k_lens),
        ),
        strides=Strides(query=_query_strides(common), key=strides, value=strides),
        sparse=SparseType.DYNAMIC,
        top_k=top_k,
        scale_kv_scales=1.0,
        shares_page_index=True,
    )


@dataclass(frozen=True, slots=True)
class _Heads:
    query: int
    kv: int
    dim_qk: int
    dim_v: int


def _paged(
    common: Common,
    kv: PagedKv,
    out_scales: OutScales,
    heads: _Heads,
    carving: Carving,
    *,
    mask: MaskType,
    kernel_type: KernelType,
    sparse: SparseType,
    top_k: int,
    top_k_lens: Tensor | None,
    cum_seq_lens_kv: Tensor | None,
) -> Problem:
    key, value = kv.key, kv.value
    packed = 2 if key.dtype == "uint8" else 1
    # The same strides serve V; where V is elsewhere, the pool is taken as pages of K and V in turn.
    strides = tuple(int32(int32(key.strides[axis]) * packed) for axis in (-2, -3, 0))
    pages = int32(key.shape[0] if key.pointer == value.pointer else key.shape[0] * 2)
    generation = kernel_type != KernelType.CONTEXT
    return Problem(
        **_shared(common, heads),
        layout=QkvLayout.PAGED,
        mask=mask,
        kernel_type=kernel_type,
        scheduler=_generation_scheduler(common) if generation else TileScheduler.PERSISTENT,
        multi_ctas=common.multi_ctas_enabled and generation,
        dtype_k=_dtype("key_cache", key),
        dtype_v=_dtype("value_cache", value),
        max_kv=kv.max_kv,
        tokens_kv=0,
        page=key.shape[-2],
        pages=pages,
        table_width=kv.table.shape[-1],
        pointers=_pointers(
            common,
            carving,
            key=key.pointer,
            value=value.pointer,
            page_table=kv.table.pointer,
            key_scales=_at(kv.key_scales),
            value_scales=_at(kv.value_scales),
            out_scales=_at(out_scales.scales),
            top_k_lens=_at(top_k_lens),
            cum_seq_lens_kv=_at(cum_seq_lens_kv),
        ),
        strides=Strides(
            query=_query_strides(common),
            key=strides,  # type: ignore[arg-type]
            value=strides,  # type: ignore[arg-type]
            key_scales=(0, 0)
            if kv.key_scales is None
            else (int32(kv.key_scales.strides[-3]), int32(kv.key_scales.strides[0])),
            lse=common.lse_strides,
        ),
        sparse=sparse,
        top_k=top_k,
        scale_kv_scales=1.0,
        scale_out_scales=float32(out_scales.scale),
        first_out_scale_token=out_scales.first_token,
        shares_page_index=kv.shares_index,
    )


def _shared(common: Common, heads: _Heads) -> dict[str, object]:
    """The fields that all entry points fill alike."""
    bmm1 = 1.0 if common.bmm1.pointer else common.bmm1.value
    return {
        "sm": common.device.sm,
        "multiprocessors": common.device.multiprocessors,
        "dtype_q": _dtype("query", common.query),
        "dtype_o": _dtype("out", common.out),
        "heads_q": heads.query,
        "heads_kv": heads.kv,
        "head_dim_qk": heads.dim_qk,
        "head_dim_v": heads.dim_v,
        "batch": common.batch,
        "max_q": common.max_q,
        "tokens_q": common.query.shape[0],
        "window": INT32_MAX if common.window_left == -1 else int32(common.window_left + 1),
        "skip_softmax_factor": float32(common.skip_softmax_factor),
        "softmax_scale_log2": float32(bmm1 * LOG2_E),
        "output_scale": float32(1.0 if common.bmm2.pointer else common.bmm2.value),
        "pdl": common.pdl,
        "allows_tile_kv_64": common.allows_tile_kv_64,
    }


def _pointers(common: Common, carving: Carving, **others: int) -> Pointers:
    return Pointers(
        query=common.query.pointer,
        out=common.out.pointer,
        seq_lens=common.seq_lens.pointer,
        cum_seq_lens_q=_at(common.cum_seq_lens_q),
        sinks=_at(common.sinks),
        softmax_scale_log2=common.bmm1.pointer,
        output_scale=common.bmm2.pointer,
        lse=_at(common.lse),
        counters=carving.counters,
        softmax_stats=carving.softmax_stats,
        scratch=carving.scratch,
        **others,
    )


def _carve(common: Common, heads_q: int, *, mergeable: bool) -> Carving:
    rows = None if common.lse is None else (heads_q, common.batch, common.max_q)
    return carve(*common.workspace, counters=mergeable, stats_rows=rows, scratch=mergeable)


def _heads(common: Common, heads_kv: int, dim_v: int | None = None) -> _Heads:
    query, out = common.query, common.out
    if len(query.shape) != 3:
        raise UsageError(f"query of shape {query.shape}: expected [tokens, heads, head_dim]")
    heads_q, dim_qk = query.shape[1], query.shape[2]
    if dim_v is None:
        dim_v = out.shape[-1] * (2 if out.dtype == "uint8" else 1)
    sizes = {"query heads": heads_q, "KV heads": heads_kv, "head_dim_qk": dim_qk, "head_dim_v": dim_v}
    sizes |= {"batch": common.batch, "max_q_len": common.max_q, "multiprocessors": common.device.multiprocessors}
    for name, size in sizes.items():
        if not 1 <= size <= INT32_MAX:
            raise UsageError(f"{name}={size}: expected 1 to {INT32_MAX}")
    if heads_q % heads_kv:
        raise PlanRefused(f"{heads_q} query heads over {heads_kv} KV heads: expected a multiple")
    return _Heads(heads_q, heads_kv, dim_qk, dim_v)


def _check_out_scales(given: OutScales) -> None:
    if given.block not in (OUT_SCALE_BLOCK, -1):
        raise ArgumentRefused(f"o_sf_vec_size={given.block}: expected {OUT_SCALE_BLOCK}, or -1 for no FP4 output")


def _check_top_k(top_k: int) -> None:
    if top_k % TOP_K_MULTIPLE:
        raise ArgumentRefused(f"top_k={top_k}: expected a multiple of {TOP_K_MULTIPLE}")


def _generation_scheduler(common: Common) -> TileScheduler:
    return TileScheduler.STATIC if common.multi_ctas_enabled else TileScheduler.PERSISTENT


def _dtype(name: str, tensor: Tensor) -> str:
    try:
        return TENSOR_DTYPES[tensor.dtype]
    except KeyError:
        raise UsageError(f"{name}: dtype {tensor.dtype!r}, expected one of {', '.join(TENSOR_DTYPES)}") from None


def _query_strides(common: Common) -> tuple[int, int]:
    return int32(common.query.strides[0]), int32(common.query.strides[1])


def _ragged_strides(tensor: Tensor) -> tuple[int, int, int]:
    return int32(tensor.strides[0]), int32(tensor.strides[1]), int32(prod(tensor.shape))


def _lse_strides(common: Common) -> tuple[int, int]:
    if common.lse is None:
        return (0, 0)
    return int32(common.lse.strides[0]), int32(common.lse.strides[1])


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.pointer
