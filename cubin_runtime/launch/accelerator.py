"""The optional accelerator, whose C makes the launches and walks the tables of calls as Python does."""

from __future__ import annotations

from functools import cache
from typing import Any

_ABI = 4


@cache  # an import that fails is tried anew each time
def accelerator() -> Any | None:
    """The module ``cubin_runtime_accelerator``, where it is installed and fits."""
    try:
        import cubin_runtime_accelerator as module
    except ImportError:
        return None
    return module if module.ABI == _ABI else None
