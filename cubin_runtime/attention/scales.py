"""Scales as callers give them: a number, a scalar on the device, or a product of both."""

from __future__ import annotations

from math import prod
from numbers import Real
from typing import Any

from ..errors import UsageError
from ..tensor import TensorView
from ..values import dataclass
from .checks import real

MAX_SCALE = 2.0**127
_TENSOR_MARKS = ("data_ptr", "__cuda_array_interface__", "__dlpack__")


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
    raise UsageError(
        f"got {type(value).__name__}, expected a number or a float32 CUDA tensor of one element", argument=name
    )


def float32_number(name: str, value: Any) -> float:
    """A number that is finite as float32, and times log2(e) too, as kernels want it.

    Raises:
        UsageError: it is not; the message begins with ``name``.
    """
    number = real(name, value)
    if not -MAX_SCALE <= number <= MAX_SCALE:
        raise UsageError(f"expected a finite number, at most {MAX_SCALE:.3g} in size", argument=name, value=number)
    return number


def flat_scalar(view: TensorView) -> TensorView:
    """A scale on the device as ``[1]``, which may come as ``[]`` or ``[1, 1]``: to a plan they are the same."""
    return view if prod(view.shape) != 1 else TensorView(view.pointer, view.dtype, (1,), (1,), view.device)
