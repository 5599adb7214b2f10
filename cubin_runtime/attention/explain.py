"""Explains what a call of given sizes launches on native kernels, and why; needs no tensors, device or driver."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..artifacts.tables.native_kernels import NativeKernel
from ..errors import UsageError
from ..kernels.explanation import Explanation
from ..kernels.native.explanation import explain_launches
from ..launch.driver import DeviceFacts
from . import operators
from .backends import NATIVE
from .call_sizes import CallSizes, Explained
from .latent_cache import MLA_WIDTHS


@cache
def explained() -> tuple[Explained, ...]:
    """The parts of all operators, each from the operator's file; one takes a call."""
    names = [module.name for module in iter_modules(operators.__path__)]
    return tuple(import_module(f"{operators.__name__}.{name}").EXPLAINED for name in names)


def explained_operator(sizes: CallSizes) -> Explained:
    """The native operator that takes a call.

    Raises:
        UsageError: there is none for the operation.
    """
    is_mla = sizes.operation == "decode" and sizes.head_dim in MLA_WIDTHS
    operation = "mla" if is_mla else sizes.operation
    part = next((part for part in explained() if part.operation == operation and part.takes(sizes)), None)
    if part is None:
        operations = ", ".join(sorted({part.operation for part in explained()}))
        raise UsageError(f"the {NATIVE} backend has {operations}", argument="operation", value=repr(sizes.operation))
    return part


def explain(sizes: CallSizes, kernels: Sequence[NativeKernel], device: DeviceFacts) -> Explanation:
    """Explain which of ``kernels`` a call would launch on ``device``.

    Raises:
        UsageError: a size is outside what the operator takes, then the message begins with ``name=value``; or no
            kernel fits.
    """
    operator = explained_operator(sizes)
    if sizes.soft_cap and operator.operation != "context":
        raise UsageError(f"soft_cap=True: {operator.operator} has none, expected `operation` context")
    shape = operator.shape(sizes)
    names = {"backend": NATIVE, "operator": operator.operator, "operation": sizes.operation}
    return explain_launches(names, shape, device, operator.select(kernels, shape, device), pdl=sizes.pdl)
