"""What a paged decode may be given: every rule in one place, each broken one named, before anything is loaded."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import UsageError
from .backends import AUTO
from .decode_tensors import (
    REQUIRED,
    DecodeTensors,
    float32_number,
    token_stride,
)
from .views import ITEM_BYTES, TensorView

MAX_GROUP = 32
MAX_Q_LEN = 16
HEAD_DIMS = (32, 64, 128, 256, 512)
PAGE_SIZES = (16, 32, 64, 128, 256)
# KV dtype -> what q may be; the output may be any of them.
Q_DTYPES = {
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "float8_e4m3fn": ("bfloat16", "float16", "float8_e4m3fn"),
}
_LENGTHS = ("int32", "uint32")
# A token's mask is 32 bits.
_MASK_WORDS = {"uint16": 2, "uint32": 1}
_MAX_TILES = 1 << 31
_SMALLEST_TILE = 64
_SMALLEST_ROWS = 8


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What a paged decode is told besides tensors; see ``paged_decode``. A scale on the device is 1 here.

    ``max_q_len`` is given where requests have query tokens of different number, and only there.
    """

    max_seq_len: int
    softmax_scale: float
    output_scale: float = 1.0
    kv_layout: str = "NHD"
    max_q_len: int | None = None
    window_left: int = -1
    batch_invariant: bool = False
    backend: str = AUTO
    enable_pdl: bool = False


def check_kinds(batch_invariant: object, enable_pdl: object, *words: tuple[str, object]) -> None:
    """Hold switches and words against their kinds, before they become part of a plan's key; enable_pdl None is off.

    Raises:
        UsageError: a switch is neither True nor False, or one of ``words`` (name, value) is no text.
    """
    for name, switch in (("batch_invariant", batch_invariant), ("enable_pdl", enable_pdl or False)):
        if switch is not True and switch is not False:
            raise UsageError(f"{name}={switch!r}: expected True or False")
    for name, word in words:
        if not isinstance(word, str):
            raise UsageError(f"{name}={word!r}: expected a word")


def integer(name: str, value: Any) -> int:
    """``value`` as an int.

    Raises:
        UsageError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name}={value!r}: expected an integer") from None


def check_decode(tensors: DecodeTensors, options: DecodeOptions) -> None:
    """Hold a call against every rule.

    Raises:
        UsageError: the message names the argument, what came and what was expected.
    """
    check_queries(tensors, options)
    _check_caches(tensors)
    _check_dtypes(tensors)
    check_shapes(tensors, tensors.q.shape)
    check_devices(tensors)
    check_memory(tensors)
    check_options(tensors, options)


def check_addresses(addresses: Sequence[int], tensors: DecodeTensors) -> None:
    """Hold the addresses of a call, in the order of ``TENSOR_NAMES``, against the alignments of its tensors.

    Raises:
        UsageError: naming the tensor.
    """
    for name, address, alignment, there in zip(
        tensors.names, addresses, tensors.alignments, tensors.views, strict=True
    ):
        if there is not None and (address % alignment or not address):
            raise UsageError(f"{name}: address {address:#x}, expected a multiple of {alignment} that is not 0")


def check_query_bounds(view: TensorView) -> None:
    """Hold ``q_cu_seq_lens`` against its form as far as that needs no other tensor: before it is read back.

    Raises:
        UsageError: naming it.
    """
    check_dtype("q_cu_seq_lens", view, _LENGTHS)
    if len(view.shape) != 1:
        raise UsageError(f"q_cu_seq_lens: shape {view.shape}, expected (batch + 1,)")


def check_queries(tensors: DecodeTensors, options: DecodeOptions) -> None:
    """Hold q, the running sum of query tokens and their bound against each other."""
    shape = tensors.q.shape
    cu, bound = tensors.q_cu_seq_lens, options.max_q_len
    if cu is None:
        if len(shape) not in (3, 4):
            raise UsageError(
                f"q: shape {shape}, expected [batch, q_heads, head_dim] or [batch, q_len, q_heads, head_dim]"
            )
        if bound is not None:
            raise UsageError(f"max_q_len={bound}: expected only with q_cu_seq_lens")
        if shape[0] < 1:
            raise UsageError(f"q: shape {shape}, expected a batch of 1 or more")
        if not 1 <= (tensors.q_len or 0) <= MAX_Q_LEN:
            raise UsageError(f"q: {tensors.q_len} tokens a request, expected 1 to {MAX_Q_LEN}")
        return
    if len(shape) != 3 or shape[0] < 1:
        raise UsageError(
            f"q: shape {shape} with q_cu_seq_lens, expected [tokens, q_heads, head_dim] of 1 token or more"
        )
    if len(tensors.seq_lens.shape) != 1 or tensors.batch < 1:
        raise UsageError(f"seq_lens: shape {tensors.seq_lens.shape}, expected (batch,) of 1 or more")
    if bound is None:
        raise UsageError(f"max_q_len: None with q_cu_seq_lens, expected a bound from 1 to {MAX_Q_LEN}")
    if not 1 <= integer("max_q_len", bound) <= MAX_Q_LEN:
        raise UsageError(f"max_q_len={bound}: expected 1 to {MAX_Q_LEN}")


def _check_caches(tensors: DecodeTensors) -> None:
    pages, page_size, kv_heads, _ = tensors.k.shape
    q_heads, head_dim = tensors.q.shape[-2:]
    if head_dim not in HEAD_DIMS:
        raise UsageError(f"q: head dimension {head_dim}, expected one of {listed(HEAD_DIMS)}")
    if pages < 1 or kv_heads < 1:
        raise UsageError(f"k_cache: {pages} pages of {kv_heads} KV heads, expected at least one of each")
    if page_size not in PAGE_SIZES:
        raise UsageError(f"k_cache: page size {page_size}, expected one of {listed(PAGE_SIZES)}")
    if q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
        raise UsageError(
            f"q: {q_heads} heads over {kv_heads} KV heads, expected 1 to {MAX_GROUP} query heads a KV head"
        )
    check_shape("k_cache", tensors.k, (pages, page_size, kv_heads, head_dim))
    check_shape("v_cache", tensors.v, tensors.k.shape)


def _check_dtypes(tensors: DecodeTensors) -> None:
    kv = tensors.k.dtype
    check_dtype("k_cache", tensors.k, tuple(Q_DTYPES))
    check_dtype("v_cache", tensors.v, (kv,))
    check_dtype("q", tensors.q, Q_DTYPES[kv], f" with {kv} caches")
    check_dtype("out", tensors.out, tuple(Q_DTYPES))
    check_dtypes_of_options(tensors)


def check_dtypes_of_options(tensors: DecodeTensors) -> None:
    """Hold the dtypes of all tensors but q, the caches and the output against what any decode takes."""
    check_dtype("page_table", tensors.page_table, ("int32",))
    check_dtype("seq_lens", tensors.seq_lens, _LENGTHS)
    check_dtype("q_cu_seq_lens", tensors.q_cu_seq_lens, _LENGTHS)
    check_dtype("mask", tensors.mask, tuple(_MASK_WORDS))
    for name in ("lse", "sinks", "softmax_scale", "output_scale"):
        check_dtype(name, getattr(tensors, name), ("float32",))


def check_shapes(tensors: DecodeTensors, out: tuple[int, ...]) -> None:
    """Hold the shapes of all tensors but q and the caches against them and each other; ``out`` is the output's."""
    batch, q = tensors.batch, tensors.q
    check_shape("out", tensors.out, out)
    check_shape("lse", tensors.lse, q.shape[:-1])
    check_shape("seq_lens", tensors.seq_lens, (batch,))
    check_shape("q_cu_seq_lens", tensors.q_cu_seq_lens, (batch + 1,))
    table = tensors.page_table
    if len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] < 1:
        raise UsageError(f"page_table: shape {table.shape}, expected [{batch}, columns]")
    if tensors.mask is not None:
        words = _MASK_WORDS[tensors.mask.dtype]
        by_request = () if tensors.q_len is None else ((batch, tensors.q_len, words),)
        check_shape("mask", tensors.mask, (tensors.tokens, words), *by_request)
    kv_heads = tensors.k.shape[2]
    check_shape("sinks", tensors.sinks, (tensors.q_heads,), (kv_heads, tensors.group))
    for name, scale in (("softmax_scale", tensors.softmax_scale), ("output_scale", tensors.output_scale)):
        if scale is not None and prod(scale.shape) != 1:
            raise UsageError(f"{name}: shape {scale.shape}, expected one element")


def check_devices(tensors: DecodeTensors) -> None:
    """All tensors are on the device of q."""
    for name, view in zip(tensors.names, tensors.views, strict=True):
        if view is not None and view.device != tensors.q.device:
            raise UsageError(f"{name}: on device {view.device}, q is on device {tensors.q.device}")


def check_memory(tensors: DecodeTensors) -> None:
    """Addresses, strides, and what must be contiguous."""
    check_addresses(tensors.addresses, tensors)
    for name, view in zip(tensors.names[:REQUIRED], tensors.views, strict=False):
        # A dimension of size 1 is never stepped over.
        if view is not None and view.shape[-1] > 1 and view.strides[-1] != 1:
            raise UsageError(f"{name}: last stride {view.strides[-1]}, expected 1")
    for name, view in zip(tensors.names, tensors.views, strict=True):
        if view is not None and any(stride < 0 for stride in view.strides):
            raise UsageError(f"{name}: strides {view.strides}, expected none below 0")
        if view is not None and name in tensors.stride_bytes:
            unit = tensors.stride_bytes[name] // ITEM_BYTES[view.dtype]
            steps = zip(view.shape[:-1], view.strides[:-1], strict=True)
            if any(size > 1 and stride % unit for size, stride in steps):
                raise UsageError(f"{name}: strides {view.strides}, expected multiples of {unit} elements")
    for name in ("out", "lse"):
        view = getattr(tensors, name)
        if view is not None and any(n > 1 and not step for n, step in zip(view.shape, view.strides, strict=True)):
            raise UsageError(f"{name}: strides {view.strides}, expected no two elements at one address")
    for name in ("q_cu_seq_lens", "mask", "sinks"):
        view = getattr(tensors, name)
        if view is not None and not view.is_contiguous:
            raise UsageError(f"{name}: shape {view.shape} with strides {view.strides}, expected it contiguous")
    token_stride("q", tensors.q, 2)
    token_stride("out", tensors.out, 2)
    if tensors.lse is not None:
        token_stride("lse", tensors.lse, 1)


def check_options(tensors: DecodeTensors, options: DecodeOptions) -> None:
    """Bounds and numbers."""
    bound, columns = integer("max_seq_len", options.max_seq_len), tensors.page_table.shape[1]
    capacity = columns * tensors.k.shape[1]
    if not 0 <= bound <= capacity:
        raise UsageError(
            f"max_seq_len={bound}: expected 0 to {capacity}, which is what the page table's {columns} columns hold"
        )
    rows = (tensors.q_len or options.max_q_len or 1) * tensors.group
    pairs = tensors.batch * tensors.k.shape[2] * -(-rows // _SMALLEST_ROWS)
    tiles = pairs * (bound // _SMALLEST_TILE + 1)
    if tiles >= _MAX_TILES:
        raise UsageError(f"batch x KV heads x max_seq_len={bound}: {tiles} tiles, expected below {_MAX_TILES}")
    if not -1 <= integer("window_left", options.window_left) < 1 << 31:
        raise UsageError(f"window_left={options.window_left}: expected -1 (none) or more, below 2^31")
    for name, scale in (("softmax_scale", options.softmax_scale), ("output_scale", options.output_scale)):
        float32_number(name, scale)


def check_dtype(name: str, view: TensorView | None, expected: Sequence[str], why: str = "") -> None:
    """``view``, if it is there, has one of the dtypes ``expected``."""
    if view is not None and view.dtype not in expected:
        raise UsageError(f"{name}: dtype {view.dtype}, expected {listed(expected)}{why}")


def check_shape(name: str, view: TensorView | None, *expected: tuple[int, ...]) -> None:
    """``view``, if it is there, has one of the shapes ``expected``."""
    if view is not None and view.shape not in expected:
        raise UsageError(f"{name}: shape {view.shape}, expected {' or '.join(map(str, expected))}")


def listed(values: Sequence[object]) -> str:
    """``values`` in words."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
