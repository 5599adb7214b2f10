"""Tensors that flash-attention's layouts need beyond our operators': views, and small tensors made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...attention.fast_path.operator_function import is_compiling
from ...attention.runtime import default_runtime
from ...errors import UsageError
from ...tensor import view_of
from ..shapes import is_torch, shape_of

_MOST_CACHED = 64
_cache: dict[tuple[Any, ...], tuple[Any, Any]] = {}


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


def divided(sums: Any, used: Any) -> Any:
    """Running sums of twice as many requests: the tokens of each that are used, and the others. Made on the device."""
    _check_torch(sums, "cu_seqlens_q", "running sums for seqused_q would be made")
    _check_torch(used, "seqused_q", "running sums would be made")
    check_like(used, "seqused_q", sums.shape[0] - 1)
    import torch

    return torch.cat((torch.stack((sums[:-1], sums[:-1] + used), 1).flatten(), sums[-1:]))


def without_keys(sums: Any) -> Any:
    """Running sums of KV lengths with a request of no keys behind each; made on the device."""
    _check_torch(sums, "cu_seqlens_k", "running sums for seqused_q would be made")
    return sums.repeat_interleave(2)[1:]


def with_zeros(lengths: Any, name: str) -> Any:
    """The lengths with a 0 behind each; made on the device."""
    _check_torch(lengths, name, "lengths for seqused_q would be made")
    import torch

    return torch.stack((lengths, torch.zeros_like(lengths)), 1).flatten()


def repeated(rows: Any, name: str) -> Any:
    """Each row of a tensor twice; made on the device."""
    _check_torch(rows, name, "rows for seqused_q would be made")
    return rows.repeat_interleave(2, 0)


def for_each_part(scale: Any, batch: int) -> Any:
    """A scale of ``batch`` requests for twice as many; any other as it is."""
    return repeated(scale, "k_descale") if is_torch(scale) and scale.dim() == 2 and scale.shape[0] == batch else scale


def chosen(table: Any, table_name: str, rows: Any, rows_name: str) -> Any:
    """The rows of a page table with these numbers; made on the device."""
    _check_torch(table, table_name, f"its rows by {rows_name} would be taken")
    _check_torch(rows, rows_name, f"rows of {table_name} would be taken")
    check_like(rows, rows_name, None)
    return table[rows]


def check_like(tensor: Any, name: str, length: int | None) -> None:
    """Raise ``UsageError`` unless it is an int32 vector, of ``length`` elements if that is not None."""
    (count,) = shape_of(tensor, name, 1)
    if view_of(tensor, name).dtype != "int32":
        raise UsageError(f"dtype {view_of(tensor, name).dtype}, expected int32", argument=name)
    if length is not None and count != length:
        raise UsageError(f"shape ({count},), expected ({length},)", argument=name)


def dtype_of(tensor: Any, name: str) -> str:
    """The name of a tensor's dtype; torch can trace it."""
    return str(tensor.dtype).removeprefix("torch.") if is_torch(tensor) else view_of(tensor, name).dtype


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
    constants = _cache.get(key)
    if constants is None:
        if len(_cache) >= _MOST_CACHED:
            _cache.clear()
        with torch.inference_mode(False):
            constants = _cache[key] = _make(batch, length, device)
    return constants


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
        raise UsageError(f"{what} from a {type(tensor).__name__}, which is not a torch tensor", argument=name)
