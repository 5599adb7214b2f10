"""Modules in place of packages that an engine imports at its top, and that attention on a CPU does without."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _Kind(type):
    """A class of which everything can be asked: attributes, items, unions with other types."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (Anything,), {})

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__


class Anything(metaclass=_Kind):
    """What a name of an absent package is: a base class, a decorator, a function or a constant."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        return {"type": "any"}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Anything()

    def __getitem__(self, _: Any) -> Any:
        return Anything()


class _AbsentModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (Anything,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if any(name == one or name.startswith(f"{one}.") for one in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def in_place_of(*names: str) -> Iterator[None]:
    """Modules of these names, and below them, where the environment has none; they stay once imported."""
    finder = _Finder(names)
    sys.meta_path.append(finder)  # the last: what is installed is found first
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
