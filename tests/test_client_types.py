"""What strict type checkers say of programs that use the package, and which names it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from cubin_runtime.dtypes import DTYPES
from cubin_runtime.protocols import DTypeName

ROOT = Path(__file__).parents[1]
CLIENTS = Path(__file__).parent / "clients"


def complaints(*clients: str) -> list[tuple[int, str]]:
    """The lines that ``mypy --strict`` complains about, and the code of each complaint."""
    command = [sys.executable, "-m", "mypy", "--strict", *(str(CLIENTS / client) for client in clients)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.stderr == ""
    return [
        (int(line), code) for line, code in re.findall(r":(\d+): error: .*\[([\w-]+)\]$", said.stdout, re.MULTILINE)
    ]


def expected_complaints(client: str) -> list[tuple[int, str]]:
    lines = (CLIENTS / client).read_text().splitlines()
    return [
        (number, code)
        for number, line in enumerate(lines, 1)
        for code in line.partition("  # ")[2].split(", ")
        if line.startswith("    ") and code
    ]


def test_a_client_that_is_right_is_accepted() -> None:
    assert complaints("accepted.py") == []


def test_each_mistake_of_a_client_is_rejected_and_nothing_else() -> None:
    assert sorted(complaints("rejected.py")) == sorted(expected_complaints("rejected.py"))


@pytest.mark.torch
def test_a_client_with_torch_tensors_is_accepted() -> None:
    pytest.importorskip("torch")
    assert complaints("torch_client.py") == []


@pytest.mark.parametrize("module", ["cubin_runtime", "cubin_runtime.attention"])
def test_completion_shows_the_public_names_and_each_is_there(module: str) -> None:
    package = import_module(module)
    assert dir(package) == sorted(package.__all__)
    assert [name for name in package.__all__ if getattr(package, name, None) is None] == []


def test_a_name_that_the_package_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'paged_encode'"):
        import_module("cubin_runtime").paged_encode  # noqa: B018


def test_every_dtype_of_the_table_has_a_name_for_type_checkers() -> None:
    assert set(get_args(DTypeName)) == set(DTYPES)
