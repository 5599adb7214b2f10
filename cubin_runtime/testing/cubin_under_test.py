"""A cubin file and the struct that it is launched with, outside of any release."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import SupportsIndex

from ..artifacts.cubins.architecture import Architecture
from ..artifacts.cubins.cubin import Cubin, KernelFacts, parse_cubin
from ..artifacts.path import ArtifactPath
from ..errors import CorruptError, UsageError
from ..launch.abi import LaunchNeeds, check_parameters
from ..launch.driver import Driver
from ..launch.modules import KernelRequest, LoadedKernel, ModuleCache
from ..launch.plan import LaunchAttributes, LaunchPlan, Triple
from ..launch.structs import StructLayout


class CubinUnderTest:
    """A kernel of a cubin file, whose struct was compared with the cubin's own ELF.

    ``facts`` is what the ELF states about the kernel: registers, shared memory, largest block size.
    """

    def __init__(
        self, path: str | Path, struct: StructLayout, symbol: str | None = None, *, data: bytes | None = None
    ) -> None:
        """``symbol`` may be omitted if the cubin has only one kernel; ``data`` are the file's bytes, None: read it.

        Raises:
            FileNotFoundError: there is no such file.
            UsageError: the symbol is not in it, or it must be named; or ``struct`` is no ``StructLayout``.
            AbiError: the kernel takes other parameters than one struct of this size.
            CorruptError: the file is not a cubin.
        """
        self.path = Path(path)
        self.struct = struct
        if not isinstance(struct, StructLayout):
            raise UsageError(
                f"struct: got {type(struct).__name__}, expected a StructLayout, as StructLayout.declare gives"
            )
        try:
            self.data = self.path.read_bytes() if data is None else data
        except FileNotFoundError as error:
            words = f"{self.path}: there is no such cubin; compile it first, for example with nvcc -arch=sm_90a -cubin"
            raise FileNotFoundError(words) from error
        try:
            self.cubin: Cubin = parse_cubin(self.data)
        except CorruptError as error:
            raise CorruptError(f"{self.path}: {error}") from error
        named = ", ".join(self.cubin.kernels)
        if symbol is None and len(self.cubin.kernels) != 1:
            raise UsageError(f"symbol: None, expected one of {named}")
        self.symbol = symbol or named
        if self.symbol not in self.cubin.kernels:
            raise UsageError(f"symbol={symbol!r}: expected one of {named}")
        self.facts: KernelFacts = self.cubin.kernels[self.symbol]
        check_parameters(self.symbol, struct, tuple(p.size for p in self.facts.parameters), "its ELF")

    @property
    def architecture(self) -> Architecture:
        """The architecture that it was built for."""
        return self.cubin.architecture

    def plan(
        self,
        grid: SupportsIndex | Sequence[SupportsIndex],
        block: SupportsIndex | Sequence[SupportsIndex],
        shared_bytes: int,
        attributes: LaunchAttributes,
        values: Mapping[str, object],
    ) -> LaunchPlan:
        """A launch of it as a value."""
        return LaunchPlan(
            kernel=self.path.name,
            symbol=self.symbol,
            path=ArtifactPath(f"under-test/{self.path.name}"),
            sha256=hashlib.sha256(self.data).hexdigest(),
            layout=self.struct,
            grid=_triple("grid", grid),
            block=_triple("block", block),
            shared_bytes=shared_bytes,
            attributes=attributes,
            values=values,
            why="under test",
        )

    def load(self, driver: Driver, context: int, plan: LaunchPlan) -> LoadedKernel:
        """The kernel loaded into ``context`` and gated for ``plan``; errors as ``ModuleCache.kernel``."""
        needs = LaunchNeeds(
            layout=self.struct,
            threads=plan.threads,
            dynamic_shared_bytes=plan.shared_bytes,
            nonportable_cluster=plan.attributes.nonportable_cluster,
        )
        return ModuleCache(driver).kernel(KernelRequest(context, plan.sha256, self.symbol, lambda: self.data, needs))


def _triple(name: str, size: SupportsIndex | Sequence[SupportsIndex]) -> Triple:
    try:
        numbers = tuple(map(index, size if isinstance(size, Sequence) else (size,)))
    except TypeError as error:
        raise UsageError("expected one to three integers", argument=name, value=repr(size)) from error
    if not 1 <= len(numbers) <= 3:
        raise UsageError("expected one to three numbers", argument=name, value=repr(size))
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z
