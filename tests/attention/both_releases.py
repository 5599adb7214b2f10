"""A store with releases of both families, their cubins without code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cubin_runtime import Config
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.artifacts.tables.metadata_index import index_of_header
from tests.golden.adapter import ABIS, NATIVE, PUBLISHED, native_files, published_files
from tests.golden.cubins import write_release


def both_releases_in(folder: Path, is_used: Callable[[Mapping[str, Any]], bool]) -> Config:
    """Native kernels and those published ones that are used, by their traits; the store keeps the metadata's index."""
    pins, published = folder / "pins.toml", published_files(is_used)
    index = hashlib.sha256(index_of_header(published[HEADER_PATH])).hexdigest()
    pins.write_text(
        write_release(folder, NATIVE, ABIS[NATIVE], native_files())
        + write_release(folder, PUBLISHED, ABIS[PUBLISHED], published).rstrip()
        + f'\nindex_sha256 = "{index}"\n'
    )
    sources = tuple(str(folder / f"{name}.zip") for name in (NATIVE, PUBLISHED))
    (folder / "store").mkdir()
    return Config(store=folder / "store", sources=sources, pin_files=(pins,), offline=True)
