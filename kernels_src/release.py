"""The release tree: cubins, ``kernels.json`` and ``checksums.txt``, the same bytes from the same sources."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cubin_runtime._version import KERNELS_VERSION
from cubin_runtime.artifacts.manifest import MANIFEST_NAME
from cubin_runtime.artifacts.tables.native_kernels import FILE_NAME, SCHEMA, parse_native_kernels
from cubin_runtime.launch.structs import StructLayout

from .compiling import CompiledKernel, flags_of
from .toolchain import PACKAGES

RELEASE = f"hopper-{KERNELS_VERSION}"


@dataclass(frozen=True, slots=True)
class Release:
    """A written release: its folder, the digest of its manifest, the files that it lists and their bytes."""

    folder: Path
    manifest_sha256: str
    files: int
    bytes: int


def kernel_entry(kernel: CompiledKernel, layout: StructLayout, sources_sha256: str) -> dict[str, object]:
    """One entry of ``kernels.json``; the keys are the fields of ``NativeKernel``."""
    variant = kernel.variant
    return {
        "name": variant.name,
        "symbol": variant.symbol,
        "file": variant.file,
        "sm": variant.sm,
        "family": variant.family,
        "operation": variant.operation,
        "traits": dict(variant.traits),
        "struct": layout.name,
        "struct_bytes": layout.size,
        "struct_fingerprint": layout.fingerprint,
        "threads": kernel.resources.threads,
        "dynamic_shared_bytes": kernel.resources.dynamic_shared_bytes,
        "static_shared_bytes": kernel.resources.static_shared_bytes,
        "registers": kernel.resources.registers,
        "spill_bytes": kernel.resources.spill_bytes,
        "flags": list(flags_of(variant)),
        "sources_sha256": sources_sha256,
        "status": variant.status,
    }


def write_release(
    out: Path, name: str, cubins: Mapping[str, bytes], entries: Sequence[Mapping[str, object]]
) -> Release:
    """Write the tree ``out/name``; an existing one is replaced only once the new one is complete.

    Args:
        out: the folder that holds releases.
        name: the release's folder.
        cubins: relative path to bytes.
        entries: results of ``kernel_entry``, in any order.
    """
    document = {
        "schema": SCHEMA,
        "release": name,
        "toolchain": dict(PACKAGES),
        "kernels": sorted(entries, key=lambda entry: str(entry["name"])),
    }
    index = (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
    parse_native_kernels(index, FILE_NAME)
    files = {**cubins, FILE_NAME: index}
    manifest = "".join(f"{hashlib.sha256(files[path]).hexdigest()}  {path}\n" for path in sorted(files)).encode()
    _replace_tree(out / name, {**files, MANIFEST_NAME: manifest})
    return Release(
        folder=out / name,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        files=len(files),
        bytes=sum(len(data) for data in files.values()),
    )


def _replace_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for path, data in files.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            (partial / path).write_bytes(data)
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_release(folder: Path) -> Release:
    """Describe a tree that ``write_release`` wrote; OSError if it is not there."""
    manifest = (folder / MANIFEST_NAME).read_bytes()
    listed = [line.split(b"  ", 1)[1].decode() for line in manifest.splitlines()]
    size = sum((folder / path).stat().st_size for path in listed)
    return Release(folder, hashlib.sha256(manifest).hexdigest(), len(listed), size)
