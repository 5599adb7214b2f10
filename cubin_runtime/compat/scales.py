"""FlashInfer's factors, numbers or scalars on the device, as our kernels and the published ones take them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..attention.runtime import Runtime
from ..attention.scales import ScaleProduct, float32_number
from ..attention.trtllm_gen.checks import scale_of
from ..errors import UsageError
from ..kernels.trtllm_gen.arguments import Scale
from ..tensor import view_of

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of scores and output; ``keep`` holds what was made for them until the launch is under way."""

    bmm1: Scale
    bmm2: Scale
    keep: Any = None


def scales_of(bmm1: Any, bmm2: Any, bmm1_log2: Any, device: int, runtime: Runtime) -> Scales:
    """The two factors, each a number or one float32 on the device; kernels want device factors of scores in base 2.

    Raises:
        UsageError: another form; or the factor of the scores given twice.
    """
    made = None
    if bmm1_log2 is not None:
        if not isinstance(bmm1, Real) or bmm1 != 1.0:
            raise UsageError("bmm1_scale_log2 with bmm1_scale: expected one of them")
        first = scale_of("bmm1_scale_log2", view_of(bmm1_log2, "bmm1_scale_log2"), device)
    elif isinstance(bmm1, Real):
        first = scale_of("bmm1_scale", float(bmm1), device)
    else:
        scale_of("bmm1_scale", view_of(bmm1, "bmm1_scale"), device)
        made = runtime.memory.scaled(bmm1, LOG2_E)
        first = scale_of("bmm1_scale", view_of(made, "bmm1_scale"), device)
    second = float(bmm2) if isinstance(bmm2, Real) else view_of(bmm2, "bmm2_scale")
    return Scales(first, scale_of("bmm2_scale", second, device), made)


def factor_of(name: str, given: Any, device: int) -> ScaleProduct:
    """A finite number or a tensor of one float32.

    Raises:
        UsageError: another form, or a tensor elsewhere; the message begins with ``name``.
    """
    if isinstance(given, Real):
        return ScaleProduct(float32_number(name, given))
    scale_of(name, view_of(given, name), device)
    return ScaleProduct(1.0, given)


def times(first: ScaleProduct, second: ScaleProduct, runtime: Runtime) -> ScaleProduct:
    """The product; of two tensors it is computed on the device, in stream order."""
    tensor = first.tensor if second.tensor is None else second.tensor
    if first.tensor is not None and second.tensor is not None:
        tensor = runtime.memory.product(first.tensor, second.tensor)
    return ScaleProduct(first.number * second.number, tensor)
