"""Scales and the device of a call, and the checks that all calls share."""

from __future__ import annotations

from ...errors import UsageError
from ...tensor import TensorView
from ...values import dataclass
from .arithmetic import INT32_MAX, is_power_of_two
from .errors import ArgumentRefused
from .traits import TENSOR_DTYPES

OUT_SCALE_BLOCK = 16
TOP_K_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU as far as planning needs it: compute capability (100, 103) and number of multiprocessors."""

    sm: int
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Scale:
    """A factor, as a number, or at a device address, which then replaces ``value``."""

    value: float = 1.0
    pointer: int = 0


@dataclass(frozen=True, slots=True)
class OutScales:
    """Block scales of an FP4 output: ``block`` numbers share one scale (16; -1: no FP4 output)."""

    scales: TensorView | None = None
    scale: float = -1.0
    block: int = -1
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class Sage:
    """SageAttention scales of Q, K, P and V, and the number of elements that share one scale."""

    scales: tuple[TensorView | None, TensorView | None, TensorView | None, TensorView | None] = (None, None, None, None)
    blocks: tuple[int, int, int, int] = (0, 0, 0, 0)


NO_OUT_SCALES = OutScales()
NO_SAGE = Sage()


def dtype_of(name: str, tensor: TensorView) -> str:
    """A tensor's element type in the metadata's words.

    Raises:
        UsageError: no kernel takes the type.
    """
    try:
        return TENSOR_DTYPES[tensor.dtype]
    except KeyError:
        raise UsageError(f"dtype {tensor.dtype!r}, expected one of {', '.join(TENSOR_DTYPES)}", argument=name) from None


def check_rank(name: str, tensor: TensorView, *ranks: int) -> None:
    """Raise ``UsageError`` unless a tensor has one of these ranks and a stride for each dimension."""
    if len(tensor.shape) not in ranks or len(tensor.strides) != len(tensor.shape):
        expected = " or ".join(map(str, ranks))
        raise UsageError(f"{name} of shape {tensor.shape}, strides {tensor.strides}: expected {expected} dimensions")


def check_sage(sage: Sage) -> None:
    """Raise ``UsageError`` unless every block size is 0 or a power of two that an int32 holds."""
    for block in sage.blocks:
        if block != 0 and not (is_power_of_two(block) and block <= INT32_MAX):
            raise UsageError(f"SageAttention blocks {sage.blocks}: expected 0 or powers of 2")


def check_length(name: str, value: int) -> None:
    """Raise ``UsageError`` unless ``value`` is a length that an int32 holds."""
    if not 1 <= value <= INT32_MAX:
        raise UsageError(f"expected 1 to {INT32_MAX}", argument=name, value=value)


def check_out_scales(scales: OutScales) -> None:
    """Raise ``ArgumentRefused`` for a block size of output scales that no kernel writes."""
    if scales.block not in (OUT_SCALE_BLOCK, -1):
        raise ArgumentRefused(f"o_sf_vec_size={scales.block}: expected {OUT_SCALE_BLOCK}, or -1 for no FP4 output")


def check_top_k(top_k: int) -> None:
    """Raise ``ArgumentRefused`` unless the number of sparse KV tokens is a multiple of 4."""
    if top_k % TOP_K_MULTIPLE:
        raise ArgumentRefused(f"top_k={top_k}: expected a multiple of {TOP_K_MULTIPLE}")
