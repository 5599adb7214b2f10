"""What the package exports: every name resolves, and every error that can reach a caller is among them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

import cubin_runtime
from cubin_runtime import CubinRuntimeError

# Raised and caught inside; callers see the base class, which is exported.
INSIDE = {
    "CaseError": "UsageError of the command line's cases",
    "MetadataError": "CorruptError of a release's table",
    "NativeKernelsError": "CorruptError of a release's table",
    "NotHereError": "MissingError of one source",
    "NotRegularError": "StoreError",
    "OutputError": "of the command line alone",
    "RetryableError": "SourceError that is tried again",
    "TooLargeError": "CorruptError of a reader",
    "TooMuchError": "SourceError of one file",
    "WorkerError": "SourceError of a worker process",
    "ZipError": "CorruptError of an archive",
    "ArgumentRefused": "PlanRefused",
    "InvarianceRefused": "PlanRefused",
    "KernelMissing": "PlanRefused with the key that no kernel has",
}


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(cubin_runtime.__path__, "cubin_runtime."):
        if not found.name.startswith(("cubin_runtime.integrations.", "cubin_runtime.distributed")):
            yield found.name


def errors() -> set[type[CubinRuntimeError]]:
    """Every class of error that a module of the package defines."""
    found: set[type[CubinRuntimeError]] = set()
    for name in modules():
        with suppress(ModuleNotFoundError):  # of torch, where it is not installed
            importlib.import_module(name)
        module = sys.modules.get(name)
        found |= {
            one
            for one in (vars(module) if module else {}).values()
            if inspect.isclass(one) and issubclass(one, CubinRuntimeError) and one.__module__ == name
        }
    return found


def test_every_exported_name_resolves() -> None:
    assert [name for name in cubin_runtime.__all__ if not hasattr(cubin_runtime, name)] == []


def test_every_error_is_exported_or_stays_inside() -> None:
    names = {one.__name__ for one in errors()}
    assert names - set(cubin_runtime.__all__) - set(INSIDE) == set()
    assert set(INSIDE) - names == set()


@pytest.mark.parametrize("name", ["UsageError", "MissingError", "SourceError", "WorkspaceError", "BackendError"])
def test_an_exported_error_is_the_one_that_is_raised(name: str) -> None:
    found = [one for one in errors() if one.__name__ == name]
    assert found == [getattr(cubin_runtime, name)]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cubin_runtime.nothing  # noqa: B018
