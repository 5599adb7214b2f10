"""The arguments of the four entry points, as the reference launcher takes them, and the checks they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...errors import UsageError
from .refusals import ArgumentRefused, PlanRefused
from .traits import INT32_MAX, TENSOR_DTYPES, is_power_of_two

OUT_SCALE_BLOCK = 16
TOP_K_MULTIPLE = 4


class Tensor(Protocol):
    """Device memory as a tensor: strides in elements; a uint8 tensor holds two FP4 numbers a byte."""

    @property
    def pointer(self) -> int:
        """Device address."""
        ...

    @property
    def dtype(self) -> str:
        """The element type as torch names it, without its prefix."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        ...

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours in each dimension."""
        ...


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
    for any length of KV. ``workspace`` is (address, bytes); ``counters`` the address of zeroed counters that are
    not part of it (0: none are wanted), None if they are carved from it.
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
    counters: int | None = None


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


NO_OUT_SCALES = OutScales()
NO_SAGE = Sage()


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and dimensions of a call whose query heads divide into groups."""

    query: int
    kv: int
    dim_qk: int
    dim_v: int


def heads_of(common: Common, heads_kv: int, dim_v: int | None = None) -> Heads:
    """The heads of a call; V's dimension is that of the output unless it is given.

    Raises:
        PlanRefused: the query heads are no multiple of the KV heads.
        UsageError: a size that no launch has.
    """
    query, out = common.query, common.out
    if len(query.shape) != 3:
        raise UsageError(f"query of shape {query.shape}: expected [tokens, heads, head_dim]")
    heads_q, dim_qk = query.shape[1], query.shape[2]
    if dim_v is None:
        dim_v = out.shape[-1] * (2 if out.dtype == "uint8" else 1)
    sizes = {"query heads": heads_q, "KV heads": heads_kv, "head_dim_qk": dim_qk, "head_dim_v": dim_v}
    sizes |= {"batch": common.batch, "max_q_len": common.max_q, "query tokens": query.shape[0]}
    for name, size in {**sizes, "multiprocessors": common.device.multiprocessors}.items():
        if not 1 <= size <= INT32_MAX:
            raise UsageError(f"{name}={size}: expected 1 to {INT32_MAX}")
    if heads_q % heads_kv:
        raise PlanRefused(f"{heads_q} query heads over {heads_kv} KV heads: expected a multiple")
    return Heads(heads_q, heads_kv, dim_qk, dim_v)


def dtype_of(name: str, tensor: Tensor) -> str:
    """A tensor's element type in the metadata's words.

    Raises:
        UsageError: a type that no kernel takes.
    """
    try:
        return TENSOR_DTYPES[tensor.dtype]
    except KeyError:
        raise UsageError(f"{name}: dtype {tensor.dtype!r}, expected one of {', '.join(TENSOR_DTYPES)}") from None


def check_rank(name: str, tensor: Tensor, *ranks: int) -> None:
    """Raise ``UsageError`` unless a tensor has one of these ranks and a stride for each dimension."""
    if len(tensor.shape) not in ranks or len(tensor.strides) != len(tensor.shape):
        expected = " or ".join(map(str, ranks))
        raise UsageError(f"{name} of shape {tensor.shape}, strides {tensor.strides}: expected {expected} dimensions")


def check_sage(given: Sage) -> None:
    """Raise ``UsageError`` unless every block size is 0 or a power of two that an int32 holds."""
    for block in given.blocks:
        if block != 0 and not (is_power_of_two(block) and block <= INT32_MAX):
            raise UsageError(f"SageAttention blocks {given.blocks}: expected 0 or powers of 2")


def check_length(name: str, value: int) -> None:
    """Raise ``UsageError`` unless ``value`` is a length that an int32 holds."""
    if not 1 <= value <= INT32_MAX:
        raise UsageError(f"{name}={value}: expected 1 to {INT32_MAX}")


def check_out_scales(given: OutScales) -> None:
    """Raise ``ArgumentRefused`` for a block size of output scales that no kernel writes."""
    if given.block not in (OUT_SCALE_BLOCK, -1):
        raise ArgumentRefused(f"o_sf_vec_size={given.block}: expected {OUT_SCALE_BLOCK}, or -1 for no FP4 output")


def check_top_k(top_k: int) -> None:
    """Raise ``ArgumentRefused`` for a number of sparse KV tokens that is no multiple of 4."""
    if top_k % TOP_K_MULTIPLE:
        raise ArgumentRefused(f"top_k={top_k}: expected a multiple of {TOP_K_MULTIPLE}")
