"""What the package exports: every name resolves, and every error that can reach a caller is among them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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


VALUES = ("Artifact", "Config", "Cubin", "DeviceFacts", "FetchReport", "KernelFacts", "Network", "RuntimeStats")


@pytest.mark.parametrize("name", [*VALUES, "TensorView", "VerifyReport"])
def test_the_signature_of_a_value_has_its_fields(name: str) -> None:
    kind = getattr(cubin_runtime, name)
    parameters = inspect.signature(kind).parameters
    assert [*parameters] == [field.name for field in dataclasses.fields(kind)]
    assert all(parameter.annotation != inspect.Parameter.empty for parameter in parameters.values())


def test_a_signature_says_which_arguments_are_required() -> None:
    shown = str(inspect.signature(cubin_runtime.Config))
    assert shown.startswith("(store: 'Path', sources: 'tuple[str, ...] | None' = None, pin_files: ")
    assert inspect.signature(cubin_runtime.Config).bind("store").arguments == {"store": "store"}


def test_no_public_callable_hides_its_arguments() -> None:
    hidden = []
    for name in cubin_runtime.__all__:
        value = getattr(cubin_runtime, name)
        if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
            continue
        if name in ("Scale", "Tensor", "Stream"):  # types alone
            continue
        kinds = {parameter.kind for parameter in inspect.signature(value).parameters.values()}
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            hidden.append(name)
    assert hidden == []


def test_objects_show_what_they_are(tmp_path: Path) -> None:
    config = cubin_runtime.Config(tmp_path / "store")
    assert repr(cubin_runtime.open_library(config)).startswith(f"Library(store='{tmp_path}/store', pins=[")
    assert repr(cubin_runtime.Runtime(config)) == f"Runtime(store='{tmp_path}/store', release='hopper-0.1.0')"
