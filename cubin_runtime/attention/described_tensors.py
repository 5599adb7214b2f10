"""Tensors without memory, of torch's meta device or fake ones, as views at invented addresses: enough to plan with."""

from __future__ import annotations

import sys
from typing import Any

from ..dtypes import is_dtype
from ..tensor import TensorView, dtype_word, is_torch

_FIRST_ADDRESS = 1 << 44  # far above what any driver gives out, and aligned for every access
_ALIGNMENT = 1 << 21


def describe_tensors(arguments: dict[str, Any]) -> None:
    """Replace tensors without memory by views at invented addresses, for a plan on a described device.

    Views of one storage stay views of one memory, so that rules about overlaps see what they would see on a device.
    Other arguments stay, other tensors among them.
    """
    addresses: dict[int, int] = {}
    free = _FIRST_ADDRESS
    for name, tensor in arguments.items():
        if not _has_no_memory(tensor) or not is_dtype(dtype := dtype_word(tensor.dtype)):
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in addresses:
            addresses[storage._cdata] = free
            free += -(-(storage.nbytes() + 1) // _ALIGNMENT) * _ALIGNMENT
        address = addresses[storage._cdata] + tensor.storage_offset() * tensor.element_size()
        arguments[name] = TensorView(address, dtype, tuple(tensor.shape), tensor.stride(), tensor.device.index or 0)


def _has_no_memory(tensor: Any) -> bool:
    if not is_torch(tensor) or (torch := sys.modules.get("torch")) is None:
        return False
    if tensor.device.type == "meta":
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return isinstance(tensor, torch.Tensor) and fake is not None and isinstance(tensor, fake.FakeTensor)
