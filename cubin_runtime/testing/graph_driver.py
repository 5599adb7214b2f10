"""The driver with functions that only tests and examples use: captures, graphs and copies on the device."""

from __future__ import annotations

import ctypes
from collections import ChainMap
from typing import ClassVar

from ..launch import driver_api as api
from ..launch.driver import Driver

_ADDRESS, _INT, _U64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
PROTOTYPES = {
    "cuMemcpyDtoDAsync": api.Prototype(("cuMemcpyDtoDAsync_v2",), (_U64, _U64, ctypes.c_size_t, _ADDRESS)),
    "cuStreamBeginCapture": api.Prototype(("cuStreamBeginCapture_v2",), (_ADDRESS, _INT)),
    "cuStreamEndCapture": api.Prototype(("cuStreamEndCapture",), (_ADDRESS, _ADDRESS)),
    "cuGraphInstantiate": api.Prototype(("cuGraphInstantiateWithFlags",), (_ADDRESS, _ADDRESS, ctypes.c_ulonglong)),
    "cuGraphLaunch": api.Prototype(("cuGraphLaunch",), (_ADDRESS, _ADDRESS)),
    "cuGraphDestroy": api.Prototype(("cuGraphDestroy",), (_ADDRESS,)),
    "cuGraphExecDestroy": api.Prototype(("cuGraphExecDestroy",), (_ADDRESS,)),
}


class GraphDriver(Driver):
    """The driver with captures, graphs and copies on the device."""

    prototypes: ClassVar = ChainMap(PROTOTYPES, api.PROTOTYPES)

    def capture_id(self, stream: int) -> int | None:
        """The process-wide number of the capture that ``stream`` takes part in, or None."""
        status, identity = ctypes.c_int(), ctypes.c_uint64()
        slots = (ctypes.addressof(status), ctypes.addressof(identity), None, None, None, None)
        code = self.function("cuStreamGetCaptureInfo")(stream, *slots)
        if code:
            raise self.error("cuStreamGetCaptureInfo", code)
        return identity.value if status.value != api.CAPTURE_NONE else None

    def begin_capture(self, stream: int, mode: str = "thread_local") -> None:
        """Record the stream's work instead of running it; ``mode``: global, thread_local or relaxed."""
        if mode not in CAPTURE_MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(CAPTURE_MODES)}")
        self.call("cuStreamBeginCapture", stream, CAPTURE_MODES[mode])

    def end_capture(self, stream: int) -> int:
        """Stop recording; the graph's handle."""
        slot = ctypes.c_void_p()
        self.call("cuStreamEndCapture", stream, ctypes.addressof(slot))
        return slot.value or 0

    def instantiate(self, graph: int) -> int:
        """An executable graph made from ``graph``, which may then be destroyed."""
        return self.out_pointer("cuGraphInstantiate", graph, 0)

    def launch_graph(self, executable: int, stream: int) -> None:
        """Run an executable graph in stream order."""
        self.call("cuGraphLaunch", executable, stream)

    def destroy_graph(self, graph: int) -> None:
        """Release a graph."""
        self.call("cuGraphDestroy", graph)

    def destroy_executable(self, executable: int) -> None:
        """Release an executable graph."""
        self.call("cuGraphExecDestroy", executable)

    def copy_on_device_async(self, to_address: int, from_address: int, nbytes: int, stream: int) -> None:
        """Copy between two device addresses in stream order."""
        self.call("cuMemcpyDtoDAsync", to_address, from_address, nbytes, stream)
