"""The distance that kernels may have from the float64 references, by the dtypes that they round to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Rounding(NamedTuple):
    """Rounding of a dtype: unit roundoff, smallest step, largest value, and the allowed relative errors of the norm.

    ``probabilities`` is the error from rounding the softmax's probabilities to this dtype, ``output`` the error from
    rounding the output.
    """

    roundoff: float
    step: float
    largest: float
    probabilities: float
    output: float


ROUNDING: Mapping[str, Rounding] = MappingProxyType(
    {
        "bfloat16": Rounding(2.0**-8, 2.0**-126, 3.3e38, 4.0e-3, 2.0e-3),
        "float16": Rounding(2.0**-11, 2.0**-24, 65504.0, 1.5e-3, 5.0e-4),
        "float8_e4m3fn": Rounding(2.0**-4, 2.0**-9, 448.0, 4.0e-2, 4.0e-2),
    }
)
ELEMENT_TOLERANCE = 2.0e-2  # of the largest element, or of the output scale if that is more
ROW_FACTOR = 3.0  # a row of one (token, head) may err that much more than the whole
LSE_TOLERANCE = 4.0e-3


def probability_dtype(kv_dtype: str) -> str:
    """The dtype in which native kernels multiply probabilities by values of ``kv_dtype``: e4m3 ones become float16."""
    return "bfloat16" if kv_dtype == "bfloat16" else "float16"
