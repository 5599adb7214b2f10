"""Kernel filters that verbs share, for both kinds of release; pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Set
from fnmatch import fnmatchcase

from ...dtypes import DTYPES
from ...errors import UsageError
from ...values import dataclass
from ..cubins.architecture import Architecture
from .metadata import KernelMeta
from .native_kernels import NativeKernel

KernelRow = KernelMeta | NativeKernel

_NAMED = re.compile(r"[sS][mM]_?([1-9][0-9]{1,2}[af]?)(?![0-9a-zA-Z])|[sS]m([1-9][0-9]{1,2}[af]?)(?=Kernel)")
_SM = re.compile(r"(?:sm_?)?([0-9]{2,3})[af]?", re.IGNORECASE)
# the release's own numbers: FmhaKernelType::Context, QkvLayout::PagedKv
_CONTEXT_KERNEL = 0
_PAGED_LAYOUT = 2
_DTYPE_NAMES = {
    **{dtype.name: dtype.short for dtype in DTYPES.values()},
    "half": "fp16",
    "fp8": "e4m3",
    "fp4": "e2m1",
    "nvfp4": "e2m1",
}


@dataclass(frozen=True, slots=True)
class KernelFilter:
    """The kernels to keep; an empty field keeps all; values of one field are alternatives, fields must all hold.

    ``sm`` is a device's number (100): kept is what runs there, exact and family targets alike. ``dtypes``
    looks at Q, K, V and output; ``head_dims`` at the QK and V head sizes; ``globs`` at file and symbol,
    case-sensitive. A kernel that states no type or no head size serves all of them (appending, merging, draft
    masks) and passes, so that what is fetched for a model is enough to run it.
    """

    sm: int | None = None
    families: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    globs: tuple[str, ...] = ()

    @classmethod
    def from_words(
        cls,
        sm: str | None = None,
        families: list[str] | None = None,
        dtypes: list[str] | None = None,
        head_dims: list[int] | None = None,
        globs: list[str] | None = None,
    ) -> KernelFilter:
        """Make a filter from what a user typed: ``100`` or ``sm_100``; ``bfloat16`` or ``bf16``.

        Raises:
            UsageError: ``sm`` names no device, or a head size is below 1.
        """
        if any(size < 1 for size in head_dims or ()):
            raise UsageError(f"head_dim {head_dims}: expected sizes of at least 1")
        return cls(
            sm=None if sm is None else _device_number(sm),
            families=tuple(word.lower() for word in families or ()),
            dtypes=tuple(dtype_name(word) for word in dtypes or ()),
            head_dims=tuple(head_dims or ()),
            globs=tuple(globs or ()),
        )

    @property
    def is_empty(self) -> bool:
        """Return whether it keeps everything."""
        return self == KernelFilter()

    @property
    def needs_metadata(self) -> bool:
        """Return whether file names alone cannot decide."""
        return not self.is_empty and self != KernelFilter(globs=self.globs)

    @property
    def needs_rows(self) -> bool:
        """Return whether not even the architectures in file names can decide."""
        return bool(self.families or self.dtypes or self.head_dims)

    def keeps(self, row: KernelRow) -> bool:
        """Return whether a kernel passes."""
        return (
            (self.sm is None or row.architecture.runs_on(self.sm))
            and (not self.families or not families_of(row).isdisjoint(self.families))
            and _allows(self.dtypes, dtypes_of(row))
            and _allows(self.head_dims, head_dims_of(row))
            and (not self.globs or any(self._fits(glob, row) for glob in self.globs))
        )

    def keeps_file(self, relative: str) -> bool:
        """Return whether a file without metadata passes the globs (by its path in the release or its name).

        One whose name tells an architecture has to run on ``sm``, too.
        """
        name = relative.rpartition("/")[2]
        target = architecture_of_name(name)
        if self.sm is not None and target is not None and not target.runs_on(self.sm):
            return False
        return not self.globs or any(fnmatchcase(relative, g) or fnmatchcase(name, g) for g in self.globs)

    def _fits(self, glob: str, row: KernelRow) -> bool:
        return any(fnmatchcase(text, glob) for text in (row.file, row.symbol, row.file.rpartition("/")[2]))


def architecture_of_name(name: str) -> Architecture | None:
    """The architecture that a file's name ends with or has between other words; None if it tells none.

    >>> str(architecture_of_name("Gemm_Bfloat16_t128x32_schedS_sm100f.cubin"))
    'sm_100f'
    """
    matches = ["".join(groups) for groups in _NAMED.findall(name)]
    return Architecture.parse(matches[-1]) if matches else None


def families_of(row: KernelRow) -> frozenset[str]:
    """The family words of a kernel: who made it, what kind it is, and what it is for.

    Published kernels are for ``context`` (``prefill``) or ``generation`` (``decode``), and ``paged`` if they read
    pages; native kernels have the parts of their operation's name (``paged``, ``decode``).
    """
    if isinstance(row, KernelMeta):
        phase = {"context", "prefill"} if row.kernel_type == _CONTEXT_KERNEL else {"generation", "decode"}
        return frozenset({"trtllm-gen", "fmha", *phase, *({"paged"} if row.qkv_layout == _PAGED_LAYOUT else ())})
    return frozenset({"native", "hopper", row.family, row.operation, *row.operation.split("_")})


def dtypes_of(row: KernelRow) -> frozenset[str]:
    """The element types of Q, K, V and output; for native kernels, all that traits list whose name holds ``dtype``."""
    if isinstance(row, KernelMeta):
        return frozenset({row.dtype_q, row.dtype_k, row.dtype_v, row.dtype_o})
    listed = ",".join(str(v) for key, v in row.traits.items() if "dtype" in key)
    return frozenset(map(dtype_name, filter(None, listed.split(","))))


def head_dims_of(row: KernelRow) -> frozenset[int]:
    """Head sizes of QK and V; for native kernels, all traits whose name starts with ``head_dim``, or of a latent."""
    if isinstance(row, KernelMeta):
        return frozenset({row.head_dim_qk, row.head_dim_v})
    latent, rope = row.traits.get("latent"), row.traits.get("rope")
    if isinstance(latent, int) and isinstance(rope, int):
        return frozenset({latent + rope, latent})
    return frozenset(v for key, v in row.traits.items() if key.startswith("head_dim") and isinstance(v, int))


def _allows(criteria: Collection[object], stated: Set[object]) -> bool:
    return not criteria or not stated or not stated.isdisjoint(criteria)


def is_stated(kernel_filter: KernelFilter, rows: Iterable[KernelRow]) -> bool:
    """Return whether some kernel states a type that is asked for, and some a head size; true where none is."""
    dtypes, head_dims = set(kernel_filter.dtypes), set(kernel_filter.head_dims)
    for row in rows if dtypes or head_dims else ():
        if not dtypes.isdisjoint(dtypes_of(row)):
            dtypes = set()
        if not head_dims.isdisjoint(head_dims_of(row)):
            head_dims = set()
    return not dtypes and not head_dims


def why_nothing_passes(kernel_filter: KernelFilter, rows: Sequence[KernelRow]) -> str:
    """Say which value of a filter no kernel has, and which there are; else that they exclude each other."""
    families, dtypes, head_dims = (
        sorted({value for row in rows for value in of(row)}) for of in (families_of, dtypes_of, head_dims_of)
    )
    targets = sorted({str(row.architecture) for row in rows})
    if kernel_filter.sm is not None and not any(row.architecture.runs_on(kernel_filter.sm) for row in rows):
        return f"no kernel runs on sm {kernel_filter.sm}, expected a device for one of {', '.join(targets)}"
    rules: tuple[tuple[str, Sequence[object], Sequence[object]], ...] = (
        ("family", kernel_filter.families, families),
        ("dtype", kernel_filter.dtypes, dtypes),
        ("head_dim", kernel_filter.head_dims, head_dims),
    )
    for name, criteria, there in rules:
        if criteria and set(criteria).isdisjoint(there):
            values = ", ".join(map(str, criteria))
            return f"no kernel has {name} {values}, expected one of {', '.join(map(str, there)) or 'none'}"
    if kernel_filter == KernelFilter(globs=kernel_filter.globs):
        return f"no file matches {' '.join(kernel_filter.globs)}"
    return "no kernel matches all filters together, though each alone matches some"


def dtype_name(word: str) -> str:
    """The metadata's name of a dtype: ``bfloat16`` is ``bf16``; an unknown word stays, in lower case."""
    return _DTYPE_NAMES.get(word.lower(), word.lower())


def _device_number(word: str) -> int:
    match = _SM.fullmatch(word)
    if match is None:
        raise UsageError(f"sm {word!r}: expected a device such as 100 or sm_90")
    return int(match[1])
