"""Selection of the KV append kernel for a problem on a device, and its grid."""

from __future__ import annotations

from collections.abc import Iterable

from ....artifacts.tables.native_kernels import NativeKernel
from ....launch.driver import DeviceFacts
from ....values import dataclass
from ...explanation import Facts
from ..constants import CONSTANTS
from ..selection import Selection, only_kernel

OPERATION = "append_kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendShape:
    """The facts that decide kernel and grid. ``dtype`` is that of the new keys and values, ``kv_dtype`` the caches'."""

    dtype: str
    kv_dtype: str
    tokens: int

    @property
    def quantise(self) -> str:
        """The trait of the kernel: what it converts, nothing where bytes are copied."""
        return "" if self.dtype == self.kv_dtype else f"{self.dtype} to {self.kv_dtype}"


class AppendSelection(Selection):
    """The kernel and its grid: CTAs take chunks of neighbouring tokens in turn."""

    def facts(self, shape: AppendShape) -> Facts:
        """The tokens of a CTA, but for how chunks divide them, and what happens to them."""
        return ("tokens", f"{shape.tokens}, about {-(-shape.tokens // self.ctas)} of a CTA"), (
            "conversion",
            shape.quantise or "none: bytes are copied",
        )


def select_append(kernels: Iterable[NativeKernel], shape: AppendShape, device: DeviceFacts) -> AppendSelection:
    """The kernel for the dtypes, on as many CTAs as are resident at once, but at most one for each token.

    Raises:
        UsageError: no kernel fits; the message says why not.
    """
    kernel, candidates = only_kernel(kernels, OPERATION, {"quantise": shape.quantise}, device)
    most = CONSTANTS.append_ctas_per_multiprocessor * device.multiprocessors
    return AppendSelection(
        kernel=kernel,
        ctas=max(1, min(shape.tokens, most)),
        row_tiles=1,
        splits=0,
        explain=lambda: (f"{shape.dtype} into {shape.kv_dtype} caches; at most {most} CTAs are resident", candidates),
    )
