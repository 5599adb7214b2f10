"""Streams, events and graph capture. Handles are ints; 0 is the legacy default stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from . import driver_api as api
from .driver_core import DriverCore


class _StreamState(ctypes.Structure):
    """What ``stream_identity`` asks for, in one piece of memory."""

    _fields_ = (("status", ctypes.c_int), ("capture", ctypes.c_uint64), ("number", ctypes.c_ulonglong))


class DriverStreams(DriverCore):
    """Stream, event and graph calls; all need a current context and raise ``DriverCallError``."""

    def __init__(self, library_path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(library_path)
        self._states: list[tuple[_StreamState, int]] = []  # memory of ``stream_identity`` that no thread has

    def create_stream(self, *, blocking: bool = False) -> int:
        """A new stream; ``blocking`` ones synchronise with the legacy default stream."""
        return self.out_pointer("cuStreamCreate", 0 if blocking else api.STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        """Release a stream; its work still runs to the end."""
        self.call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Wait for all work of the stream; a fault of its kernels surfaces here."""
        self.call("cuStreamSynchronize", stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether ``stream`` captures; for 0 also true while another, blocking stream captures."""
        status = ctypes.c_int()
        code = self.function("cuStreamIsCapturing")(stream, ctypes.addressof(status))
        if code == api.CAPTURE_IMPLICIT:
            return True
        if code:
            raise self.error("cuStreamIsCapturing", code)
        return status.value != api.CAPTURE_NONE

    def stream_identity(self, stream: int) -> tuple[int | None, int]:
        """The capture that ``stream`` takes part in, or None; and a number that is the stream's alone, 0 in a capture.

        Handles of destroyed streams come back, numbers do not. A capturing stream is not asked for its number: that is
        an error and spoils the capture.
        """
        try:
            state, at = self._states.pop()
        except IndexError:
            state = _StreamState()
            at = ctypes.addressof(state)
        code = self.function("cuStreamGetCaptureInfo")(stream, at, at + 8, None, None, None, None)
        if code:
            raise self.error("cuStreamGetCaptureInfo", code)
        if state.status != api.CAPTURE_NONE:
            return state.capture, 0
        code = self.function("cuStreamGetId")(stream, at + 16)
        if code:
            raise self.error("cuStreamGetId", code)
        number = state.number
        self._states.append((state, at))
        return None, number

    def stream_query(self, stream: int, number: int) -> Callable[[], bool]:
        """A function that tells whether ``stream``, not a default one, has that number of its own and does not capture.

        Threads may share it.
        """
        state = _StreamState()
        at = ctypes.addressof(state)
        capturing, identify = self.function("cuStreamIsCapturing"), self.function("cuStreamGetId")
        # In this order: to ask a capturing stream for its number would spoil the capture.
        return lambda: (
            not (capturing(stream, at) or state.status or identify(stream, at + 16)) and state.number == number
        )

    def stream_context(self, stream: int) -> int:
        """The context that a stream belongs to; for a default stream the current one. Not while it captures."""
        slot = ctypes.c_void_p()
        self.call("cuStreamGetCtx", stream, ctypes.addressof(slot))
        return slot.value or 0

    def captured_graph(self, stream: int) -> int:
        """The graph that the capture of ``stream`` is filling."""
        status, graph = ctypes.c_int(), ctypes.c_void_p()
        slots = (ctypes.addressof(status), None, ctypes.addressof(graph), None, None, None)
        self.call("cuStreamGetCaptureInfo", stream, *slots)
        return graph.value or 0

    def retain_in_graph(self, graph: int, data: int, destroy: int) -> None:
        """Let the driver call the C function at ``destroy`` with ``data`` once the graph is gone for good.

        That is when the graph, every executable made from it and their last replays have ended. The function runs on
        a thread of the driver's: it must not call CUDA, nor Python.
        """
        held = self.out_pointer("cuUserObjectCreate", data, destroy, 1, api.USER_OBJECT_NO_DESTRUCTOR_SYNC)
        self.call("cuGraphRetainUserObject", graph, held, 1, api.GRAPH_USER_OBJECT_MOVE)

    def create_event(self, *, timing: bool = True) -> int:
        """A new event; without ``timing`` it is cheaper and good for ordering only."""
        return self.out_pointer("cuEventCreate", 0 if timing else api.EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        """Release an event."""
        self.call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """Let the event mark this point of the stream."""
        self.call("cuEventRecord", event, stream)

    def synchronize_event(self, event: int) -> None:
        """Wait on the host until the event's point is reached."""
        self.call("cuEventSynchronize", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds on the device between two recorded, finished timing events."""
        slot = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.addressof(slot), start, end)
        return slot.value
