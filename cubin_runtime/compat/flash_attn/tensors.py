"""What flash-attention's layouts need beyond our operators' tensors: views, and small tensors made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...attention.fast_path import is_compiling
from ...attention.process import default_runtime
from ...errors import UsageError
from ...tensor import view_of
from ..shapes import is_torch, shape_of

_MOST_MADE = 64
_made: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def permuted(tensor: Any, order: Sequence[int]) -> Any:
    """The same memory with its dimensions in another order."""
    if is_torch(tensor):
        return tensor.permute(*order)
    view = view_of(tensor, "softmax_lse", written=True)
    shape, strides = (tuple(of[axis] for axis in order) for of in (view.shape, view.strides))
    return replace(view, shape=shape, strides=strides)


def new_lse(q: Any, shape: tuple[int, ...]) -> Any:
    """A float32 tensor on the device of ``q``."""
    if is_torch(q):
        import torch

        return q.new_empty(shape, dtype=torch.float32)
    return default_runtime().memory.empty(q, shape, "float32")


def in_float32(tensor: Any) -> Any:
    """A 16-bit tensor of torch's as float32, made on the device; any other as it is."""
    return tensor.float() if is_torch(tensor) and tensor.element_size() == 2 else tensor


def differences(sums: Any, name: str) -> Any:
    """The lengths whose running sums these are, made on the device."""
    _check_torch(sums, name, "lengths would be made from running sums")
    return sums[1:] - sums[:-1]


def lengthened(lengths: Any, more: Any) -> Any:
    """``lengths`` and ``more``, which is a number or a tensor, made on the device."""
    _check_torch(lengths, "cache_seqlens", "lengths with the new tokens would be made")
    return lengths + more


def filled(like: Any, batch: int, length: int) -> Any:
    """Lengths that are all the same, made on the device."""
    _check_torch(like, "cache_seqlens", "lengths would be made from a number")
    return _constants(like, batch, length)[1]


def numbers(like: Any, count: int) -> Any:
    """int32 ``[count, 1]`` from 0, made on the device."""
    _check_torch(like, "block_table", "a table of a cache without pages would be made")
    return _constants(like, count, 0)[0]


def whole_cache(like: Any, batch: int, length: int) -> tuple[Any, Any]:
    """Page table and lengths of a torch cache without pages, all of which is used: ``numbers`` and ``filled``."""
    return _constants(like, batch, length)


def _constants(like: Any, batch: int, length: int) -> tuple[Any, Any]:
    """Tensors that nobody writes, those of an earlier call on the stream where there are some: layers ask alike.

    What is made while torch traces, or while the stream captures, belongs to what is traced or captured.
    """
    import torch

    device = like.device
    if is_compiling() or type(like) not in (torch.Tensor, torch.nn.Parameter):
        return _make(batch, length, device)
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _make(batch, length, device)
        stream = default_runtime().memory.current_stream(like)
    key = (batch, length, device, stream)
    found = _made.get(key)
    if found is None:
        if len(_made) >= _MOST_MADE:
            _made.clear()
        with torch.inference_mode(False):
            found = _made[key] = _make(batch, length, device)
    return found


def _make(batch: int, length: int, device: Any) -> tuple[Any, Any]:
    import torch

    table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    return table, torch.full((batch,), length, dtype=torch.int32, device=device)


def column(vector: Any, name: str) -> Any:
    """``[n]`` as ``[n, 1]``; raises ``UsageError`` for another rank."""
    shape = shape_of(vector, name, 1)
    if is_torch(vector):
        return vector[:, None]
    view = view_of(vector, name)
    return replace(view, shape=(*shape, 1), strides=(*view.strides, 1))


def _check_torch(tensor: Any, name: str, what: str) -> None:
    if not is_torch(tensor):
        raise UsageError(f"{name}: {what} from a {type(tensor).__name__}, which is not a torch tensor")
