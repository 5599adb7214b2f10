"""Allocating torch tensors and reading them back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from math import prod
from typing import Any

from ..errors import UsageError
from ..tensor import is_torch
from .fast_path.notes import note_made, note_unrepeatable


class TorchMemory:
    """``TensorMemory`` for torch tensors; torch is imported when it is first needed.

    Outputs are made for cuda.core's ``StridedMemoryView`` too. A caller with other tensors passes all outputs itself;
    what would have to be made here is a ``UsageError``.
    """

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
        """As ``TensorMemory``."""
        if type(like).__module__.startswith("cuda.core"):
            return _strided_view(like, shape, dtype)
        _check_torch(like, "an output")
        import torch

        torch_dtype = like.dtype if dtype is None else getattr(torch, dtype)
        if torch_dtype is like.dtype and like.shape == shape and like.is_contiguous():
            return note_made(torch.empty_like(like), torch.empty_like, (like,))
        make = partial(torch.empty, shape, dtype=torch_dtype, device=like.device)
        return note_made(make(), make)

    def zeros(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """As ``TensorMemory``."""
        _check_torch(like, "counters")
        import torch

        make = partial(torch.zeros, shape, dtype=getattr(torch, dtype), device=like.device)
        return note_made(make(), make)

    def scaled(self, tensor: Any, factor: float) -> Any:
        """As ``TensorMemory``."""
        _check_torch(tensor, "a scale in base 2")
        return note_made(tensor * factor, lambda scale: scale * factor, (tensor,))

    def check_scalable(self, name: str, tensor: Any) -> None:
        """As ``TensorMemory``."""
        if not is_torch(tensor):
            raise UsageError(
                f"got {type(tensor).__name__}, expected a torch tensor where its base is changed", argument=name
            )

    def scale_in_place(self, tensor: Any, factor: float) -> None:
        """As ``TensorMemory``; a call that does it takes the full path each time."""
        note_unrepeatable()
        import torch

        with torch.inference_mode():  # outside of it, torch lets nobody change tensors that were made in it
            tensor.mul_(factor)

    def product(self, first: Any, second: Any) -> Any:
        """As ``TensorMemory``."""
        _check_torch(first, "a product of scales")
        _check_torch(second, "a product of scales")
        return note_made(_product(first, second), _product, (first, second))

    def lengthened(self, name: str, lengths: Any, by: Any) -> Any:
        """As ``TensorMemory``."""
        _check_counts(name, (lengths, by), "where lengths are added")
        if isinstance(by, int):
            return note_made(lengths + by, lambda lengths: lengths + by, (lengths,))
        return note_made(_lengthened(lengths, by), _lengthened, (lengths, by))

    def causal(self, name: str, lengths: Any, q_lens: Any, tokens: int) -> Any:
        """As ``TensorMemory``."""
        _check_counts(name, (lengths, q_lens), "to count keys by")
        if isinstance(q_lens, int):
            make = partial(_causal, q_lens=q_lens)
            return note_made(make(lengths), make, (lengths,))
        make = partial(_causal_ragged, tokens=tokens)
        return note_made(make(lengths, q_lens), make, (lengths, q_lens))

    def to_host(self, tensor: Any) -> tuple[int, ...]:
        """As ``TensorMemory``."""
        _check_torch(tensor, "host values")
        note_unrepeatable()
        return tuple(int(value) for value in tensor.flatten().tolist())

    def current_stream(self, like: Any) -> int:
        """As ``TensorMemory``; the legacy default stream for tensors that are not torch's."""
        if not isinstance(like, int) and not is_torch(like):
            return 0
        return self.stream_query(like if isinstance(like, int) else like.device.index)

    @cached_property
    def stream_query(self) -> Callable[[int], int]:
        """As ``TensorMemory``."""
        import torch

        # It costs 0.06 us where torch.cuda.current_stream() costs 2.9.
        query: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        return query


def _strided_view(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    """A view of cuda.core over a buffer of the device's current memory resource, which may be used on any stream.

    Raises:
        UsageError: numpy has no such dtype, or no memory can be had, as in a capture.
    """
    import numpy
    from cuda.core import LEGACY_DEFAULT_STREAM, Device
    from cuda.core.utils import StridedMemoryView

    note_unrepeatable()
    try:
        numpy_dtype = like.dtype if dtype is None or dtype == str(like.dtype) else numpy.dtype(dtype)
        nbytes = max(1, prod(shape)) * numpy_dtype.itemsize
        buffer = Device(like.device_id).memory_resource.allocate(nbytes, stream=LEGACY_DEFAULT_STREAM)
        LEGACY_DEFAULT_STREAM.sync()  # allocation is in stream order, and the call may be on another stream
        return StridedMemoryView.from_buffer(buffer, shape, dtype=numpy_dtype)
    except Exception as error:  # errors of cuda.core and numpy have no base in common
        raise UsageError(f"an output would be made by cuda.core, which says: {error}: pass it yourself") from error


def _product(first: Any, second: Any) -> Any:
    return first.reshape(1) * second.reshape(1)


def _lengthened(lengths: Any, sums: Any) -> Any:
    return lengths + sums.diff()


def _causal(lengths: Any, q_lens: int) -> Any:
    import torch

    behind = torch.arange(1 - q_lens, 1, dtype=torch.int32, device=lengths.device)
    return (lengths[:, None] + behind).flatten()


def _causal_ragged(lengths: Any, sums: Any, tokens: int) -> Any:
    import torch

    token = torch.arange(tokens, dtype=torch.int32, device=lengths.device)
    request = torch.searchsorted(sums[1:-1], token, right=True)  # the last one of tokens behind all requests
    return (lengths - sums[1:])[request] + token + 1


def _check_counts(name: str, values: tuple[Any, ...], purpose: str) -> None:
    other = next((value for value in values if not isinstance(value, int) and not is_torch(value)), None)
    if other is not None:
        raise UsageError(f"got {type(other).__name__}, expected torch tensors {purpose}", argument=name)


def _check_torch(tensor: Any, what: str) -> None:
    if not hasattr(tensor, "new_empty"):
        raise UsageError(
            f"{what} would be made from a {type(tensor).__name__}, which is not a torch tensor: pass it yourself"
        )
