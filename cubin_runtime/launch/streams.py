"""Reading a stream handle from whatever a caller has: an int, ``__cuda_stream__``, a torch stream."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError

_LEGACY = 1
_HANDLES = 1 << 64
_BINDINGS = ("CUstream", "cudaStream_t")  # classes of cuda.bindings, which have no protocol but int()


def stream_handle(stream: Any) -> int:
    """The CUstream of ``stream`` as an int; ``None``, 0 and 1 (``CU_STREAM_LEGACY``) are the legacy default stream, 0.

    2 (``CU_STREAM_PER_THREAD``) stays 2: another stream in every thread.

    Takes an int, an object with the ``__cuda_stream__`` protocol (version 0; method or attribute) as cuda.core has, one
    with a ``cuda_stream`` attribute as torch has, or a stream of cuda.bindings.

    Raises:
        UsageError: it is none of these, or of an unknown protocol version.
    """
    if stream is None:
        return 0
    handle = stream if isinstance(stream, int) else _handle_of(stream)
    if not 0 <= handle < _HANDLES:
        text = handle if abs(handle) < _HANDLES else f"an integer of {handle.bit_length()} bits"
        raise UsageError(
            "expected a handle, which is not negative and has at most 64 bits", argument="stream", value=text
        )
    return 0 if handle == _LEGACY else int(handle)


def _handle_of(stream: Any) -> int:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        try:
            version, handle = answer
            if version == 0:
                return int(handle)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"stream.__cuda_stream__ gave {answer!r}: expected (0, handle)") from error
        raise UsageError(f"stream.__cuda_stream__ gave {answer!r}: expected (0, handle)")
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    text = type(stream).__name__
    if text in _BINDINGS:
        return int(stream)
    raise UsageError(
        f"got {text}, expected an int, __cuda_stream__, a torch stream or one of cuda.bindings", argument="stream"
    )
