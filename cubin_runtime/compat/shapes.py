"""Shapes of callers' tensors, read without their addresses: torch may be tracing them."""

from __future__ import annotations

from typing import Any

from ..attention.operator import dtype_of
from ..attention.operator import shape_of as shape_of_any
from ..errors import UsageError


def is_torch(tensor: Any) -> bool:
    """Return whether tensors can be made from it by torch, which may be tracing it."""
    return hasattr(tensor, "new_empty")


def shape_of(tensor: Any, name: str, *ranks: int) -> tuple[int, ...]:
    """The shape of a tensor of one of these ranks, or of any if there are none.

    Raises:
        UsageError: it has another rank, is nested, or is no tensor.
    """
    shape = shape_of_any(tensor, name)
    if ranks and len(shape) not in ranks:
        raise UsageError(
            f"shape {shape}, expected {' or '.join(str(rank) for rank in ranks)} dimensions", argument=name
        )
    return shape


def check_torch(tensor: Any, name: str, what: str) -> None:
    """Raise ``UsageError`` unless it is a strided tensor of torch's; ``what`` says why it must be one."""
    if not is_torch(tensor):
        raise UsageError(f"{what} from a {type(tensor).__name__}, which is not a torch tensor", argument=name)
    import torch

    if tensor.layout is not torch.strided:
        raise UsageError(f"layout {tensor.layout}, expected torch.strided", argument=name)


def check_vector(tensor: Any, name: str, length: int, what: str, dtype: str = "int32") -> None:
    """Raise ``UsageError`` unless ``check_torch`` passes and the tensor has shape ``[length]`` and this dtype."""
    shape = shape_of(tensor, name, 1)
    check_torch(tensor, name, what)
    if dtype_of(tensor, name) != dtype:
        raise UsageError(f"dtype {dtype_of(tensor, name)}, expected {dtype}", argument=name)
    if shape != (length,):
        raise UsageError(f"shape {shape}, expected ({length},)", argument=name)
