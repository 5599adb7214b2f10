"""The tensors of one paged decode, as they come and as a plan compares them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from numbers import Real
from typing import Any

from ..errors import UsageError
from .views import TensorView, view_of

LAYOUTS = ("NHD", "HND")
# The order of a call's tensors wherever they stand together; those from lse on may be left out.
TENSOR_NAMES = (
    "q",
    "k_cache",
    "v_cache",
    "page_table",
    "seq_lens",
    "out",
    "lse",
    "q_cu_seq_lens",
    "mask",
    "sinks",
    "softmax_scale",
    "output_scale",
)
REQUIRED = 6
_ALIGNMENTS = (4, 16, 16, 4, 4, 8, 4, 4, 4, 4, 4, 4)
_STRIDE_BYTES = {"q": 4, "k_cache": 16, "v_cache": 16, "out": 8}

Given = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """The tensors of one call; caches are seen as ``[pages, page_size, kv_heads, head_dim]`` whatever their layout.

    ``softmax_scale`` and ``output_scale`` are those on the device, None where the call has a number.
    """

    q: TensorView
    k: TensorView
    v: TensorView
    page_table: TensorView
    seq_lens: TensorView
    out: TensorView
    lse: TensorView | None = None
    q_cu_seq_lens: TensorView | None = None
    mask: TensorView | None = None
    sinks: TensorView | None = None
    softmax_scale: TensorView | None = None
    output_scale: TensorView | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What a caller knows them by, in the order of ``TENSOR_NAMES``."""
        return TENSOR_NAMES

    @property
    def alignments(self) -> tuple[int, ...]:
        """The multiple in bytes that each address must be of, in the same order."""
        return _ALIGNMENTS

    @property
    def stride_bytes(self) -> dict[str, int]:
        """The multiple in bytes that strides of dimensions over 1 must be of: what kernels load or store at once."""
        return _STRIDE_BYTES

    @property
    def views(self) -> tuple[TensorView | None, ...]:
        """All of them, in the order of ``TENSOR_NAMES``."""
        return (
            self.q,
            self.k,
            self.v,
            self.page_table,
            self.seq_lens,
            self.out,
            self.lse,
            self.q_cu_seq_lens,
            self.mask,
            self.sinks,
            self.softmax_scale,
            self.output_scale,
        )

    @property
    def signature(self) -> tuple[tuple[Any, ...] | None, ...]:
        """All but the pointers: two calls of equal signature can share a plan."""
        return tuple((v.dtype, v.shape, v.strides, v.device) if v else None for v in self.views)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Their pointers in the same order, 0 for what is left out."""
        return tuple(view.pointer if view else 0 for view in self.views)

    @property
    def ragged(self) -> bool:
        """Whether requests have query tokens of different number."""
        return self.q_cu_seq_lens is not None

    @property
    def batch(self) -> int:
        """Requests."""
        return self.seq_lens.shape[0] if self.ragged else self.q.shape[0]

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return prod(self.q.shape[:-2])

    @property
    def q_len(self) -> int | None:
        """Query tokens of each request; None where they differ."""
        if self.ragged:
            return None
        return self.q.shape[1] if len(self.q.shape) == 4 else 1

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.q.shape[-2]

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q_heads // self.k.shape[2]


def decode_tensors(given: Given, kv_layout: str) -> DecodeTensors:
    """The views of one call's tensors, which come in the order of ``TENSOR_NAMES``; None from lse on: left out.

    Raises:
        UsageError: something is no CUDA tensor, or a cache has another rank than 4.
    """
    pairs = list(zip(given, TENSOR_NAMES, strict=True))
    q, k, v, page_table, seq_lens, out = [view_of(tensor, name) for tensor, name in pairs[:REQUIRED]]
    optional = [None if tensor is None else view_of(tensor, name) for tensor, name in pairs[REQUIRED:]]
    lse, q_cu_seq_lens, mask, sinks, softmax_scale, output_scale = optional
    return DecodeTensors(
        q=q,
        k=cache_view(k, "k_cache", kv_layout),
        v=cache_view(v, "v_cache", kv_layout),
        page_table=page_table,
        seq_lens=seq_lens,
        out=out,
        lse=lse,
        q_cu_seq_lens=q_cu_seq_lens,
        mask=mask,
        sinks=sinks,
        softmax_scale=flat_scalar(softmax_scale),
        output_scale=flat_scalar(output_scale),
    )


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


def token_stride(name: str, view: TensorView, trailing: int) -> int:
    """Elements between the query tokens of ``view``, whose last ``trailing`` dimensions belong to one token.

    In front of them stands ``[tokens]`` or ``[batch, q_len]``; the latter must lie like the former.

    Raises:
        UsageError: they do not; the message names the tensor.
    """
    shape, strides = view.shape[:-trailing], view.strides[:-trailing]
    if len(shape) == 1 or shape[1] == 1:
        return strides[0]
    (batch, q_len), (request, token) = shape, strides
    if batch > 1 and request != q_len * token:
        raise UsageError(
            f"{name}: strides {view.strides}, expected all tokens at one stride: {q_len * token} elements between "
            f"requests of {q_len} tokens {token} elements apart"
        )
    return token


@dataclass(frozen=True, slots=True)
class ScaleProduct:
    """A scale that is a number times a tensor on the device, float32 of one element; None: the number alone."""

    number: float = 1.0
    tensor: Any = None


def split_scale(value: Any, name: str) -> tuple[float | None, Any]:
    """A scale as ``(number, tensor)``; None is no number, or no tensor.

    Raises:
        UsageError: it is neither a number nor a tensor, nor a product of them, or a number that float32 cannot hold.
    """
    if type(value) is ScaleProduct:
        return float32_number(name, value.number), value.tensor
    if value is None:
        return None, None
    if type(value) is float or isinstance(value, Real):
        return float32_number(name, value), None
    if isinstance(value, TensorView) or any(hasattr(value, has) for has in _TENSOR_MARKS):
        return None, value
    raise UsageError(f"{name}: got {type(value).__name__}, expected a number or a float32 CUDA tensor of one element")


def float32_number(name: str, value: Any) -> float:
    """A number that is finite as float32, and times log2(e) too, as kernels want it.

    Raises:
        UsageError: it is not; the message begins with ``name``.
    """
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -_MAX_SCALE <= number <= _MAX_SCALE:
        raise UsageError(f"{name}={number}: expected a finite number, at most {_MAX_SCALE:.3g} in size")
    return number


_MAX_SCALE = 2.0**127
_TENSOR_MARKS = ("data_ptr", "__cuda_array_interface__", "__dlpack__")


def forms_of(given: Given) -> tuple[Any, ...] | None:
    """What torch tensors are but for their addresses, kept as they came so that comparing them is cheap.

    None where something is no torch tensor.
    """
    forms: list[Any] = []
    for tensor in given:
        if tensor is None:
            forms.append(None)
        elif hasattr(tensor, "get_device"):
            forms.append((type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()))
        else:
            return None
    return tuple(forms)


def addresses_of(given: Given, forms: tuple[Any, ...] | None) -> tuple[int, ...] | None:
    """The addresses of torch tensors of known forms; None where anything differs."""
    if forms is None:
        return None
    addresses = []
    for tensor, form in zip(given, forms):  # noqa: B905  (strict costs time; both have every tensor)
        if tensor is None or form is None:
            if tensor is not form:
                return None
            addresses.append(0)
        elif (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()) != form:
            return None
        else:
            addresses.append(tensor.data_ptr())
    return tuple(addresses)


def difference(came: DecodeTensors, planned: DecodeTensors) -> str:
    """The first tensor that is not of the form that a plan was made for, in words.

    Raises:
        AssertionError: there is none.
    """
    for name, a, b in zip(came.names, came.signature, planned.signature, strict=True):
        if a and b and a[3] != b[3]:
            return f"{name}: on device {a[3]}, planned for device {b[3]}"
        if a != b:
            return f"{name}: dtype, shape, strides, device {a or 'of no tensor'}, planned for {b or 'no tensor'}"
    raise AssertionError("equal signatures")


def flat_scalar(view: TensorView | None) -> TensorView | None:
    """A scale as ``[1]``, which may come as ``[]`` or ``[1, 1]``: to a plan they are the same."""
    if view is None or prod(view.shape) != 1:
        return view
    return TensorView(view.pointer, view.dtype, (1,), (1,), view.device)
