"""The scripts of ``examples`` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def example_script(name: str) -> ModuleType:
    """The script ``name``, without running its ``main``."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module
