"""Decode over contiguous caches that are new tensors, a token longer, at every step, as a DynamicCache has them.

A plan is made for the next power of two of the length, 1,024 or more. What follows from the length itself, the form of
the descriptors and the place of the lengths, is found once in a step and shared by its layers: only addresses differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from ..dtypes import ITEM_BYTES
from ..launch.tensormap import TensorMapSpec
from ..tensor import TensorView, view_of
from .fast_path.guards import form_test, is_plain
from .fast_path.operator_function import is_compiling, is_suspended
from .hook import installed
from .operators.paged_decode import PAGED_DECODE, PagedDecodeOptions, plan_paged_decode
from .paged_cache import has_decode_kernel, strides_of
from .runtime import default, default_runtime, shared_bounds

if TYPE_CHECKING:
    from .runtime import Runtime

_MOST_FORMS = 4  # kinds of layers of a model
_MOST_THREADS = 64
_SMALLEST_BOUND = 1024
_ROWS = 256  # lengths, one after another, that are made on the device together
_ALIGNED = 15  # bits of an address that are 0
_VALUES = {name: number for number, name in enumerate(PAGED_DECODE.values)}
_CACHES = ("k_cache", "v_cache")
_Q, _K, _V, _OUT, _LENS, _SINKS = (_VALUES[name] for name in ("q", *_CACHES, "out", "seq_lens", "sinks"))


def decode_growing(
    q: Any, k: Any, v: Any, *, softmax_scale: float | None = None, window_left: int = -1, sinks: Any = None
) -> Any:
    """Attention of one new token per request over all of caches whose length grows; None: it is not served here.

    Args:
        q: torch, bf16 or fp16 ``[batch, 1, heads, head_dim]``.
        k, v: torch, of the same dtype ``[batch, tokens, kv_heads, head_dim]``, strides in multiples of 16 bytes.
        softmax_scale, window_left: numbers, as ``paged_decode`` has them.
        sinks: float32 ``[heads]``, or None.

    Returns:
        ``[batch, 1, heads, head_dim]``, contiguous.

    Raises:
        UsageError: as ``paged_decode``, which has the same rules.
    """
    torch = sys.modules["torch"]
    if is_compiling() or is_suspended() or installed.hook is not None or torch._C._len_torch_dispatch_stack():
        return None
    if torch.autograd.forward_ad._current_level >= 0:
        return None
    runtime = default.runtime or default_runtime()
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    options = softmax_scale, window_left, len(tensors)  # a guard takes as many tensors as it was made of
    forms = runtime.growing.get(get_ident(), ())
    form = next((form for form in forms if form.options == options and form.takes(tensors)), None)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # the graph would need the lengths for itself
    if form is None:
        form = _new_form(runtime, options, tensors)
        if form is None:
            return None
        if len(runtime.growing) >= _MOST_THREADS:
            runtime.growing.clear()
        runtime.growing[get_ident()] = (form, *forms[: _MOST_FORMS - 1])
    return form.run(tensors)


class GrowingForm:
    """The calls of one thread on one stream over caches that differ in their length alone, up to ``bound`` tokens."""

    def __init__(
        self,
        runtime: Runtime,
        options: tuple[float | None, int, int],
        tensors: Sequence[Any],
        alike: Callable[..., bool],
    ) -> None:
        """``alike`` tests the tensors' forms but for the length of the caches.

        Raises:
            UsageError: as ``paged_decode``.
        """
        q, k, *_ = tensors
        named = zip(("q", *_CACHES, "sinks"), tensors, strict=False)
        views: dict[str, Any] = {name: view_of(tensor, name) for name, tensor in named}
        self.options = options
        self.shortest, self.bound = shared_bounds(k.shape[1], _SMALLEST_BOUND)
        self._alike = alike
        self._device, self._query = views["q"].device, runtime.memory.stream_query
        self._stream = self._query(self._device)
        self._scale = q.shape[-1] ** -0.5 if options[0] is None else options[0]
        self._table = _numbers(q, k.shape[0], 0)[:, :1]
        self._first, self._lengths = 0, _numbers(q, 0, 0)
        self._at: tuple[Any, ...] = ()
        self._numbers: Sequence[Any] | None = None  # of a length that nothing was sent with
        arguments = {**views, "page_table": view_of(self._table, "page_table"), "out": _contiguous(views["q"])}
        arguments["seq_lens"] = TensorView.contiguous(
            arguments["page_table"].pointer, "int32", (k.shape[0],), self._device
        )
        _check(arguments, options[1])
        self._views = arguments
        arguments = arguments | {name: _longer(views[name], self.bound) for name in _CACHES}
        key = (__name__, options[1], tuple([view.spec for view in arguments.values()]))
        self.plan = runtime.plans.get(
            key,
            lambda: plan_paged_decode(**arguments, max_seq_len=self.bound, window_left=options[1], runtime=runtime),
        )
        self._values = [arguments["page_table"].pointer if name == "page_table" else 0 for name in _VALUES]
        self._driver, self._context = self.plan.driver, self.plan.driver.context_on(self._device)
        self._send = self.plan.sender(self._stream, (_Q, _OUT, _SINKS))
        maps = [self.plan.launches[0].plan.values.get(name) for name in ("k_map", "v_map")]
        self._specs = [spec for spec in maps if isinstance(spec, TensorMapSpec)]

    @property
    def served(self) -> bool:
        """Return whether the kernel reads both caches by descriptors of one form."""
        return len(self._specs) == len(_CACHES) and self._specs[0] == self._specs[1]

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Return whether a call with these tensors is one of them."""
        near = self._alike(*tensors) and self.shortest <= tensors[1].shape[1] <= self.bound
        return near and self._query(self._device) == self._stream

    def run(self, tensors: Sequence[Any]) -> Any:
        """The output of a call; None where an address is not aligned."""
        q, k, v, *more = tensors
        at = k.shape, v.shape, k.stride(), v.stride()
        if at != self._at:
            self._at = ()
            self._move(q, k, v)
            self._at = at
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_at | k_at | v_at) & _ALIGNED:
            return None
        out = q.new_empty(q.shape)
        values = self._values
        values[_Q], values[_K], values[_V], values[_OUT] = q_at, k_at, v_at, out.data_ptr()
        if more:
            values[_SINKS] = more[0].data_ptr()
        encode_k, encode_v = self._encode
        with self._driver.using(self._context):
            maps = {_K: encode_k(k_at), _V: encode_v(v_at)}
        self._send(values, self._numbers, maps)
        self._numbers = None
        return out

    def _move(self, q: Any, k: Any, v: Any) -> None:
        """Find what follows from the length.

        Raises:
            UsageError: as ``paged_decode``, for caches that are not what a new tensor is.
        """
        batch, length, heads, columns = k.shape
        if k.shape == v.shape and all(cache.transpose(1, 2).is_contiguous() for cache in (k, v)):
            row = columns * k.element_size()
            form = {"dims": (columns, length, heads, batch), "strides": (row, length * row, heads * length * row)}
            encode = self._driver.tiled_encoder(**self._specs[0].words() | form)
            self._encode = encode, encode
        else:
            views = {name: view_of(cache, name) for name, cache in zip(_CACHES, (k, v), strict=True)}
            _check(self._views | views, self.options[1])
            specs = [_of_length(self._specs[0], view) for view in views.values()]
            self._encode = specs[0].encoder(self._driver), specs[1].encoder(self._driver)
        if not self._first <= length < self._first + len(self._lengths):
            self._first = length - length % _ROWS
            self._lengths = _numbers(q, _ROWS, self._first).expand(-1, batch).contiguous()
        scales = {"softmax_scale": self._scale, "output_scale": 1.0}
        self._numbers = self.plan.operator.launch_numbers(self.plan.options, scales, length)
        self._values[_LENS] = self._lengths.data_ptr() + (length - self._first) * batch * ITEM_BYTES["int32"]


def _new_form(runtime: Runtime, options: tuple[float | None, int, int], tensors: Sequence[Any]) -> GrowingForm | None:
    """The form of a call's tensors; None: it is not served.

    Raises:
        UsageError: as ``paged_decode``.
    """
    q, k, v, *_ = tensors
    if not all(is_plain(tensor) and not tensor.requires_grad for tensor in tensors):
        return None
    if v.shape != k.shape or k.shape[0] != q.shape[0] or q.shape[1] != 1:
        return None
    heads, head_dim = q.shape[2:]
    if not has_decode_kernel(heads, k.shape[2], head_dim, head_dim) or type(options[0]) not in (float, type(None)):
        return None
    alike = _test_of(tensors)
    if alike is None:
        return None
    form = GrowingForm(runtime, options, tensors, alike)
    return form if form.served else None


def _test_of(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """The test of the tensors' forms, with any strides and lengths of the caches; None where it cannot be had."""
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    for cache in (1, 2):
        sizes[cache][1] = None
        strides[cache] = [None] * 4
    return form_test(tensors, sizes, strides)


def _check(views: Mapping[str, TensorView], window_left: int) -> None:
    """Raise ``UsageError`` for a call that breaks a rule of ``paged_decode``."""
    options = PagedDecodeOptions(max_seq_len=views["k_cache"].shape[1], window_left=window_left)
    arguments = {arg.name: views.get(arg.name) for arg in PAGED_DECODE.tensors}
    PAGED_DECODE.check(PAGED_DECODE.call(PAGED_DECODE.read(arguments, options), options))


def _contiguous(view: TensorView) -> TensorView:
    return TensorView.contiguous(view.pointer, view.dtype, view.shape, view.device)


def _longer(cache: TensorView, length: int) -> TensorView:
    """A cache of so many tokens, whose heads are apart."""
    batch, _, heads, columns = cache.shape
    strides = (heads * length * columns, columns, length * columns, 1)
    return TensorView(cache.pointer, cache.dtype, (batch, length, heads, columns), strides, cache.device)


def _of_length(spec: TensorMapSpec, cache: TensorView) -> TensorMapSpec:
    """The descriptor of a plan for a cache of another length."""
    page, token, head = (stride * ITEM_BYTES[cache.dtype] for stride in strides_of(cache))
    dims = (spec.dims[0], cache.shape[1], *spec.dims[2:])
    return spec._replace(address=0, dims=dims, strides=(token, head, page))


def _numbers(like: Any, count: int, first: int) -> Any:
    """int32 ``[count, 1]`` from ``first``, on the device of a tensor."""
    import torch

    with torch.inference_mode(False):
        return torch.arange(first, first + count, dtype=torch.int32, device=like.device)[:, None]
