"""Selection of the kernel that packs draft masks on a device, and its grid."""

from __future__ import annotations

from collections.abc import Iterable

from ....artifacts.tables.native_kernels import NativeKernel
from ....launch.driver import DeviceFacts
from ....values import dataclass
from ...explanation import Facts
from ..selection import Selection, only_kernel

OPERATION = "draft_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMaskShape:
    """The facts that decide the grid: requests, and the query tokens of each, or their bound."""

    batch: int
    q_len: int


class DraftMaskSelection(Selection):
    """The kernel and its grid: a CTA for each request."""

    def facts(self, shape: DraftMaskShape) -> Facts:
        """The query tokens of a request."""
        return (("tokens", f"up to {shape.q_len} of each of {shape.batch} requests"),)


def select_draft_mask(
    kernels: Iterable[NativeKernel], shape: DraftMaskShape, device: DeviceFacts
) -> DraftMaskSelection:
    """The kernel, with a CTA for each request.

    Raises:
        UsageError: no kernel fits; the message says why not.
    """
    kernel, candidates = only_kernel(kernels, OPERATION, {}, device)
    return DraftMaskSelection(
        kernel=kernel,
        ctas=shape.batch,
        row_tiles=1,
        splits=0,
        explain=lambda: ("a CTA for each request", candidates),
    )
