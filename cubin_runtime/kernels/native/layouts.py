"""The parameter structs of all native kernels, by name."""

from __future__ import annotations

from types import MappingProxyType

from .decode.params import LAYOUTS as DECODE_LAYOUTS
from .measure.params import LAYOUTS as MEASURE_LAYOUTS
from .mla.params import LAYOUTS as MLA_LAYOUTS
from .prefill.params import LAYOUTS as PREFILL_LAYOUTS
from .reduction.params import LAYOUTS as REDUCTION_LAYOUTS

LAYOUTS = MappingProxyType(
    {
        **DECODE_LAYOUTS,
        **MLA_LAYOUTS,
        **PREFILL_LAYOUTS,
        **REDUCTION_LAYOUTS,
        **MEASURE_LAYOUTS,
    }
)
