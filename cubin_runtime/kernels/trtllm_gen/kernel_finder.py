"""Lookup of a release's kernels by their traits, in constant time."""

from __future__ import annotations

from ...artifacts.tables.metadata import ANY_PAGE_TOKENS, KernelMeta
from ...artifacts.tables.metadata_index import MetadataIndex
from .problem import Problem
from .traits import KernelKey

# GPU model -> the metadata's architectures that run on it, the model's own before the family's.
MODELS = {100: ("100", "100f"), 103: ("103", "100f")}
DYNAMIC_PAGE = ANY_PAGE_TOKENS
MOST_REMEMBERED = 1 << 15
_UNKNOWN = object()


class KernelFinder:
    """The kernels of one release. Found and missed lookups are cached; safe between threads."""

    def __init__(self, index: MetadataIndex) -> None:
        self.index = index
        self._kernels: dict[tuple[object, ...], KernelMeta | None] = {}

    def for_problem(self, problem: Problem) -> KernelSet:
        """The kernels with the problem's GPU model, dtypes and SageAttention blocks; none for unknown models."""
        dtypes = (problem.dtype_q, problem.dtype_k, problem.dtype_v, problem.dtype_o, *problem.sage_blocks)
        return KernelSet(self, tuple((word, *dtypes) for word in MODELS.get(problem.sm, ())))

    def find(self, traits: tuple[object, ...]) -> KernelMeta | None:
        """The row with exactly these traits (``metadata_columns.SELECTION_FIELDS``), or None."""
        kernel = self._kernels.get(traits, _UNKNOWN)
        if isinstance(kernel, KernelMeta) or kernel is None:
            return kernel
        row = self.index.find_by_traits(traits)
        if row is not None or len(self._kernels) < MOST_REMEMBERED:  # rows are bounded by the release, misses are not
            self._kernels[traits] = row
        return row


class KernelSet:
    """The kernels that one problem may use."""

    def __init__(self, finder: KernelFinder, prefixes: tuple[tuple[object, ...], ...]) -> None:
        self._finder = finder
        self._prefixes = prefixes

    def find(self, key: KernelKey) -> KernelMeta | None:
        """The kernel for ``key``, preferably the GPU model's own over the family's, or None."""
        for prefix in self._prefixes:
            kernel = self._finder.find((*prefix, *key))
            if kernel is not None:
                return kernel
        return None
