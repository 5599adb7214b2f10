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
    value: Any = device
    ordinal = value
    if getattr(value, "type", None) == "cuda":
        ordinal = value.index or 0
    elif hasattr(value, "device_id"):
        ordinal = value.device_id
    elif type(value).__name__ == "CUdevice":
        ordinal = int(value)
    if not isinstance(ordinal, int) or isinstance(ordinal, bool) or ordinal < 0:
        raise UsageError(
            f"got {device!r}, expected an ordinal, a CUDA device of torch, one of cuda.core or a CUdevice",
            argument="device",
        )
    return ordinal
