"""Reading a stream handle from whatever a caller has: an int, ``__cuda_stream__``, a torch stream."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError


def stream_handle(stream: Any) -> int:
    """The CUstream of ``stream`` as an int; ``None`` and 0 mean the legacy default stream.

    Takes an int, an object with the ``__cuda_stream__`` protocol (version 0; method or attribute), or one
    with a ``cuda_stream`` attribute as torch has.

    Raises:
        UsageError: it is none of these, or of an unknown protocol version.
    """
    if stream is None:
        return 0
    if isinstance(stream, int):
        if stream < 0:
            raise UsageError(f"stream={stream}: expected a handle, which is not negative")
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        if not isinstance(answer, tuple) or len(answer) != 2 or answer[0] != 0:
            raise UsageError(f"stream.__cuda_stream__ gave {answer!r}: expected (0, handle)")
        return int(answer[1])
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    came = type(stream).__name__
    raise UsageError(f"stream: got {came}, expected an int, __cuda_stream__ or a torch stream")
