"""The three functions that attention goes through, with flash-attention's signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


class Operators(NamedTuple):
    """Functions as those of ``cubin_runtime.compat.flash_attn``, which they are by default.

    ``even`` is called as ``flash_attn_func``, ``ragged`` as ``flash_attn_varlen_func``, ``cached`` as
    ``flash_attn_with_kvcache``. A test without a GPU gives functions of its own.
    """

    even: Callable[..., Any] = flash_attn_func
    ragged: Callable[..., Any] = flash_attn_varlen_func
    cached: Callable[..., Any] = flash_attn_with_kvcache
