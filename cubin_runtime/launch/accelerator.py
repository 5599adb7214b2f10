"""The optional accelerator, whose C makes the launches and walks the tables of calls as Python does."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from struct import Struct
from typing import Any

_ABI = 8
# The attributes that it reads, and the rows of its tables, as its C declares them.
NAMES = ("_current_level", "of_legacy", "owner", "claimed")
MAX_FIELDS = 64
MAX_FACTORS = 8
MAX_DIMS = 6
FIELD = Struct("@Ic3x")  # offset, code
MAP = b"M"  # the code of a descriptor, which gets another address
TEST = Struct("@iiPqq")  # kind, slot, what the argument is compared with, low, high
ROW = Struct("@iiiQQ")  # slot, whether its address counts and is part of the key, mask, rest
FORM = Struct(f"@PiiiBBH{2 * MAX_DIMS}q")  # class, type and number of the device, dimensions, dtype, sizes, strides
SIZE = Struct("@iq")  # kind, number
STREAM_QUERY = Struct("@PPPQ")  # cuStreamIsCapturing, cuStreamGetId, handle, number
SOURCE = Struct("@iiiq" + MAX_FACTORS * "id")  # kind, tensor, factors, offset, slot and constant of each factor


@cache  # an import that fails is tried anew each time
def accelerator() -> Any | None:
    """The module ``cubin_runtime_accelerator``, where it is installed and fits."""
    try:
        import cubin_runtime_accelerator as module
    except ImportError:
        return None
    return module if module.ABI == _ABI else None


def packed(row: Struct, rows: Iterable[Iterable[Any]]) -> bytes:
    """The rows of a table as the accelerator reads them."""
    return b"".join([row.pack(*values) for values in rows])
