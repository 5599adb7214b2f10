"""Elements of tensors in device memory: read as they are, contiguous, and written back in their strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ...dtypes import ITEM_BYTES
from ...errors import UsageError
from ...launch.driver import Driver
from ...tensor import TensorView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def numpy_for(what: str) -> Any:
    """numpy.

    Raises:
        UsageError: it is not installed; the message says for ``what`` it is needed.
    """
    try:
        import numpy
    except ImportError as error:
        raise UsageError(f"{what} needs numpy: pip install 'cubin-runtime[replay]'") from error
    return numpy


def span_of(view: TensorView) -> int:
    """Bytes from a tensor's address to the end of its last element; 0 if it has none."""
    if not prod(view.shape):
        return 0
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    return (last + 1) * ITEM_BYTES[view.dtype]


def read_elements(driver: Driver, view: TensorView) -> bytes:
    """The elements of ``view`` in the order of its shape; waits for nothing, needs a current context."""
    if not prod(view.shape):
        return b""
    raw = driver.read(view.pointer, span_of(view))
    return raw if view.is_contiguous else bytes(_strided(bytearray(raw), view).tobytes())


def write_elements(driver: Driver, view: TensorView, data: bytes) -> None:
    """Give ``view`` elements that ``read_elements`` read; what lies between them stays."""
    import numpy as np

    if not data:
        return
    if view.is_contiguous:
        driver.copy_to_device(view.pointer, data)
        return
    raw = bytearray(driver.read(view.pointer, span_of(view)))
    strided = _strided(raw, view)
    strided[...] = np.frombuffer(data, dtype=strided.dtype).reshape(view.shape)
    driver.copy_to_device(view.pointer, raw)


def page_of(view: TensorView, page: int) -> TensorView:
    """One entry of the first dimension."""
    pointer = view.pointer + page * view.strides[0] * ITEM_BYTES[view.dtype]
    return replace(view, pointer=pointer, shape=view.shape[1:], strides=view.strides[1:])


def pages_named(table: NDArray[np.int32], lengths: NDArray[Any], page_size: int, pages: int) -> tuple[int, ...]:
    """The pages of a pool of ``pages`` that the rows of a table name up to the lengths of their requests."""
    import numpy as np

    columns = np.ceil(np.clip(lengths, 0, None) / page_size)
    rows = table.reshape(len(lengths), -1, table.shape[-1])
    named = np.broadcast_to((np.arange(table.shape[-1]) < columns[:, None])[:, None], rows.shape)
    ids = np.unique(rows[named])
    return tuple(int(page) for page in ids if 0 <= page < pages)


def array_of(view: TensorView, data: bytes, shape: Sequence[int] | None = None) -> NDArray[Any]:
    """Elements as an array: integers, float32 and float64 as they are, narrow floats as their bits."""
    import numpy as np

    dtype = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}.get(view.dtype, view.dtype)
    return np.frombuffer(data, dtype=dtype).reshape(view.shape if shape is None else shape)


def _strided(raw: bytearray, view: TensorView) -> NDArray[Any]:
    import numpy as np

    size = ITEM_BYTES[view.dtype]
    flat = np.frombuffer(raw, dtype=f"V{size}")
    return np.lib.stride_tricks.as_strided(flat, view.shape, [stride * size for stride in view.strides])
