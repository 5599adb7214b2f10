"""Make the table of FlashInfer's attention signatures from its wheels, which are read and never imported.

``python tools/derive_flashinfer_signatures.py WHEEL...`` writes ``tests/data/flashinfer_signatures.json``: by version
and function, where it is defined, and of each parameter its name, its kind and its default as written.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "tests" / "data" / "flashinfer_signatures.json"
# The files in which a version defines the functions; the MLA functions were in one file before they had a folder.
FILES = ("cascade.py", "decode.py", "mla.py", "mla/_core.py", "page.py", "prefill.py", "xqa.py")
NAMES = frozenset(
    {
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache_mla",
        "trtllm_prefill_with_kv_cache_mla",
        "trtllm_ragged_attention_deepseek",
        "xqa",
        "xqa_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache_mla",
        "xqa_mla",
    }
)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="+")
    table = {version_of(wheel): signatures_of(wheel) for wheel in parser.parse_args().wheels}
    TABLE.write_text(written(table))


def written(table: dict[str, dict[str, Any]]) -> str:
    """The table with one function on a line."""
    versions = []
    for version, functions in table.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(function)}" for name, function in functions.items())
        versions.append(f" {json.dumps(version)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(versions) + "\n}\n"


def version_of(wheel: Path) -> str:
    """The version that a wheel's file name states."""
    return wheel.name.split("-")[1]


def signatures_of(wheel: Path) -> dict[str, dict[str, Any]]:
    """The functions that a wheel defines, by name."""
    found: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as opened:
        there = set(opened.namelist())
        for path in (f"flashinfer/{file}" for file in FILES):
            if path in there:
                found |= functions_of(opened.read(path).decode(), path)
    return dict(sorted(found.items()))


def functions_of(source: str, path: str) -> dict[str, dict[str, Any]]:
    """The functions at the top of a module, by name."""
    return {
        node.name: {"file": path, "parameters": parameters_of(node.args)}
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in NAMES
    }


def parameters_of(arguments: ast.arguments) -> list[list[str | None]]:
    """Of each parameter its name, ``positional`` or ``keyword``, and its default as written; None: it has none."""
    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(places) - len(arguments.defaults)) + list(arguments.defaults)
    rows = [("positional", *row) for row in zip(places, defaults, strict=True)]
    rows += [("keyword", *row) for row in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [[place.arg, kind, None if default is None else ast.unparse(default)] for kind, place, default in rows]


if __name__ == "__main__":
    main()
