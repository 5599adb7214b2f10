"""The parameter structs of all native kernels, by name: those of each family's folder."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from ...launch.structs import StructLayout


def _layouts() -> dict[str, StructLayout]:
    package = import_module(__package__)
    families = [module.name for module in iter_modules(package.__path__) if module.ispkg]
    layouts: dict[str, StructLayout] = {}
    for family in families:
        layouts |= import_module(f".{family}.params", __package__).LAYOUTS
    return layouts


LAYOUTS = MappingProxyType(_layouts())
