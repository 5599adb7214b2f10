"""The framework's part of an operator: allocating tensors and reading them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class TensorMemory(Protocol):
    """The requests of operators to a framework; ``like`` is a tensor of the caller whose device (and kind) counts.

    Dtypes are words of ``dtypes.ITEM_BYTES``. Everything but ``to_host`` is in stream order and may be captured.
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

    def check_scalable(self, name: str, tensor: Any) -> None:
        """Raise ``UsageError`` unless ``scale_in_place`` can change the argument ``name``."""
        ...

    def scale_in_place(self, tensor: Any, factor: float) -> None:
        """Multiply ``tensor`` by ``factor`` on the device."""
        ...

    def product(self, first: Any, second: Any) -> Any:
        """A new tensor, the product of two tensors of one element, computed on the device."""
        ...

    def lengthened(self, name: str, lengths: Any, by: Any) -> Any:
        """A new tensor: the argument ``name``, int32 ``lengths``, each plus ``by``, computed on the device.

        ``by`` is an int, or a tensor of one entry more, whose differences are added.
        """
        ...

    def causal(self, name: str, lengths: Any, q_lens: Any, tokens: int) -> Any:
        """A new tensor, int32 ``[tokens]``: how many keys each query token sees, its own the last of them.

        It is computed on the device. The argument ``name`` is ``lengths``, int32 ``[batch]``: the keys of each request,
        those of its query tokens included. ``q_lens`` is an int, the query tokens of every request, or a tensor of
        their prefix sums. A query token without keys may get a number below 0.
        """
        ...

    def to_host(self, tensor: Any) -> tuple[int, ...]:
        """The integers of a tensor, the last dimension fastest; waits for the device."""
        ...

    def current_stream(self, like: Any) -> int:
        """The handle of the stream for new work: on the device of the tensor ``like``, or that of this number."""
        ...

    @property
    def stream_query(self) -> Callable[[int], int]:
        """The function that gives the handle of the stream for new work on the device of a number."""
        ...
