"""Fast paths: a call like an earlier one is launched by a function that was generated for it.

The full path of an operator checks, plans and launches. While it runs it notes what it launched (``notes``); from that
and the call's arguments ``generated`` writes a function that tests whether another call is alike, which ``arguments``
does for options and ``guards`` for tensors, and sends it; where the accelerator can, ``at_once`` does most of it in C.
``any_size`` writes one for calls that differ in sizes alone.
``operator_function`` tries those functions before the full path, which is the only source of plans and of errors.
"""

from .notes import FastPaths, Launched, Scratch, note_compared, note_launch, note_made, note_unrepeatable
from .operator_function import (
    CALL_RUNTIME,
    DEFAULT_RUNTIME,
    full_path,
    is_compiling,
    is_suspended,
    operator_function,
    suspend,
    suspendable,
)

__all__ = [
    "CALL_RUNTIME",
    "DEFAULT_RUNTIME",
    "FastPaths",
    "Launched",
    "Scratch",
    "full_path",
    "is_compiling",
    "is_suspended",
    "note_compared",
    "note_launch",
    "note_made",
    "note_unrepeatable",
    "operator_function",
    "suspend",
    "suspendable",
]
