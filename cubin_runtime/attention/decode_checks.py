"""What a paged decode may be given: every rule in one place, each broken one named, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .views import TensorView, view_of

LAYOUTS = ("NHD", "HND")
MAX_GROUP = 16
PAGE_SIZES = (16, 32, 64, 128, 256)
# The order of a call's tensors wherever they stand together, and the multiple that each address must be of.
TENSOR_NAMES = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "out", "lse")
_ADDRESS_ALIGNMENT = (4, 16, 16, 4, 4, 8, 4)
# The multiple, in elements, that strides of dimensions over 1 must be of: what the kernels load or store at once.
_STRIDE_UNIT = (2, 8, 8, 1, 1, 4, 1)
_MAX_TILES = 1 << 31
_SMALLEST_TILE = 16


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """The tensors of one call; caches are seen as ``[pages, page_size, kv_heads, head_dim]`` whatever their layout."""

    q: TensorView
    k: TensorView
    v: TensorView
    page_table: TensorView
    seq_lens: TensorView
    out: TensorView
    lse: TensorView | None

    @property
    def views(self) -> tuple[TensorView | None, ...]:
        """All of them, in the order of ``TENSOR_NAMES``."""
        return (self.q, self.k, self.v, self.page_table, self.seq_lens, self.out, self.lse)

    @property
    def signature(self) -> tuple[object, ...]:
        """All but the pointers: two calls of equal signature can share a plan."""
        return tuple((v.dtype, v.shape, v.strides, v.device) if v else None for v in self.views)

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q.shape[1] // self.k.shape[2]


def cache_view(cache: TensorView, name: str, kv_layout: str) -> TensorView:
    """A cache of either layout as ``[pages, page_size, kv_heads, head_dim]``: strides change, bytes do not.

    Raises:
        UsageError: the layout is unknown or the cache has another rank than 4.
    """
    if kv_layout not in LAYOUTS:
        raise UsageError(f"kv_layout={kv_layout!r}: expected NHD or HND")
    if len(cache.shape) != 4:
        raise UsageError(f"{name}: shape {cache.shape}, expected 4 dimensions in layout {kv_layout}")
    if kv_layout == "NHD":
        return cache
    order = (0, 2, 1, 3)
    shape = tuple(cache.shape[i] for i in order)
    return TensorView(cache.pointer, cache.dtype, shape, tuple(cache.strides[i] for i in order), cache.device)


def decode_tensors(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, out: Any, lse: Any, kv_layout: str
) -> DecodeTensors:
    """The views of one call's tensors.

    Raises:
        UsageError: something is no CUDA tensor, or a cache has another rank than 4.
    """
    return DecodeTensors(
        q=view_of(q, "q"),
        k=cache_view(view_of(k_cache, "k_cache"), "k_cache", kv_layout),
        v=cache_view(view_of(v_cache, "v_cache"), "v_cache", kv_layout),
        page_table=view_of(page_table, "page_table"),
        seq_lens=view_of(seq_lens, "seq_lens"),
        out=view_of(out, "out"),
        lse=None if lse is None else view_of(lse, "lse"),
    )


def check_decode(tensors: DecodeTensors, max_seq_len: int, softmax_scale: float) -> None:
    """Hold a call against every rule.

    Raises:
        UsageError: the message names the argument, what came and what was expected.
    """
    q, k = tensors.q, tensors.k
    if len(q.shape) != 3:
        raise UsageError(f"q: shape {q.shape}, expected [batch, q_heads, head_dim]")
    batch, q_heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k.shape
    if batch < 1:
        raise UsageError(f"q: shape {q.shape}, expected a batch of 1 or more")
    if pages < 1 or kv_heads < 1:
        raise UsageError(f"k_cache: {pages} pages of {kv_heads} KV heads, expected at least one of each")
    if page_size not in PAGE_SIZES:
        raise UsageError(f"k_cache: page size {page_size}, expected one of {', '.join(map(str, PAGE_SIZES))}")
    if q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
        raise UsageError(
            f"q: {q_heads} heads over {kv_heads} KV heads, expected 1 to {MAX_GROUP} query heads a KV head"
        )
    _check_shape("k_cache", k, (pages, page_size, kv_heads, head_dim))
    _check_shape("v_cache", tensors.v, k.shape)
    _check_shape("out", tensors.out, q.shape)
    _check_shape("seq_lens", tensors.seq_lens, (batch,))
    if tensors.lse is not None:
        _check_shape("lse", tensors.lse, (batch, q_heads))
    table = tensors.page_table
    if len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] < 1:
        raise UsageError(f"page_table: shape {table.shape}, expected [{batch}, columns]")
    _check_dtypes(tensors)
    _check_devices(tensors)
    _check_memory(tensors)
    _check_bounds(tensors, max_seq_len, softmax_scale)


def _check_shape(name: str, view: TensorView, expected: tuple[int, ...]) -> None:
    if view.shape != expected:
        raise UsageError(f"{name}: shape {view.shape}, expected {expected}")


def _check_dtypes(tensors: DecodeTensors) -> None:
    if tensors.q.dtype != "bfloat16":
        raise UsageError(f"q: dtype {tensors.q.dtype}, expected bfloat16")
    for name, view, expected in (
        ("k_cache", tensors.k, tensors.q.dtype),
        ("v_cache", tensors.v, tensors.q.dtype),
        ("out", tensors.out, tensors.q.dtype),
        ("page_table", tensors.page_table, "int32"),
        ("seq_lens", tensors.seq_lens, "int32"),
        ("lse", tensors.lse, "float32"),
    ):
        if view is not None and view.dtype != expected:
            raise UsageError(f"{name}: dtype {view.dtype}, expected {expected}")


def _check_devices(tensors: DecodeTensors) -> None:
    for name, view in zip(TENSOR_NAMES, tensors.views, strict=True):
        if view is not None and view.device != tensors.q.device:
            raise UsageError(f"{name}: on device {view.device}, q is on device {tensors.q.device}")


def check_addresses(addresses: Sequence[int]) -> None:
    """Hold the addresses of a call, in the order of ``TENSOR_NAMES``, against their alignments; lse may be 0.

    Raises:
        UsageError: naming the tensor.
    """
    for name, address, alignment in zip(TENSOR_NAMES, addresses, _ADDRESS_ALIGNMENT, strict=True):
        if address % alignment or (address == 0 and name != "lse"):
            raise UsageError(f"{name}: address {address:#x}, expected a multiple of {alignment} that is not 0")


def _check_memory(tensors: DecodeTensors) -> None:
    check_addresses([view.pointer if view else 0 for view in tensors.views])
    for name, view in zip(TENSOR_NAMES, tensors.views, strict=True):
        if view is None:
            continue
        # lse alone may have any strides; a dimension of size 1 is never stepped over.
        if name != "lse" and view.shape[-1] > 1 and view.strides[-1] != 1:
            raise UsageError(f"{name}: last stride {view.strides[-1]}, expected 1")
        if any(stride < 0 for stride in view.strides):
            raise UsageError(f"{name}: strides {view.strides}, expected none below 0")
    for name, view, unit in zip(TENSOR_NAMES, tensors.views, _STRIDE_UNIT, strict=True):
        if view is None:
            continue
        steps = zip(view.shape[:-1], view.strides[:-1], strict=True)
        if any(size > 1 and stride % unit for size, stride in steps):
            raise UsageError(f"{name}: strides {view.strides}, expected multiples of {unit} elements")


def _check_bounds(tensors: DecodeTensors, max_seq_len: int, softmax_scale: float) -> None:
    capacity = tensors.page_table.shape[1] * tensors.k.shape[1]
    if not 0 <= max_seq_len <= capacity:
        raise UsageError(
            f"max_seq_len={max_seq_len}: expected 0 to {capacity}, which is what the page table's "
            f"{tensors.page_table.shape[1]} columns hold"
        )
    tiles = tensors.q.shape[0] * tensors.k.shape[2] * (max_seq_len // _SMALLEST_TILE + 1)
    if tiles >= _MAX_TILES:
        raise UsageError(f"batch x KV heads x max_seq_len={max_seq_len}: {tiles} tiles, expected below {_MAX_TILES}")
    if not math.isfinite(softmax_scale):
        raise UsageError(f"softmax_scale={softmax_scale}: expected a finite number")
