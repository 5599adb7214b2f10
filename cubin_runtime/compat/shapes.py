"""Shapes of callers' tensors, read without their addresses: torch may be tracing them."""

from __future__ import annotations

from typing import Any

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
