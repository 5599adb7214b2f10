"""The demo's last step: NVIDIA's published release, fetched, verified and inspected where it is available locally."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from demo_text import detail, say

from cubin_runtime import Config
from cubin_runtime.artifacts.cubins.cubin import parse_cubin
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.tables.consistency import TRTLLM_PARAMETER_BYTES, trtllm_disagreements
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH, parse_header

PIN = "trtllm-gen-0.6.13"
VERSION = PIN.rpartition("-")[2]
WHEEL = f"flashinfer_cubin-{VERSION}-py3-none-any.whl"
KERNELS = 20


def find_sources() -> tuple[str, ...]:
    """What is available locally: the configured sources, the installed package, or the wheel of the tests."""
    if configured := os.environ.get("CUBIN_RUNTIME_SOURCES", "").replace(",", " ").split():
        return tuple(configured)
    try:
        if metadata.version("flashinfer-cubin") == VERSION:
            return ("package",)
    except metadata.PackageNotFoundError:
        pass
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cubin-runtime-test"
    return (str(cache / WHEEL),) if (cache / WHEEL).is_file() else ()


def check_published_release(store: Path) -> None:
    """Fetch some cubins into ``store``, verify them, and compare each with its row of metadata."""
    sources = find_sources()
    if not sources:
        say(f"Left out, since it is not on this machine: 'pip install flashinfer-cubin=={VERSION}' brings it.")
        return
    detail(f"from {', '.join(sources)}")
    library = Library(Config(store=store, sources=sources))
    pin = library.pins.get(PIN)
    say(f"Its checksums.txt is the pinned one and lists {len(library.manifest(pin).digests)} files.")
    header = pin.path.child(HEADER_PATH)
    library.fetch(pin, [header])
    rows = parse_header(library.load(header, fetch=False).data).rows
    chosen = rows[:: len(rows) // KERNELS][:KERNELS]
    paths = [pin.path.child(row.file) for row in chosen]
    report = library.fetch(pin, paths)
    verified = library.verify(pin, [header, *paths], complete=True)
    say(f"{report.fetched} of its {len(rows)} kernels fetched in {report.seconds:.2f} s: {verified.ok} files ok.")
    for row, path in zip(chosen, paths, strict=True):
        artifact = library.load(path, fetch=False)
        cubin = parse_cubin(artifact.data)
        faults = trtllm_disagreements(
            row,
            artifact.data,
            cubin,
            manifest_sha256=artifact.sha256,
            parameter_bytes=TRTLLM_PARAMETER_BYTES,
        )
        if faults:
            raise AssertionError(f"{path}: {'; '.join(map(str, faults))}")
    say("Digest, symbol, parameters, threads, shared memory and architecture of each agree with NVIDIA's metadata.")
    detail(f"{row.symbol}: {cubin.architecture}, {len(artifact.data)} bytes, {row.threads} threads")
