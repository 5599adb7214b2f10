"""Modules and their functions: load, look up, ask for attributes and parameters, occupancy, descriptors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from . import driver_api as api
from .driver_core import DriverCore
from .struct_types import TENSOR_MAP_BYTES


class DriverFunctions(DriverCore):
    """Module and function calls; all need a current context and raise ``DriverCallError``."""

    def load_module(self, image: bytes) -> int:
        """Load a cubin into the current context; the module's handle."""
        buffer = ctypes.create_string_buffer(image, len(image) + 1)
        return self.out_pointer("cuModuleLoadData", ctypes.addressof(buffer))

    def unload_module(self, module: int) -> None:
        """Unload a module; its functions must not be in use."""
        self.call("cuModuleUnload", module)

    def get_function(self, module: int, symbol: str) -> int:
        """The handle of the kernel ``symbol`` in a module."""
        return self.out_pointer("cuModuleGetFunction", module, symbol.encode())

    def finish_loading(self, function: int) -> None:
        """Put the function's code on the device now; by default the driver waits for the first launch.

        Drivers before 12.4 cannot be asked to: there this does nothing.
        """
        if self.has("cuFuncLoad"):
            self.call("cuFuncLoad", function)

    def function_attribute(self, function: int, attribute: int) -> int:
        """A CUfunction_attribute (the ``FUNC_*`` numbers of ``driver_api``)."""
        return self.out_int("cuFuncGetAttribute", attribute, function)

    def allow_dynamic_shared(self, function: int, nbytes: int) -> None:
        """Allow launches of the function with up to ``nbytes`` dynamic shared memory; needed above 48 KiB."""
        self.call("cuFuncSetAttribute", function, api.FUNC_MAX_DYNAMIC_SHARED_BYTES, nbytes)

    def allow_nonportable_cluster(self, function: int) -> None:
        """Allow clusters of more than 8 blocks for the function."""
        self.call("cuFuncSetAttribute", function, api.FUNC_NONPORTABLE_CLUSTER, 1)

    def parameters(self, function: int, count: int) -> tuple[tuple[int, int], ...] | None:
        """(offset, size) in bytes of the first ``count`` parameters, fewer if the function has fewer.

        None where the driver (before 12.4) cannot say.
        """
        if not self.has("cuFuncGetParamInfo"):
            return None
        ask = self.function("cuFuncGetParamInfo")
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        found: list[tuple[int, int]] = []
        # Not one past the last: that call fails by design, and tools that watch the driver report it.
        for index in range(count):
            code = ask(function, index, ctypes.addressof(offset), ctypes.addressof(size))
            if code == api.INVALID_VALUE:  # an index past the last parameter
                break
            if code:
                raise self.error("cuFuncGetParamInfo", code)
            found.append((offset.value, size.value))
        return tuple(found)

    def active_clusters(self, function: int, config: api.LaunchConfig) -> int:
        """How many clusters of the launch ``config`` can be resident on the device at once."""
        return self.out_int("cuOccupancyMaxActiveClusters", function, ctypes.addressof(config))

    def encode_tiled(
        self,
        *,
        dtype: int,
        address: int,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        interleave: int,
        swizzle: int,
        l2_promotion: int,
        fill: int,
    ) -> bytes:
        """The 128 bytes of a tiled TMA descriptor; arguments and rules as in ``tensormap.TensorMapSpec``.

        Nothing is checked here: what the driver refuses comes back as ``DriverCallError``.
        """
        rank = len(dims)
        slot = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
        aligned = (ctypes.addressof(slot) + 63) & ~63
        arrays = (
            (ctypes.c_uint64 * max(1, rank))(*dims),
            (ctypes.c_uint64 * max(1, len(strides)))(*strides),
            (ctypes.c_uint32 * max(1, len(box)))(*box),
            (ctypes.c_uint32 * max(1, len(element_strides)))(*element_strides),
        )
        where = [ctypes.addressof(array) for array in arrays]
        self.call(
            "cuTensorMapEncodeTiled",
            *(aligned, dtype, rank, address, *where, interleave, swizzle, l2_promotion, fill),
        )
        return ctypes.string_at(aligned, TENSOR_MAP_BYTES)
