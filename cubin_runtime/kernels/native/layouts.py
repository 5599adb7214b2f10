"""The parameter structs of all native kernels, by name."""

from __future__ import annotations

from types import MappingProxyType

from .append.params import LAYOUTS as APPEND_LAYOUTS
from .decode.params import LAYOUTS as DECODE_LAYOUTS
from .draft_mask.params import LAYOUTS as DRAFT_MASK_LAYOUTS
from .measure.params import LAYOUTS as MEASURE_LAYOUTS
from .merge.params import LAYOUTS as MERGE_LAYOUTS
from .mla.params import LAYOUTS as MLA_LAYOUTS
from .prefill.params import LAYOUTS as PREFILL_LAYOUTS
from .reduction.params import LAYOUTS as REDUCTION_LAYOUTS
from .sparse_mla.params import LAYOUTS as SPARSE_MLA_LAYOUTS

_FAMILIES = (
    APPEND_LAYOUTS,
    DECODE_LAYOUTS,
    DRAFT_MASK_LAYOUTS,
    MEASURE_LAYOUTS,
    MERGE_LAYOUTS,
    MLA_LAYOUTS,
    PREFILL_LAYOUTS,
    REDUCTION_LAYOUTS,
    SPARSE_MLA_LAYOUTS,
)
LAYOUTS = MappingProxyType({name: layout for family in _FAMILIES for name, layout in family.items()})
