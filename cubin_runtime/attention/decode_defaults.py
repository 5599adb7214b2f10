"""What a decode takes where the caller leaves something out: a scale, an output, a bound read back, a workspace."""

from __future__ import annotations

import math
from itertools import pairwise
from math import prod
from typing import Any

from ..errors import UsageError
from ..launch.semaphore_workspace import SemaphoreWorkspace
from ..launch.streams import stream_handle
from ..launch.workspace import Workspace
from .decode_checks import MAX_Q_LEN, check_query_bounds, integer
from .runtime import Runtime
from .views import view_of


def softmax_number_of(number: float | None, tensor: Any, q: Any) -> float:
    """The number in the kernel's struct; 1 where the device has the scale."""
    if number is not None:
        return number
    if tensor is not None:
        return 1.0
    shape = getattr(q, "shape", ())
    return 1 / math.sqrt(shape[-1]) if shape and shape[-1] else 1.0  # the rules refuse what has no head_dim


def made_output(runtime: Runtime, q: Any) -> Any:
    """An output like ``q``; bfloat16 for e4m3 queries.

    Raises:
        UsageError: ``q`` is no tensor that one can be made from.
    """
    like = view_of(q, "q")
    try:
        return runtime.memory.empty(q, like.shape, "bfloat16" if like.dtype == "float8_e4m3fn" else None)
    except UsageError as error:
        raise UsageError(f"out: None, expected a tensor ({error})") from error


def plan_bound(max_seq_len: int) -> int:
    """The bound that a kept plan has for a call with this one: lengths grow, powers of two keep a plan for long."""
    return 1 << max(6, (integer("max_seq_len", max_seq_len) - 1).bit_length())


def check_workspace(workspace: object) -> None:
    """Raise ``UsageError`` for what is no workspace of ours, such as a tensor."""
    if not isinstance(workspace, (Workspace, SemaphoreWorkspace)):
        raise UsageError(f"workspace: got {type(workspace).__name__}, expected a Workspace or a SemaphoreWorkspace")


def longest_of(runtime: Runtime, q: Any, q_cu_seq_lens: Any, stream: Any) -> int:
    """The most query tokens of a request, read back from the device.

    Raises:
        UsageError: q_cu_seq_lens is not what it should be or cannot be read, or a request has too many.
    """
    view, tokens = view_of(q_cu_seq_lens, "q_cu_seq_lens"), prod(view_of(q, "q").shape[:-2])
    check_query_bounds(view)
    driver = runtime.driver
    with driver.using(driver.context_on(view.device)):
        if driver.is_capturing(stream_handle(stream)):
            raise UsageError("max_q_len: None while a stream captures, expected the bound")
    try:
        bounds = runtime.memory.to_host(q_cu_seq_lens)
    except UsageError as error:
        raise UsageError(f"max_q_len: None, expected the bound ({error})") from error
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens:
        came = f"from {bounds[0]} to {bounds[-1]}" if bounds else "empty"
        raise UsageError(f"q_cu_seq_lens: {came}, expected from 0 to q's {tokens} tokens")
    for before, after in pairwise(bounds):
        if after < before:
            raise UsageError(f"q_cu_seq_lens: {before} is followed by {after}, expected none to decrease")
        if after - before > MAX_Q_LEN:
            raise UsageError(f"q_cu_seq_lens: a request of {after - before} query tokens, expected at most {MAX_Q_LEN}")
    return max((after - before for before, after in pairwise(bounds)), default=0) or 1
