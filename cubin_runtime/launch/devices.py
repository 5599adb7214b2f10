"""Reading a device's ordinal from whatever a caller has: an int, a torch device, one of cuda-python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from ..protocols import Device


def device_ordinal(device: Device) -> int:
    """The ordinal of ``device``: an int, a ``torch.device``, a ``Device`` of cuda.core or a ``CUdevice``.

    Raises:
        UsageError: it is none of these, or negative.
    """
    came: Any = device
    ordinal = came
    if getattr(came, "type", None) == "cuda":
        ordinal = came.index or 0
    elif hasattr(came, "device_id"):
        ordinal = came.device_id
    elif type(came).__name__ == "CUdevice":
        ordinal = int(came)
    if not isinstance(ordinal, int) or isinstance(ordinal, bool) or ordinal < 0:
        raise UsageError(
            f"device: got {device!r}, expected an ordinal, a CUDA device of torch, one of cuda.core or a CUdevice"
        )
    return ordinal
