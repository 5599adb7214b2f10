"""Registration at transformers' public interfaces."""

from __future__ import annotations

import functools

from ...errors import UsageError
from .attention import attention, paged_attention
from .masks import mask
from .operators import Operators


def register(name: str = "cubin_runtime", operators: Operators | None = None) -> str:
    """Make our attention an implementation of transformers' models, under ``name`` and ``paged|name``.

    Args:
        name: what ``attn_implementation`` will be. Names that transformers gives a meaning of their own are refused.
        operators: the functions that attend; None: ``cubin_runtime.compat.flash_attn``'s.

    Returns:
        ``name``, for ``model.set_attn_implementation(register())``.

    Raises:
        UsageError: ``name`` is empty, or holds ``|``, ``/``, ``:``, ``flash``, ``flex``, ``sdpa`` or ``eager``.
        ImportError: there is no transformers 5.
    """
    reserved = [part for part in ("|", "/", ":", "flash", "flex", "sdpa", "eager") if part in name]
    if reserved or not name:
        raise UsageError(
            f"name={name!r}: expected a name without {reserved or 'nothing in it'}, which transformers reads"
        )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(f"{error}; pip install 'transformers>=5,<6'", name=error.name) from error

    operators = operators or Operators()
    AttentionInterface.register(name, functools.partial(attention, operators))
    AttentionInterface.register(f"paged|{name}", functools.partial(paged_attention, operators))
    AttentionMaskInterface.register(name, mask)
    return name
