"""Tensors that flash-attention's layouts need beyond our operators': views, and small tensors made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...attention.fast_path.operator_function import is_compiling, is_intercepted
from ...attention.operator import dtype_of
from ...attention.runtime import default_runtime
from ...errors import UsageError
from ...tensor import view_of
from ..shapes import check_torch, check_vector, is_torch, shape_of

_MOST_CACHED = 64
_NO_PAGE = -1
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
    """A bf16 or fp16 tensor of torch's as float32, made on the device; any other as it is."""
    return tensor.float() if is_torch(tensor) and dtype_of(tensor, "sinks") in ("bfloat16", "float16") else tensor


def requests_of(sums: Any) -> int:
    """The number of requests whose query tokens these are running sums of; raises ``UsageError`` if there is none."""
    (count,) = shape_of(sums, "cu_seqlens_q", 1)
    if count < 2:
        raise UsageError(f"shape ({count},), expected (batch + 1,) for 1 request or more", argument="cu_seqlens_q")
    return count - 1


def differences(sums: Any, name: str, batch: int) -> Any:
    """The lengths of ``batch`` requests whose running sums these are, made on the device."""
    check_vector(sums, name, batch + 1, "lengths would be made from running sums")
    return sums[1:] - sums[:-1]


def divided(sums: Any, used: Any, batch: int) -> Any:
    """Running sums of twice as many requests: the tokens of each that are used, and the others. Made on the device.

    A request uses no fewer than none of its tokens and no more than all.
    """
    check_vector(sums, "cu_seqlens_q", batch + 1, "running sums for seqused_q would be made")
    check_vector(used, "seqused_q", batch, "running sums would be made")
    check_together(used, "seqused_q", sums, "cu_seqlens_q")
    import torch

    begins = sums[:-1]
    unused = begins + used.clamp(min=0).minimum(sums.diff())  # or tokens of other requests would be written too
    return torch.cat((torch.stack((begins, unused), 1).flatten(), sums[-1:]))


def without_keys(sums: Any, batch: int) -> Any:
    """Running sums of KV lengths with a request of no keys behind each; made on the device."""
    check_vector(sums, "cu_seqlens_k", batch + 1, "running sums for seqused_q would be made")
    return sums.repeat_interleave(2)[1:]


def with_zeros(lengths: Any, batch: int) -> Any:
    """The lengths with a 0 behind each; made on the device."""
    check_vector(lengths, "seqused_k", batch, "lengths for seqused_q would be made")
    import torch

    return torch.stack((lengths, torch.zeros_like(lengths)), 1).flatten()


def repeated(rows: Any, name: str) -> Any:
    """Each row of a matrix twice; made on the device."""
    check_torch(rows, name, "rows for seqused_q would be made")
    shape_of(rows, name, 2)
    return rows.repeat_interleave(2, 0)


def for_each_part(scale: Any, name: str, batch: int) -> Any:
    """A scale of ``batch`` requests for twice as many; any other as it is."""
    is_of_requests = is_torch(scale) and len(shape := shape_of(scale, name)) == 2 and shape[0] == batch
    return repeated(scale, name) if is_of_requests else scale


def chosen(table: Any, table_name: str, rows: Any, rows_name: str, batch: int) -> Any:
    """The rows of a page table with the numbers of ``batch`` requests, without a page for other numbers; made on the
    device."""
    check_torch(table, table_name, f"its rows by {rows_name} would be taken")
    shape = shape_of(table, table_name, 2)
    if shape[0] < 1:
        raise UsageError(f"shape {shape}, expected 1 row or more", argument=table_name)
    if dtype_of(table, table_name) != "int32":
        raise UsageError(f"dtype {dtype_of(table, table_name)}, expected int32", argument=table_name)
    check_vector(rows, rows_name, batch, f"rows of {table_name} would be taken")
    check_together(rows, rows_name, table, table_name)
    # torch would count negative numbers from the last row, whose request an append would then write to.
    there = rows.clamp(0, shape[0] - 1)
    return table[there].masked_fill((there != rows)[:, None], _NO_PAGE)


def check_together(tensor: Any, name: str, other: Any, other_name: str) -> None:
    """Raise ``UsageError`` unless two torch tensors are on one device."""
    if tensor.device != other.device:
        raise UsageError(f"on {tensor.device}, {other_name} is on {other.device}", argument=name)


def lengthened(lengths: Any, new: int, sums: Any, batch: int) -> Any:
    """The lengths of requests with ``new`` tokens more, or with those of running ``sums``; made on the device."""
    check_vector(lengths, "cache_seqlens", batch, "lengths with the new tokens would be made")
    if sums is None:
        return lengths + new
    more = differences(sums, "cu_seqlens_k_new", batch)
    check_together(sums, "cu_seqlens_k_new", lengths, "cache_seqlens")
    return lengths + more


def filled(like: Any, batch: int, length: int) -> Any:
    """Lengths that are all the same, made on the device."""
    check_torch(like, "cache_seqlens", "lengths would be made from a number")
    return whole_cache(like, batch, length)[1]


def numbers(like: Any, count: int) -> Any:
    """int32 ``[count, 1]`` from 0, made on the device."""
    check_torch(like, "block_table", "a table of a cache without pages would be made")
    return whole_cache(like, count, 0)[0]


def whole_cache(like: Any, batch: int, length: int) -> tuple[Any, Any]:
    """Page table and lengths of a torch cache without pages, all of which is used: ``numbers`` and ``filled``.

    Nobody writes them, and they are those of an earlier call on the stream where there are some: layers ask alike.
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
        with torch.inference_mode(False):
            constants = _make(batch, length, device)
        if is_intercepted(constants):
            return constants  # which end with the mode or transform that they were made in
        if len(_cache) >= _MOST_CACHED:
            _cache.clear()
        _cache[key] = constants
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
