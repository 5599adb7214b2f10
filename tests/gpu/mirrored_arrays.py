"""Host arrays mirrored on the device: a view lies in the copy of its memory as it does on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubin_runtime.attention import TensorView
from cubin_runtime.launch.driver import Driver
from cubin_runtime.testing.device import DeviceArrays

_DTYPES = {np.dtype(np.float32): "float32", np.dtype(np.int32): "int32", np.dtype(np.bool_): "bool"}


class MirroredArrays:
    """Copies of whole host allocations, each made when a view of it is first placed."""

    def __init__(self, driver: Driver, fill: int, arrays: DeviceArrays | None = None) -> None:
        """Every byte of what ``make`` gives is ``fill``."""
        self._driver, self._fill = driver, fill
        self.arrays = arrays or DeviceArrays(driver)
        self._copies: dict[int, tuple[np.ndarray, int]] = {}

    def make(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Memory of its own on the host."""
        memory = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, self._fill, np.uint8)
        return memory.view(dtype).reshape(shape)

    def place(self, array: np.ndarray, dtype: str | None = None) -> TensorView:
        """The view on the device, with what the host has now where it is the first of its memory."""
        whole, copy = self._copy_of(array)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        at = copy + _address(array) - _address(whole)
        return TensorView(at, dtype or _DTYPES[array.dtype], array.shape, strides)

    def upload(self, array: np.ndarray) -> None:
        """Copy the memory of a placed array to the device again."""
        whole, copy = self._copy_of(array)
        self._driver.copy_to_device(copy, whole)

    def download(self, array: np.ndarray) -> None:
        """Copy the memory of a placed array back, once the device is done."""
        whole, copy = self._copy_of(array)
        self._driver.synchronize(0)
        self._driver.copy_to_host(whole, copy)

    def close(self) -> None:
        self.arrays.close()

    def _copy_of(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        whole: Any = array
        while (below := getattr(whole, "base", None)) is not None:
            whole = below
        if id(whole) not in self._copies:
            self._copies[id(whole)] = whole, self.arrays.upload(whole)
        return self._copies[id(whole)]


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
