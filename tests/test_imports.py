"""The import direction, and what a plain ``import cubin_runtime`` costs and loads."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cubin_runtime"
ROOM_FLOORS = {
    "integrations": 6,
    "testing": 5,
    "distributed": 5,
    "cli": 6,
    "compat": 5,
    "debug": 5,
    "attention": 4,
    "kernels": 3,
    "launch": 2,
    "artifacts": 1,
}
SHARED_FLOOR = 0  # errors, config, _version
# The order inside artifacts, as its docstring states it; a file imports nothing that comes later.
ARTIFACT_ORDER = (
    "path",
    "bounded_read",
    "atomic_write",
    "audit_log",
    "threads",
    "zip_reader",
    "manifest",
    "cubins",
    "tables",
    "pins",
    "store",
    "sources",
    "fetch",
    "verification",
    "library",
    "releases",
    "api",
)
# Whoever writes a file, the build and the command line too, writes it in the one way of `atomic_write`.
ARTIFACTS_INSIDE = {"audit_log", "bounded_read", "threads", "zip_reader", "store", "sources", "fetch"}
HEAVY = (
    "cryptography",
    "cuda",
    "cupy",
    "jax",
    "numpy",
    "requests",
    "rich",
    "torch",
    "typer",
    "urllib3",
)
MEASURE = """
import sys, time
begin = time.process_time()
import cubin_runtime
print(time.process_time() - begin)
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


def absolute_imports_of(file: Path) -> Iterator[tuple[str, ...]]:
    """The same for a file outside the package: what it imports by a full name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((*node.module.split("."), alias.name) for alias in node.names)


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


def test_the_page_and_its_picture_have_the_rooms_from_top_to_bottom() -> None:
    docs = PACKAGE.parent / "docs"
    table = re.findall(r"^\| `(\w+)` \|", (docs / "architecture.md").read_text(), re.MULTILINE)
    drawn = re.findall(r'font-weight="bold">(\w+)<', (docs / "architecture_layers.svg").read_text())
    assert sorted(table) == sorted(drawn) == sorted(ROOM_FLOORS)
    assert [ROOM_FLOORS[room] for room in table] == sorted(ROOM_FLOORS.values(), reverse=True)
    assert [ROOM_FLOORS[room] for room in drawn] == sorted(ROOM_FLOORS.values(), reverse=True)


@pytest.mark.parametrize("file", modules(), ids=lambda file: ".".join(module_name(file)))
def test_imports_point_down(file: Path) -> None:
    own = floor(module_name(file))
    if own is None:
        own = max(ROOM_FLOORS.values())
    up = [".".join(parts) for parts in imports_of(file) if (floor(parts) or 0) > own]
    assert up == []


def artifact_files() -> dict[tuple[str, ...], Path]:
    return {module_name(file): file for file in (PACKAGE / "artifacts").rglob("*.py")}


def part_of_artifacts(parts: tuple[str, ...]) -> str | None:
    """The file or folder of artifacts that a module lies in; None for every other module."""
    return parts[2] if parts[:2] == ("cubin_runtime", "artifacts") and len(parts) > 2 else None


def test_the_order_inside_artifacts_is_complete() -> None:
    assert {part for name in artifact_files() if (part := part_of_artifacts(name))} == set(ARTIFACT_ORDER)


def test_imports_inside_artifacts_point_up_the_list() -> None:
    place = {part: number for number, part in enumerate(ARTIFACT_ORDER)}
    found = [
        (".".join(name), ".".join(parts))
        for name, file in artifact_files().items()
        for parts in imports_of(file)
        if (own := part_of_artifacts(name)) and (other := part_of_artifacts(parts)) and place[other] > place[own]
    ]
    assert found == []


def test_launch_knows_no_kernel_family() -> None:
    words = ("kernels", "native", "trtllm_gen", "hopper")
    named = [file.name for file in (PACKAGE / "launch").rglob("*.py") for word in words if word in file.stem]
    assert named == []


Files = dict[tuple[str, ...], Path]


def imports_between_files(name: tuple[str, ...], files: Files, *, typing: bool) -> set[tuple[str, ...]]:
    """The modules among ``files`` that one imports, in functions too; ``typing``: and for type checkers alone.

    A module comes with the packages around it, but for those that the importing file is in itself.
    """
    file = files[name]
    package = name if file.name == "__init__.py" else name[:-1]
    tree = ast.parse(file.read_text())
    left_out = () if typing else [node for node in ast.walk(tree) if is_for_type_checkers(node)]
    skipped = {inner for outer in left_out for inner in ast.walk(outer)}
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node not in skipped:
            base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                imported.add((*base, alias.name) if (*base, alias.name) in files else base)
    around = {parts[:length] for parts in imported for length in range(1, len(parts))}
    own = {package[:length] for length in range(1, len(package) + 1)}
    return (imported | around - own) & files.keys() - {name}


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def files_in_circles(files: Files, *, typing: bool) -> set[str]:
    """The files from which a way of imports leads back to themselves."""
    graph = {name: imports_between_files(name, files, typing=typing) for name in files}
    reached: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for name in graph:
        reached[name], ahead = set(), list(graph[name])
        while ahead:
            if (other := ahead.pop()) not in reached[name]:
                reached[name].add(other)
                ahead += graph[other]
    return {".".join(name[1:]) for name, others in reached.items() if name in others}


@pytest.mark.parametrize("typing", [False, True])
def test_no_two_files_import_each_other(typing: bool) -> None:
    assert files_in_circles({module_name(file): file for file in modules()}, typing=typing) == set()


@pytest.mark.parametrize(
    ("text", "typing"),
    [
        ("from . import one\n", False),
        ("def load():\n    from .one import name\n", False),
        ("if TYPE_CHECKING:\n    from .one import name\n", True),
    ],
)
def test_an_import_back_makes_a_circle_wherever_it_stands(tmp_path: Path, text: str, typing: bool) -> None:
    folder = tmp_path / "cubin_runtime"
    folder.mkdir()
    (folder / "one.py").write_text("from . import other\n")
    (folder / "other.py").write_text(text)
    files = {("cubin_runtime", stem): folder / f"{stem}.py" for stem in ("one", "other")}
    assert files_in_circles(files, typing=typing) == {"one", "other"}
    assert bool(files_in_circles(files, typing=False)) != typing


@pytest.mark.parametrize("folder", ["cubin_runtime", "kernels_src", "tools", "benchmarks"])
def test_artifacts_are_entered_by_their_entrances(folder: str) -> None:
    found = [
        (file.name, ".".join(parts))
        for file in (PACKAGE.parent / folder).rglob("*.py")
        if PACKAGE / "artifacts" not in file.parents
        for parts in (imports_of(file) if folder == "cubin_runtime" else absolute_imports_of(file))
        if part_of_artifacts(parts) in ARTIFACTS_INSIDE
    ]
    assert found == []


def test_the_two_top_rooms_do_not_import_each_other() -> None:
    found = [
        (room, ".".join(parts))
        for room, other in (("cli", "compat"), ("compat", "cli"))
        for file in (PACKAGE / room).rglob("*.py")
        for parts in imports_of(file)
        if parts[:2] == ("cubin_runtime", other)
    ]
    assert found == []


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


# What generates code for each class; beside these, values are defined by ``cubin_runtime.values``.
GENERATING = {
    "path",
    "dispatch",
    "process_pool",
    "http_session",
    "arguments",
    "paged_batch",
    "mla_backend",
    "sparse_mla_backend",
    "values",
}
# Modules that a process which launches loaded kernels does without.
LATER = (
    "asyncio",
    "cubin_runtime.artifacts.fetch.dispatch",
    "cubin_runtime.artifacts.fetch.process_pool",
    "cubin_runtime.artifacts.fetch.worker_pool",
    "cubin_runtime.artifacts.sources.archive",
    "cubin_runtime.artifacts.sources.http",
    "cubin_runtime.artifacts.verification",
    "email",
    "filelock",
    "http",
    "multiprocessing",
    "requests",
    "secrets",
    "ssl",
    "zipfile",
)
MOST_MODULES = 76  # each takes 0.1 to 0.3 ms


def test_few_files_define_dataclasses_by_generated_code() -> None:
    pattern = "from dataclasses import dataclass"
    found = {file.stem for file in modules() if pattern in file.read_text()}
    assert found <= GENERATING


def test_importing_the_operators_loads_few_modules() -> None:
    loaded = run_python("import sys, cubin_runtime.attention; print('\\n'.join(sys.modules))").split("\n")
    ours = [name for name in loaded if name.startswith("cubin_runtime")]
    assert len(ours) <= MOST_MODULES
    families = (
        "cubin_runtime.kernels.trtllm_gen",
        "cubin_runtime.attention.trtllm_gen",
        "cubin_runtime.artifacts.library",
        "cubin_runtime.kernels.native.decode",
    )
    assert [name for name in ours if name.startswith((*families, "cubin_runtime.compat", "cubin_runtime.cli"))] == []


def test_a_runtime_that_only_reads_loads_no_network_and_no_archives(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.errors import MissingError
runtime = Runtime(Config(store=Path({str(tmp_path)!r}), sources=({str(tmp_path)!r},), offline=True))
try:
    runtime.native_release()
except MissingError:
    print('\\n'.join(sys.modules))
"""
    loaded = run_python(code).split("\n")
    assert "cubin_runtime.artifacts.library" in loaded
    assert sorted(set(loaded) & set(LATER)) == []
