"""The import direction, and what a plain ``import cubin_runtime`` costs and loads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cubin_runtime"
ROOM_FLOORS = {"cli": 5, "compat": 5, "attention": 4, "kernels": 3, "launch": 2, "artifacts": 1}
SHARED_FLOOR = 0  # errors, config, _version
HEAVY = (
    "cryptography",
    "cuda",
    "cupy",
    "elftools",
    "filelock",
    "jax",
    "numpy",
    "platformdirs",
    "requests",
    "rich",
    "torch",
    "typer",
    "urllib3",
)
MEASURE = """
import sys, time
begin = time.perf_counter()
import cubin_runtime
print(time.perf_counter() - begin)
"""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(file: Path) -> Iterator[tuple[str, ...]]:
    """Every module of ours that ``file`` imports anywhere, functions included, as absolute parts."""
    package = module_name(file) if file.name == "__init__.py" else module_name(file)[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            named = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*named, alias.name) for alias in node.names)


def top_imports(file: Path, known: dict[tuple[str, ...], Path]) -> set[tuple[str, ...]]:
    """The modules among ``known`` that running ``file`` imports, but for those that only type checkers see."""
    package = module_name(file) if file.name == "__init__.py" else module_name(file)[:-1]
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            named = tuple(node.module.split(".")) if node.module else ()
            base = (*package[: len(package) - node.level + 1], *named)
            for alias in node.names:
                found.add((*base, alias.name) if (*base, alias.name) in known else base)
    return found & known.keys() - {module_name(file)}


def floor(parts: tuple[str, ...]) -> int | None:
    """The floor of a module of ours; None for the package's face and for what is not ours."""
    if parts[:1] != ("cubin_runtime",) or len(parts) < 2:
        return None
    return ROOM_FLOORS.get(parts[1], SHARED_FLOOR)


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_every_folder_is_a_room_with_a_floor() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(ROOM_FLOORS)


@pytest.mark.parametrize("file", modules(), ids=lambda file: ".".join(module_name(file)))
def test_imports_point_down(file: Path) -> None:
    own = floor(module_name(file))
    if own is None:
        own = max(ROOM_FLOORS.values())
    up = [".".join(parts) for parts in imports_of(file) if (floor(parts) or 0) > own]
    assert up == []


def test_the_two_top_rooms_do_not_import_each_other() -> None:
    found = [
        (room, ".".join(parts))
        for room, other in (("cli", "compat"), ("compat", "cli"))
        for file in (PACKAGE / room).rglob("*.py")
        for parts in imports_of(file)
        if parts[:2] == ("cubin_runtime", other)
    ]
    assert found == []


def test_launch_knows_no_kernel_family() -> None:
    words = ("kernels", "native", "trtllm_gen", "hopper")
    named = [file.name for file in (PACKAGE / "launch").rglob("*.py") for word in words if word in file.stem]
    assert named == []


def test_no_two_modules_import_each_other() -> None:
    """Imports at the top of files have no cycle; a name that a package hands on counts as its own module."""
    known = {module_name(file): file for file in modules()}
    graph = {name: top_imports(file, known) for name, file in known.items()}
    done: set[tuple[str, ...]] = set()

    def walk(name: tuple[str, ...], path: tuple[tuple[str, ...], ...]) -> None:
        assert name not in path, " -> ".join(".".join(part) for part in (*path[path.index(name) :], name))
        if name in done:
            return
        for other in graph[name]:
            walk(other, (*path, name))
        done.add(name)

    for name in graph:
        walk(name, ())


def test_nothing_heavy_is_loaded_by_importing_the_package() -> None:
    loaded = run_python("import sys, cubin_runtime; print('\\n'.join(sys.modules))").split("\n")
    assert sorted({name.partition(".")[0] for name in loaded} & set(HEAVY)) == []


def test_libcuda_is_not_mapped_by_importing_the_package() -> None:
    mapped = run_python("import cubin_runtime; print(open('/proc/self/maps').read())")
    assert "libcuda" not in mapped


@pytest.mark.torch
def test_torch_stays_unloaded_where_it_is_installed() -> None:
    pytest.importorskip("torch")
    assert run_python("import sys, cubin_runtime; print('torch' in sys.modules)").strip() == "False"


def test_a_warm_import_takes_less_than_100_ms() -> None:
    run_python(MEASURE)
    assert min(float(run_python(MEASURE)) for _ in range(5)) < 0.100
