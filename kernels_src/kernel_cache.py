"""Kernels of earlier builds, named by the digest of everything that determines their bytes."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cubin_runtime.artifacts.atomic_write import replace_file

from .compiling import CompiledKernel, Resources, compile_command
from .toolchain import Toolchain
from .variants import Variant

VARIABLE = "CUBIN_RUNTIME_KERNEL_CACHE"
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / "build" / "kernel_cache"
MAX_BYTES = 256 << 20  # the kernels of a release are 15 MB
# Raise it with the layout of an entry, and with whatever else decides what a compilation gives.
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A folder with one file per compiled kernel: a SHA-256 of the rest, a line of JSON, the cubin.

    A file appears whole and is compared with its digest when it is read, so processes share a folder without locks.
    The cache saves time and nothing else: an entry that cannot be read is compiled again, one that cannot be written
    is not kept. ``reuse=False`` compiles every kernel and replaces its entry.
    """

    folder: Path
    reuse: bool = True

    def load(self, key: str, variant: Variant) -> CompiledKernel | None:
        """The kernel that was stored under ``key``; None without an intact entry. Its cubin is still to be checked."""
        file = self.folder / key
        try:
            digest, _, content = file.read_bytes().partition(b"\n") if self.reuse else (b"", b"", b"")
        except OSError:
            return None
        if digest != _sha256(content).encode():
            return None
        line, _, cubin = content.partition(b"\n")
        entry = json.loads(line)
        if entry["key"] != key:
            return None
        with suppress(OSError):
            os.utime(file)  # ``prune`` removes the entries that were used longest ago
        return CompiledKernel(variant, cubin, Resources(**entry["resources"]))

    def store(self, key: str, kernel: CompiledKernel) -> None:
        """Keep ``kernel`` under ``key``."""
        entry = {"key": key, "name": kernel.variant.name, "resources": asdict(kernel.resources)}
        content = json.dumps(entry).encode() + b"\n" + kernel.cubin
        with suppress(OSError):
            replace_file(self.folder / key, _sha256(content).encode() + b"\n" + content)

    def prune(self, max_bytes: int = MAX_BYTES) -> None:
        """Remove the entries that were used longest ago until the rest is at most ``max_bytes``."""
        files = []
        with suppress(OSError):
            for file in self.folder.iterdir():
                with suppress(FileNotFoundError):  # another process pruned it
                    files.append((file.stat().st_mtime_ns, file.stat().st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= max_bytes:
                return
            with suppress(OSError):
                file.unlink(missing_ok=True)
            total -= size


def kernel_cache(*, reuse: bool = True) -> KernelCache:
    """The cache in the folder that ``CUBIN_RUNTIME_KERNEL_CACHE`` names, else in ``build/kernel_cache``."""
    return KernelCache(Path(os.environ.get(VARIABLE) or DEFAULT_FOLDER).absolute(), reuse)


def cache_key(variant: Variant, sources_sha256: str, toolchain_sha256: str) -> str:
    """The digest (hex) of what determines a kernel: sources, the compiler's command without its paths, toolchain.

    Args:
        variant: the kernel.
        sources_sha256: the digest of its sources and generated headers (``includes.sources_sha256``).
        toolchain_sha256: the digest of the compiler's files (``Toolchain.sha256``).
    """
    command = compile_command(variant, Toolchain(Path("nvcc"), ""), Path("root"), Path("include"), Path("output"))
    return _sha256(json.dumps([_FORMAT, command, sources_sha256, toolchain_sha256]).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
