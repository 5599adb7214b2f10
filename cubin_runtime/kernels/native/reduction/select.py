"""Selection of a native kernel by operation, traits and GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ....artifacts.tables.native_kernels import NativeKernel
from ....errors import UsageError


def choose_kernel(kernels: Iterable[NativeKernel], operation: str, traits: Mapping[str, str], sm: int) -> NativeKernel:
    """The native kernel for ``operation`` that runs on compute capability ``sm`` (90, 100, 103), the newest one first.

    Raises:
        UsageError: the release has none.
    """
    fitting = [
        kernel
        for kernel in kernels
        if kernel.operation == operation
        and kernel.architecture.runs_on(sm)
        and all(kernel.traits.get(name) == value for name, value in traits.items())
    ]
    if not fitting:
        words = ", ".join(f"{name} {word}" for name, word in traits.items())
        raise UsageError(f"the native release has no {operation} kernel{' for ' + words if words else ''} on SM {sm}")
    return max(fitting, key=lambda kernel: kernel.architecture.number)
