"""Making tensors and reading them back: the one place where an operator needs a framework."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import UsageError
from ..tensor import is_torch


class TensorMemory(Protocol):
    """What operators ask of a framework; ``like`` is a tensor of the caller whose device (and kind) counts.

    Dtypes are words of ``views.ITEM_BYTES``. Everything but ``to_host`` is in stream order and may be captured.
    """

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
        """A new contiguous tensor; ``dtype`` None takes that of ``like``."""
        ...

    def zeros(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """A new contiguous tensor of zeros."""
        ...

    def scaled(self, tensor: Any, factor: float) -> Any:
        """A new tensor, ``tensor`` times ``factor``, computed on the device."""
        ...

    def product(self, first: Any, second: Any) -> Any:
        """A new tensor, the product of two tensors of one element, computed on the device."""
        ...

    def to_host(self, tensor: Any) -> tuple[int, ...]:
        """The integers of a one-dimensional tensor; waits for the device."""
        ...

    def current_stream(self, like: Any) -> int:
        """The handle of the stream for new work: on the device of the tensor ``like``, or that of this number."""
        ...


class TorchMemory:
    """``TensorMemory`` for torch tensors; torch is imported when it is first needed.

    A caller with other tensors passes all outputs itself; what would have to be made here is a ``UsageError``.
    """

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
        """As ``TensorMemory``."""
        _check_torch(like, "an output")
        import torch

        return torch.empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype), device=like.device)

    def zeros(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """As ``TensorMemory``."""
        _check_torch(like, "counters")
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device)

    def scaled(self, tensor: Any, factor: float) -> Any:
        """As ``TensorMemory``."""
        _check_torch(tensor, "a scale in base 2")
        return tensor * factor

    def product(self, first: Any, second: Any) -> Any:
        """As ``TensorMemory``."""
        _check_torch(first, "a product of scales")
        _check_torch(second, "a product of scales")
        return first.reshape(1) * second.reshape(1)

    def to_host(self, tensor: Any) -> tuple[int, ...]:
        """As ``TensorMemory``."""
        _check_torch(tensor, "host values")
        return tuple(int(value) for value in tensor.tolist())

    def current_stream(self, like: Any) -> int:
        """As ``TensorMemory``; the legacy default stream for tensors that are not torch's."""
        if not isinstance(like, int) and not is_torch(like):
            return 0
        import torch

        # The raw query costs 0.06 us where torch.cuda.current_stream() costs 2.9.
        return int(torch._C._cuda_getCurrentRawStream(like if isinstance(like, int) else like.device.index))


def _check_torch(tensor: Any, what: str) -> None:
    if not hasattr(tensor, "new_empty"):
        raise UsageError(
            f"{what} would be made from a {type(tensor).__name__}, which is no torch tensor: pass it yourself"
        )
