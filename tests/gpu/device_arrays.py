"""Host arrays on the device, and poisoned memory with a guard behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubin_runtime.attention import TensorView
from cubin_runtime.launch.driver import Driver

POISON = 0xFF  # NaN in bf16, fp16, e4m3 and fp32
GUARD = 256


class DeviceArrays:
    """Host arrays copied to the device, freed at the end."""

    def __init__(self, driver: Driver, guard: int = GUARD) -> None:
        """``guard`` bytes behind each array; 0 where a sanitizer is to see the first byte too much."""
        self.driver = driver
        self.guard = guard
        self._held: list[tuple[int, int]] = []

    def upload(self, array: np.ndarray) -> int:
        address = self.empty(array.nbytes)
        if array.nbytes:
            self.driver.copy_to_device(address, np.ascontiguousarray(array))
        return address

    def empty(self, nbytes: int) -> int:
        """Poisoned memory."""
        size = max(1, nbytes + self.guard)
        address = self.driver.allocate(size)
        self._held.append((address, nbytes))
        self.driver.fill(address, POISON, size, 0)
        return address

    def download(self, view: TensorView, dtype: Any) -> np.ndarray:
        """A contiguous view's content."""
        host = np.empty(view.shape, dtype=dtype)
        if host.nbytes:
            self.driver.copy_to_host(host, view.pointer)
        return host

    def assert_guards(self) -> None:
        """Nothing was written behind any array."""
        for address, nbytes in self._held:
            guard = self.driver.read(address + nbytes, self.guard)
            assert guard == bytes([POISON]) * self.guard, f"written behind an array of {nbytes} bytes"

    def close(self) -> None:
        for address, _ in self._held:
            self.driver.free(address)
        self._held.clear()
