"""Merging attention states: the operators of ``flashinfer.cascade``.

States are merged in float32 in the order in which they are given, so the same states give the same bits. Log-sum-exps
are float32 in base 2; a state with -inf does not count, whatever its values are. Of nothing the merge is 0 and -inf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...attention.operators.merge_states import merge_states as merge_operator
from ...attention.runtime import default_runtime
from ...errors import UsageError, WorkspaceError
from ..renaming import renamed
from ..shapes import is_torch, shape_of

if TYPE_CHECKING:
    from ...tensor import QueryT, Tensor

_NAMES = {"parts": "v", "part_lses": "s"}
_IN_PLACE_NAMES = {**_NAMES, "out": "v", "lse": "s", "other": "v_other", "other_lse": "s_other"}
_PAIR_NAMES = {"parts": "v_a", "part_lses": "s_a", "other": "v_b", "other_lse": "s_b"}


def merge_state(v_a: QueryT, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[QueryT, Any]:
    """Merge two attention states.

    Args:
        v_a, v_b: ``[tokens, heads, head_dim]``, bf16, fp16 or fp32 and alike, head_dim a multiple of 8, strides in
            multiples of 16 bytes.
        s_a, s_b: float32 ``[tokens, heads]``, any strides.

    Returns:
        The merged values, like ``v_a``, and their log-sum-exp.
    """
    for name, tensor, rank in (("v_a", v_a, 3), ("v_b", v_b, 3), ("s_b", s_b, 2)):
        shape_of(tensor, name, rank)
    try:
        lse = _new_lse(s_a, "s_a", 2)
        return merge_operator(v_a, s_a, other=v_b, other_lse=s_b, lse=lse, enable_pdl=True), lse
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _PAIR_NAMES) from error


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge another attention state into ``(v, s)``.

    Args:
        v, s, v_other, s_other: as ``v_a``, ``s_a``, ``v_b`` and ``s_b`` of ``merge_state``.
        mask: bool or uint8 ``[tokens]``: tokens with 0 stay as they are. None: all are merged.
    """
    for name, tensor, rank in (("v", v, 3), ("v_other", v_other, 3), ("s_other", s_other, 2)):
        shape_of(tensor, name, rank)
    try:
        merge_operator(v, s, other=v_other, other_lse=s_other, out=v, lse=s, mask=mask, enable_pdl=True)
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _IN_PLACE_NAMES) from error


def merge_states(v: QueryT, s: Tensor) -> tuple[QueryT, Any]:
    """Merge several attention states.

    Args:
        v: ``[tokens, states, heads, head_dim]``, as ``v_a`` of ``merge_state``.
        s: float32 ``[tokens, states, heads]``, any strides.

    Returns:
        The merged values ``[tokens, heads, head_dim]`` and their log-sum-exp ``[tokens, heads]``.
    """
    shape_of(v, "v", 4)
    lse = _new_lse(s, "s", 3)
    try:
        return merge_operator(v, s, lse=lse, enable_pdl=True), lse
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _NAMES) from error


def _new_lse(s: Any, name: str, rank: int) -> Any:
    """A log-sum-exp for each token and head of ``s``."""
    shape = shape_of(s, name, rank)
    if is_torch(s):
        return s.new_empty((shape[0], shape[-1]))
    return default_runtime().memory.empty(s, (shape[0], shape[-1]), None)
