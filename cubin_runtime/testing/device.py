"""Arrays on a device, poisoned until a kernel writes them, with a guard after each; and launches of a cubin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import numpy as np

from ..errors import CubinRuntimeError
from ..launch.driver import Driver
from ..launch.plan import LaunchAttributes
from ..launch.prepared import PreparedLaunches
from ..tensor import TensorView
from .values import is_bits, to_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..protocols import DTypeName
    from .cubin_under_test import CubinUnderTest

POISON = 0xFF  # NaN in bfloat16, float16, float8_e4m3fn and float32
GUARD = 256


class DeviceArrays:
    """Copies of host arrays on the device, freed by ``close``."""

    def __init__(self, driver: Driver, guard: int = GUARD) -> None:
        """``guard`` bytes after each array; 0 if a sanitizer is to detect the first byte past the end."""
        self.driver = driver
        self.guard = guard
        self._held: list[tuple[int, int]] = []

    def upload(self, array: NDArray[Any]) -> int:
        """The address of a copy of ``array``."""
        address = self.empty(array.nbytes)
        if array.nbytes:
            self.driver.copy_to_device(address, np.ascontiguousarray(array))
        return address

    def empty(self, nbytes: int) -> int:
        """The address of poisoned memory."""
        size = max(1, nbytes + self.guard)
        address = self.driver.allocate(size)
        self._held.append((address, nbytes))
        self.driver.fill(address, POISON, size, 0)
        return address

    def download(self, view: TensorView, dtype: Any) -> NDArray[Any]:
        """A contiguous view's content."""
        host = np.empty(view.shape, dtype=dtype)
        if host.nbytes:
            self.driver.copy_to_host(host, view.pointer)
        return host

    def assert_guards(self) -> None:
        """Raise ``AssertionError`` if a kernel wrote past the end of an array."""
        for address, nbytes in self._held:
            guard = self.driver.read(address + nbytes, self.guard)
            assert guard == bytes([POISON]) * self.guard, f"a kernel wrote past the end of an array of {nbytes} bytes"

    def close(self) -> None:
        """Free everything."""
        while self._held:
            address, _ = self._held.pop()
            self.driver.free(address)


_DeviceT = TypeVar("_DeviceT", bound="Device")


class Device(DeviceArrays):
    """A device with its primary context current: arrays as tensors, and launches of cubins. A context manager.

    ``computes`` is False for the stand-in driver, whose kernels do nothing.
    """

    def __init__(self, driver: Driver, *, computes: bool = True, ordinal: int = 0) -> None:
        super().__init__(driver)
        self.computes = computes
        self.facts = driver.device(ordinal)
        self.context = driver.primary_context(ordinal)
        self._before = driver.current_context()
        driver.set_current(self.context)

    def median_microseconds(self, run: Callable[[], object], repeats: int = 30) -> float:
        """The median time of ``run`` on the default stream, by events of the device; caches are warm."""
        begin, end = self.driver.create_event(), self.driver.create_event()
        times = []
        for _ in range(repeats):
            self.driver.record(begin, 0)
            run()
            self.driver.record(end, 0)
            self.driver.synchronize_event(end)
            times.append(self.driver.elapsed_ms(begin, end) * 1e3)
        for event in (begin, end):
            self.driver.destroy_event(event)
        return sorted(times)[repeats // 2]

    def array(self, values: Any, dtype: DTypeName | None = None) -> TensorView:
        """A tensor with these values; for a float dtype, values may also be its bits as unsigned integers of its size.

        ``dtype=None`` takes the dtype of the array.

        Raises:
            UsageError: the dtype is unknown, or an integer dtype cannot represent the values.
        """
        host = np.ascontiguousarray(values)
        name: Any = dtype or host.dtype.name
        if not is_bits(name, host):
            host = to_bits(name, host)
        return TensorView.contiguous(self.upload(host), name, host.shape, self.facts.ordinal)

    def poisoned(self, shape: int | Sequence[int], dtype: DTypeName) -> TensorView:
        """A tensor full of NaN (integers: all bits set), for a kernel to write."""
        like = to_bits(dtype, np.zeros(shape, dtype=np.float32))
        return TensorView.contiguous(self.empty(like.nbytes), dtype, like.shape, self.facts.ordinal)

    def numpy(self, view: TensorView) -> NDArray[Any]:
        """Wait for all work and return a tensor's contents; bfloat16 and float8_e4m3fn as bits, see ``from_bits``."""
        self.driver.synchronize(0)
        return self.download(view, to_bits(view.dtype, np.zeros(1, dtype=np.float32)).dtype)

    def launch(
        self,
        cubin: CubinUnderTest,
        *,
        grid: SupportsIndex | Sequence[SupportsIndex],
        block: SupportsIndex | Sequence[SupportsIndex],
        shared_bytes: int = 0,
        attributes: LaunchAttributes | None = None,
        **fields: Any,
    ) -> None:
        """Check the kernel by the ABI gate, launch it on the default stream and wait for it.

        Args:
            cubin: the kernel and its parameter struct.
            grid, block: one to three numbers.
            shared_bytes: dynamic shared memory of a block.
            attributes: cluster, scheduling policy, PDL; None: none.
            fields: every field of the struct; a tensor stands for its address.

        Raises:
            UsageError: a field is missing or unknown, or a value does not fit.
            AbiError: struct, block or architecture do not fit the cubin or the device.
            DriverError: the launch failed, or the kernel did.
        """
        values = {name: value.pointer if isinstance(value, TensorView) else value for name, value in fields.items()}
        plan = cubin.plan(grid, block, shared_bytes, attributes or LaunchAttributes(), values)
        kernel = cubin.load(self.driver, self.context, plan)
        PreparedLaunches([plan], [kernel], self.driver).run(0)
        self.driver.synchronize(0)
        self.driver.unload_module(kernel.module)

    def close(self) -> None:
        """Free all arrays and restore the context that was current before."""
        try:
            super().close()
        finally:
            self.driver.set_current(self._before)

    def __enter__(self: _DeviceT) -> _DeviceT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def missing_device(driver: Driver) -> str:
    """Return the reason why tests on a device are skipped: the driver cannot be used, or sees no device; or ""."""
    try:
        return "" if driver.device_count() else "needs a CUDA device: the driver sees none"
    except CubinRuntimeError as error:
        return f"needs a CUDA device: {error}"
