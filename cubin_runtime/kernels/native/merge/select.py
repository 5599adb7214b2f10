"""Selection of the kernel that merges partial results on a device, and its grid."""

from __future__ import annotations

from collections.abc import Iterable

from ....artifacts.tables.native_kernels import NativeKernel
from ....launch.driver import DeviceFacts
from ....values import dataclass
from ...explanation import Facts
from ..constants import CONSTANTS
from ..selection import Selection, only_kernel

OPERATION = "merge_states"
_WARP_LANES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeShape:
    """The facts that decide the kernel and the grid; ``dtype`` is that of the partial outputs."""

    dtype: str
    tokens: int
    heads: int
    head_dim: int

    @property
    def units(self) -> int:
        """The number of values that a lane merges at a time, in a row."""
        return self.head_dim // CONSTANTS.merge_values

    @property
    def lanes(self) -> int:
        """Lanes of a row: none idles."""
        return min(_WARP_LANES, self.units & -self.units)


class MergeSelection(Selection):
    """The kernel and its grid: a few lanes of a warp have a row."""

    def facts(self, shape: MergeShape) -> Facts:
        """Rows, and the lanes of each."""
        return (("rows", f"{shape.tokens} tokens x {shape.heads} heads, {shape.lanes} lanes each"),)


def select_merge(kernels: Iterable[NativeKernel], shape: MergeShape, device: DeviceFacts) -> MergeSelection:
    """The kernel for the dtype, on as many CTAs as are resident at once, but no more than have a row.

    Raises:
        UsageError: no kernel fits; the message says why not.
    """
    kernel, candidates = only_kernel(kernels, OPERATION, {"dtype": shape.dtype}, device)
    most = CONSTANTS.merge_ctas_per_multiprocessor * device.multiprocessors
    rows = shape.tokens * shape.heads
    return MergeSelection(
        kernel=kernel,
        ctas=max(1, min(most, -(-rows * shape.lanes // CONSTANTS.merge_threads))),
        row_tiles=1,
        splits=0,
        explain=lambda: (f"{shape.dtype} parts; at most {most} CTAs are resident", candidates),
    )
