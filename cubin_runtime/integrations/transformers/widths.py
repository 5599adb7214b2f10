"""Head dimensions that no kernel has, on those that one has: columns of zeros, and values in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...kernels.native.prefill.select import VALUE_DIMS
from .operators import Operators


def fits(head_dim: int, value_dim: int) -> bool:
    """Return whether a kernel takes queries and keys of ``head_dim`` columns with values of ``value_dim``."""
    return VALUE_DIMS.get(head_dim) == value_dim


def fitting(operators: Operators, head_dim: int, value_dim: int) -> Operators:
    """The operators for queries, keys and values of these columns.

    Columns of zeros change neither scores nor the other columns of the output. Values that are wider than those of the
    kernel take a call for each part. Head dimensions above all that there are stay as they are, and are refused later.
    """
    if fits(head_dim, value_dim):
        return operators
    wider = [dim for dim in sorted(VALUE_DIMS) if dim >= head_dim]
    # Of those that leave the values whole, the smallest; else the one that takes them in the fewest parts.
    padded = next((dim for dim in wider if VALUE_DIMS[dim] >= value_dim), wider[0] if wider else None)
    if padded is None:
        return operators
    if -(-value_dim // VALUE_DIMS[wider[0]]) * wider[0] <= padded:
        padded = wider[0]
    return Operators(*(_fitted(function, head_dim, padded) for function in operators))


def _fitted(function: Callable[..., Any], head_dim: int, padded: int) -> Callable[..., Any]:
    part = VALUE_DIMS[padded]

    def call(q: Any, k: Any, v: Any, *rest: Any, out: Any = None, softmax_scale: Any = None, **options: Any) -> Any:
        import torch

        options["softmax_scale"] = head_dim**-0.5 if softmax_scale is None else softmax_scale
        q, k = _wide(q, padded), _wide(k, padded)
        outs = []
        for values in v.split(part, dim=-1):
            columns = values.shape[-1]
            # The caller's buffer holds zeros where no query is, so these hold them, too.
            tensors = (
                {} if out is None else {"out": torch.zeros(*out.shape[:-1], part, dtype=out.dtype, device=out.device)}
            )
            outs.append(function(q, k, _wide(values, part), *rest, **tensors, **options)[..., :columns])
        whole = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        return whole.contiguous() if out is None else out.copy_(whole)

    return call


def _wide(states: Any, columns: int) -> Any:
    import torch

    missing = columns - states.shape[-1]
    # A part of the values is a view, whose columns lie at a stride that a kernel takes, but may be misaligned.
    return torch.nn.functional.pad(states, (0, missing)) if missing else states.contiguous()
