"""Metadata headers as a trtllm-gen release carries them, with rows of one's own."""

from __future__ import annotations

from cubin_runtime.artifacts.tables.metadata import COLUMNS

_CELLS = {"dtype": "DATA_TYPE_BF16", "uint": "64", "bool": "false", "digest": '"' + "a" * 64 + '"'}


def header_of(*symbols: str, **cells: str) -> bytes:
    """A header with a row for each symbol; ``cells`` replace a column in all rows, as they are written."""
    declared = "".join(f"int {column.name};\n" for column in COLUMNS)
    rows = "".join(_row(symbol, cells) for symbol in symbols)
    return f"struct Info\n{{\n{declared}}};\nstatic const Info sInfos[] = {{\n{rows}}};\n".encode()


def _row(symbol: str, cells: dict[str, str]) -> str:
    sm = symbol.partition("Sm")[2].partition("Kernel")[0].removesuffix("a")
    own = {"mFuncName": f'"{symbol}"', "mSM": f"kSM_{sm}"}
    values = (cells.get(c.name) or own.get(c.name) or _CELLS[c.kind] for c in COLUMNS)
    return "{ " + ", ".join(values) + "},\n"
