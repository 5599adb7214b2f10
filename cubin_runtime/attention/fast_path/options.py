"""What options of a call are, beyond numbers and words: values of other libraries, streams that torch must know of."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def is_immutable(value: Any) -> bool:
    """Whether an option is a value that stays as it is: a dtype of torch's, a runtime, a mark."""
    torch = sys.modules.get("torch")
    from ..runtime import Runtime
    from ..torch_ops import TorchScratch

    return isinstance(value, (Runtime, TorchScratch)) or (torch is not None and isinstance(value, torch.dtype))


def record_use(stream: int, device: int, tensors: Sequence[Any]) -> None:
    """Tell torch's allocator that ``stream`` uses tensors that the current stream may free."""
    from torch.cuda import ExternalStream

    used_on = ExternalStream(stream, device=device)
    for tensor in tensors:
        tensor.record_stream(used_on)
