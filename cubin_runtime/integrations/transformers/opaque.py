"""A mask that layers may hand on, and nothing may compute with. Imports torch: import it where a mask is made."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UsageError

# Operations that move or describe a tensor. ``__get__`` is every attribute, such as ``shape``.
_ALLOWED = {
    *("__get__", "__getitem__", "__len__", "__repr__", "__format__", "__hash__", "__reduce_ex__", "__deepcopy__"),
    *("clone", "contiguous", "cpu", "cuda", "detach", "expand", "to", "size", "stride", "dim", "numel", "data_ptr"),
    *("element_size", "get_device", "is_contiguous", "is_floating_point", "storage_offset", "record_stream"),
}


class OpaqueMask(torch.Tensor):  # type: ignore[misc]
    """A tensor whose values only ``masks.read`` gets, as ``plain``: they are no entries for queries and keys."""

    plain: torch.Tensor
    last_read: Any = None  # the result of ``masks.read`` for it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise ``UsageError`` for a function that computes."""
        name = getattr(func, "__name__", str(func))
        if name not in _ALLOWED:
            raise UsageError(
                f"attention_mask: the model computes with its mask ({name}), and this implementation's has no entry "
                "for each key; use sdpa or eager for this model"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return opaque(result) if type(result) in (torch.Tensor, cls) else result


def opaque(plain: torch.Tensor) -> Any:
    """The tensor as a mask that refuses to be computed with."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = plain.as_subclass(torch.Tensor)
        mask = plain.as_subclass(OpaqueMask)
    mask.plain = plain
    return mask
