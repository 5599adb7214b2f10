"""The kernel table of a trtllm-gen release: ``include/flashInferMetaInfo.h`` as typed rows.

The header declares a struct and one array of it. Columns are mapped by the names in that declaration, so a
release that moves them still reads right. A column that an older release does not have yet is filled from what
that release has instead and reported by name; without a stand-in its lack is an error that names it. New columns
are reported by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from hashlib import sha256

from ...errors import CorruptError
from ...values import dataclass
from ..cubins.architecture import Architecture, declared_architecture
from .metadata_columns import COLUMN_OF_FIELD, COLUMNS, IGNORED_COLUMNS, Column

HEADER_PATH = "include/flashInferMetaInfo.h"
MAX_HEADER_BYTES = 64 << 20
MAX_SYMBOL_BYTES = 512
ANY_PAGE_TOKENS = 128

_STRUCT = re.compile(r"struct\s+(\w+)\s*\{([^{}]*)\}\s*;")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SYMBOL_SM = re.compile(r"[A-Za-z]+Sm([0-9]+[af]?)Kernel")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DTYPE_PREFIX = "DATA_TYPE_"
_SM_PREFIX = "kSM_"


class MetadataError(CorruptError):
    """A kernel table does not read as its own declaration says; the message names row and column."""


@dataclass(frozen=True, slots=True)
class KernelMeta:
    """One kernel of a trtllm-gen release.

    Dtypes are lower-case names (``bf16``, ``e4m3``, ``e2m1``, ``fp16``, ``int8``, ``unknown``). Sizes in
    bytes are called ``_bytes``; tiles, steps and head sizes count elements. ``sm`` is the release's word
    (``100``, ``100f``). ``row`` is the position in the header. ``shared_bytes`` is the dynamic shared
    memory of a launch.
    """

    symbol: str
    sha256: str
    row: int
    sm: str
    dtype_q: str
    dtype_kv: str
    dtype_k: str
    dtype_v: str
    dtype_o: str
    tile_q: int
    tile_kv: int
    step_q: int
    step_kv: int
    head_dim_per_cta_v: int
    head_dim_qk: int
    head_dim_v: int
    shared_bytes: int
    threads: int
    qkv_layout: int
    tokens_per_page: int
    mask_type: int
    kernel_type: int
    tile_scheduler: int
    multi_ctas_kv_mode: int
    sage_block_q: int
    sage_block_k: int
    sage_block_p: int
    sage_block_v: int
    groups_heads_q: bool
    groups_tokens_heads_q: bool
    reuses_smem_k_for_v: bool
    two_cta_mma: bool
    sparse_attention: int
    skips_softmax: bool

    @property
    def file(self) -> str:
        """The cubin, relative to the release's folder."""
        return f"{self.symbol}.cubin"

    @property
    def takes_any_page(self) -> bool:
        """Return whether the kernel reads the page size at run time: 128 tokens in the metadata, none in its name."""
        return self.tokens_per_page == ANY_PAGE_TOKENS and f"P{ANY_PAGE_TOKENS}" not in self.symbol

    @property
    def architecture(self) -> Architecture:
        """The target that the metadata's SM and the file name declare together (``kSM_100`` is sm_100a).

        Raises:
            MetadataError: they do not agree, so nothing is established.
        """
        named = _SYMBOL_SM.match(self.symbol)
        stated = self.sm if self.sm.endswith("f") else f"{self.sm}a"
        if named is None or named[1] != stated:
            raise MetadataError(f"{self.symbol}: the metadata says SM {self.sm}, the file name another")
        return declared_architecture(stated)


@dataclass(frozen=True, slots=True)
class KernelTable:
    """All rows of one header, in its order.

    ``new_columns`` are those that this version does not know, ``missing_columns`` those that the release does not
    have and that were filled from others.
    """

    rows: tuple[KernelMeta, ...]
    new_columns: tuple[str, ...]
    header_sha256: str
    missing_columns: tuple[str, ...] = ()


def parse_header(data: bytes, origin: str = HEADER_PATH) -> KernelTable:
    """Read a release's metadata header.

    Raises:
        MetadataError: no struct or array, a missing column (by name), or a value that its column cannot hold.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise MetadataError(f"{origin}: {len(data)} bytes, at most {MAX_HEADER_BYTES} are read")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise MetadataError(f"{origin}: byte {error.start} is not ASCII") from error
    struct = _STRUCT.search(text)
    if struct is None:
        raise MetadataError(f"{origin}: no struct declaration")
    names = _column_names(struct[2], origin)
    missing = tuple(column for column in COLUMNS if column.name not in names)
    lacking = [column.name for column in missing if column.absent is None and column.stand_in not in names]
    if lacking:
        raise MetadataError(f"{origin}: struct {struct[1]} lacks the columns {', '.join(lacking)}")
    rows = _rows(text, struct.end(), struct[1], names, origin)
    expected = {column.name for column in COLUMNS} | {column.stand_in for column in missing} | IGNORED_COLUMNS
    new = tuple(name for name in names if name not in expected)
    return KernelTable(rows, new, sha256(data).hexdigest(), tuple(column.name for column in missing))


def _column_names(body: str, origin: str) -> tuple[str, ...]:
    names = []
    for declaration in (part.strip() for part in body.split(";")):
        if not declaration:
            continue
        words = declaration.replace("*", " ").split()
        if len(words) < 2 or not all(word.isidentifier() for word in words):
            raise MetadataError(f"{origin}: cannot read the declaration {declaration[:80]!r}")
        names.append(words[-1])
    if len(set(names)) != len(names):
        raise MetadataError(f"{origin}: a column is declared twice")
    return tuple(names)


def _rows(text: str, after: int, struct: str, names: tuple[str, ...], origin: str) -> tuple[KernelMeta, ...]:
    opening = re.compile(rf"{struct}\s+\w+\s*\[\s*\]\s*=\s*\{{").search(text, after)
    if opening is None:
        raise MetadataError(f"{origin}: no array of {struct}")
    places = tuple(_place_of(column, names) for column in _constructor_order())
    width, first_line = len(names), text.count("\n", 0, opening.end()) + 1
    rows: list[KernelMeta] = []
    seen: set[str] = set()
    for number, line in enumerate(text[opening.end() :].split("\n"), first_line):
        line = line.strip()
        if line == "};":
            return tuple(rows)
        if not line or line.startswith("//"):
            continue
        if not line.startswith("{") or not line.endswith(("},", "}")):
            raise MetadataError(f"{origin}:{number}: expected one row in braces, got {line[:60]!r}")
        cells = [cell.strip() for cell in line.rstrip(",")[1:-1].split(",")]
        if len(cells) != width:
            raise MetadataError(f"{origin}:{number}: {len(cells)} values for {width} columns")
        values = []
        for place, column, reader in places:
            try:
                values.append(reader(cells[place]))
            except (ValueError, KeyError):
                raise MetadataError(
                    f"{origin}:{number}: {column.name} is {cells[place][:80]!r}, expected a {column.kind}"
                ) from None
        meta = KernelMeta(values[0], values[1], len(rows), *values[2:])  # type: ignore[arg-type]
        if meta.symbol in seen:
            raise MetadataError(f"{origin}:{number}: symbol {meta.symbol} occurs twice")
        seen.add(meta.symbol)
        rows.append(meta)
    raise MetadataError(f"{origin}: the array of {struct} is not terminated")


def _place_of(column: Column, names: tuple[str, ...]) -> tuple[int, Column, Callable[[str], object]]:
    """The place of a column's cell in a row, and its reader; a stand-in is read as what it stands for."""
    reader = _READERS[column.kind]
    if column.name in names:
        return names.index(column.name), column, reader
    if column.stand_in in names:
        number_of_truth = column.kind == "uint"
        return names.index(column.stand_in), column, _read_truth_as_number if number_of_truth else reader
    value = reader(column.absent or "")
    return 0, column, lambda cell: value


def _constructor_order() -> tuple[Column, ...]:
    return tuple(COLUMN_OF_FIELD[f.name] for f in fields(KernelMeta) if f.name != "row")


def _quoted(cell: str) -> str:
    if len(cell) < 2 or cell[0] != '"' or cell[-1] != '"':
        raise ValueError(cell)
    return cell[1:-1]


def _read_symbol(cell: str) -> str:
    symbol = _quoted(cell)
    if len(symbol) > MAX_SYMBOL_BYTES or not _SYMBOL.fullmatch(symbol):
        raise ValueError(cell)
    return symbol


def _read_digest(cell: str) -> str:
    digest = _quoted(cell)
    if not _DIGEST.fullmatch(digest):
        raise ValueError(cell)
    return digest


@lru_cache(maxsize=256)
def _read_dtype(cell: str) -> str:
    if not cell.startswith(_DTYPE_PREFIX) or not cell[len(_DTYPE_PREFIX) :].isalnum():
        raise ValueError(cell)
    return cell[len(_DTYPE_PREFIX) :].lower()


@lru_cache(maxsize=64)
def _read_sm(cell: str) -> str:
    match = re.fullmatch(_SM_PREFIX + "([1-9][0-9]{1,2}f?)", cell)
    if match is None:
        raise ValueError(cell)
    return match[1]


@lru_cache(maxsize=4096)  # 13,452 rows hold fewer than 1,000 distinct numbers
def _read_uint(cell: str) -> int:
    if len(cell) > 10 or not cell.isdecimal() or int(cell) >= 1 << 31:
        raise ValueError(cell)
    return int(cell)


def _read_truth_as_number(cell: str) -> int:
    return {"true": 1, "false": 0}[cell]


_READERS: Mapping[str, Callable[[str], object]] = {
    "symbol": _read_symbol,
    "digest": _read_digest,
    "dtype": _read_dtype,
    "sm": _read_sm,
    "uint": _read_uint,
    "bool": {"true": True, "false": False}.__getitem__,
}
