"""Small made-up releases on disk, and libraries that know them."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.pins.pin import Pin, format_pin
from cubin_runtime.artifacts.sources.failover import FetchPolicy
from cubin_runtime.artifacts.sources.http_pace import HttpLimits
from cubin_runtime.config import Config

# No server that is merely slow meets these, however loaded the machine is; the test of a limit shortens that one.
PATIENT_LIMITS = HttpLimits(connect=60.0, headers=90.0, silence=60.0, window=60.0, least_rate=1.0)
QUICK_POLICY = FetchPolicy(first_delay=0.01, longest_delay=0.02, longest_retry_after=2.0, lock_give_up=60.0)
FILES = {
    "kernels.bin": b"first kernel " * 100,
    "fmha/decode.cubin": b"second kernel " * 200,
    "fmha/prefill.cubin": b"third kernel " * 300,
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_of(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{sha256(data)}  {name}\n" for name, data in files.items()).encode()


@dataclass(frozen=True)
class Release:
    """A tree ``root/<folder>/...`` with its pin, and a file that holds the pin."""

    root: Path
    pin: Pin
    pin_file: Path
    files: Mapping[str, bytes]

    def path(self, name: str) -> ArtifactPath:
        return self.pin.path.child(name)

    def digest(self, name: str) -> str:
        return sha256(self.files[name])

    def file(self, name: str) -> Path:
        return self.root / self.pin.path.text / name

    def library(
        self,
        store: Path,
        *sources: object,
        offline: bool = False,
        policy: FetchPolicy = QUICK_POLICY,
        limits: HttpLimits = PATIENT_LIMITS,
    ) -> Library:
        named = tuple(str(source) for source in sources)
        config = Config(store=store, sources=named, pin_files=(self.pin_file,), offline=offline)
        return Library(config, policy=policy, limits=limits)


def make_release(
    place: Path, files: Mapping[str, bytes] | None = None, name: str = "made-1.0", folder: str = "made/fmha"
) -> Release:
    files = FILES if files is None else files
    root = place / "tree"
    for relative, data in {**files, "checksums.txt": manifest_of(files)}.items():
        file = root / folder / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    pin = Pin(
        name=name,
        path=ArtifactPath(folder),
        manifest_sha256=sha256(manifest_of(files)),
        files=len(files),
        bytes=sum(map(len, files.values())),
        max_file_bytes=max(map(len, files.values())),
        index_sha256=None,
        abi=None,
        licence="Apache-2.0",
        sources=(),
    )
    pin_file = place / f"{name}.pins.toml"
    pin_file.write_text(format_pin(pin))
    return Release(root, pin, pin_file, files)


def zip_tree(root: Path, archive: Path, prefix: str = "package/data/") -> Path:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                opened.write(file, prefix + file.relative_to(root).as_posix())
    return archive


def visible_files(store: Path) -> Sequence[str]:
    """Names of all that stands in the store's object folders, temporaries included."""
    return sorted(file.name for file in (store / "sha256").rglob("*") if not file.is_dir())
