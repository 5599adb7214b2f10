"""Times of artifact operations: verifying a whole release, opening its index, importing, loading one cubin.

Run ``python benchmarks/artifacts.py`` with the published trtllm-gen wheel at hand (``make test-release``
gets it). It fills a store and an extracted copy in a temporary directory (3.3 GB), reads each once so that
all is in the page cache, and writes medians to ``benchmarks/results/artifacts.json``.

Read the comparison with ``sha256sum`` with its version in mind: builds of coreutils without OpenSSL hash in
portable C, Python's hashlib with the processor's SHA instructions. "read and hashlib" is the floor for both.
"""

from __future__ import annotations

import os
import platform
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from parts.published_wheel import PIN, report_on_wheel

from cubin_runtime import Config, __version__
from cubin_runtime.artifacts.cubins.cubin import parse_cubin
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.manifest import MANIFEST_NAME
from cubin_runtime.artifacts.pins.pin import Pin
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH, parse_header
from cubin_runtime.artifacts.tables.metadata_index import MetadataIndex, index_of_header

ROOT = Path(__file__).resolve().parents[1]
WHOLE_RUNS = 5
SMALL_RUNS = 51


def measure(wheel: Path, folder: Path) -> dict[str, object]:
    """All figures; seconds unless the name says otherwise."""
    load_before = os.getloadavg()[0]
    library = Library(Config(store=folder / "store", sources=(str(wheel),), offline=True, lazy_fetch=False))
    pin = library.pins.get(PIN)
    tree = extract(library, pin, folder / "tree")
    fetched = once(lambda: library.fetch(pin))
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            "cubin_runtime": __version__,
            "python": platform.python_version(),
            "openssl": ssl.OPENSSL_VERSION,
            "sha256sum": run(["sha256sum", "--version"], ROOT).splitlines()[0],
            "release": PIN,
            "files": pin.files,
            "bytes": pin.bytes,
        },
        "fetch_from_wheel_into_store_s": round(fetched, 3),
        "verify_release": verification(library, pin, tree),
        "index": index_figures(library, pin),
        "import": import_figures(),
        "load": load_figures(library, pin),
        "one_minute_load": {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)},
    }


def verification(library: Library, pin: Pin, tree: Path) -> dict[str, object]:
    """Our verify on the store beside ``sha256sum -c`` on the same files, alternating, page cache warm."""
    command = "import sys; from cubin_runtime.cli import main; sys.exit(main(sys.argv[1:]))"
    ours = [sys.executable, "-c", command, "verify", pin.name, "--complete", "--offline"]
    ours += ["--store", str(library.store.root)]
    peers: dict[str, Callable[[], object]] = {
        "sha256sum -c": lambda: run(["sha256sum", "--status", "-c", MANIFEST_NAME], tree),
        "cubin-runtime verify": lambda: run(ours, ROOT),
        "read and hashlib, one thread": lambda: hash_files(tree, pin, library),
        "Library.verify, one thread": lambda: library.verify(pin, complete=True, jobs=1),
    }
    for work in peers.values():  # fills the page cache
        work()
    runs: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(WHOLE_RUNS):
        for name, work in peers.items():
            runs[name].append(once(work))
    return {name: summary(times) | {"GB_per_s": rate(pin, times)} for name, times in runs.items()}


def index_figures(library: Library, pin: Pin) -> dict[str, object]:
    """Opening the index (read, hash, look one kernel up) against parsing the header it comes from."""
    header = library.load(pin.path.child(HEADER_PATH), fetch=False).data
    data = index_of_header(header)
    digest = digest_of(data)
    library.store.put(digest, data)
    symbol = parse_header(header).rows[4711].symbol
    index = MetadataIndex(data)
    return {
        "index_bytes": len(data),
        "header_bytes": len(header),
        "open_and_find_one": summary(times(lambda: MetadataIndex(library.store.read(digest, 1 << 26)).find(symbol))),
        "find_one_in_open_index": summary(times(lambda: index.find(symbol))),
        "decode_every_row": summary(times(lambda: list(index), 11)),
        "parse_header": summary(times(lambda: parse_header(header), 11)),
        "rebuild_from_header": summary(times(lambda: MetadataIndex(index_of_header(header)), 11)),
    }


def import_figures() -> dict[str, object]:
    """``import cubin_runtime`` in fresh processes: the import alone, and the process beside an empty one."""
    code = "import time; t = time.perf_counter(); import cubin_runtime; print(time.perf_counter() - t)"
    inside = [float(run([sys.executable, "-c", code], ROOT)) for _ in range(SMALL_RUNS)]
    return {
        "import_alone": summary(inside),
        "process_with_import": summary(times(lambda: run([sys.executable, "-c", "import cubin_runtime"], ROOT))),
        "empty_process": summary(times(lambda: run([sys.executable, "-c", "pass"], ROOT))),
    }


def load_figures(library: Library, pin: Pin) -> dict[str, object]:
    """One cubin out of the store: hashed bytes in memory, and its facts."""
    path = sorted(p for p in library.manifest(pin).digests if p.text.endswith(".cubin"))[6000]
    artifact = library.load(path, fetch=False)

    def cold() -> object:
        return Library(library.config).load(path, fetch=False)

    return {
        "file": path.name,
        "bytes": len(artifact.data),
        "load": summary(times(lambda: library.load(path, fetch=False))),
        "load_in_a_new_library_with_manifest": summary(times(cold, 11)),
        "parse_cubin": summary(times(lambda: parse_cubin(artifact.data))),
    }


def extract(library: Library, pin: Pin, tree: Path) -> Path:
    """The release as plain files, with its manifest, for ``sha256sum -c``."""
    for path in library.manifest(pin).digests:
        file = tree / path.relative_to(pin.path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(library.load(path, fetch=False).data)
    data, _ = library.discover(pin.path, pin.manifest_sha256)
    (tree / MANIFEST_NAME).write_bytes(data)
    return tree


def run(command: Sequence[str], folder: Path) -> str:
    """A child process that must succeed; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def once(work: Callable[[], object]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def times(work: Callable[[], object], runs: int = SMALL_RUNS) -> list[float]:
    """Seconds of each of several runs, after one that does not count."""
    work()
    return [once(work) for _ in range(runs)]


def summary(measured: Sequence[float]) -> dict[str, object]:
    """Median, smallest and largest in milliseconds, and how many runs there were."""
    return {
        "median_ms": round(statistics.median(measured) * 1e3, 4),
        "min_ms": round(min(measured) * 1e3, 4),
        "max_ms": round(max(measured) * 1e3, 4),
        "runs": len(measured),
    }


def rate(pin: Pin, measured: Sequence[float]) -> float:
    """Bytes of the release over the median, in GB/s (10^9)."""
    return round(pin.bytes / statistics.median(measured) / 1e9, 3)


def hash_files(tree: Path, pin: Pin, library: Library) -> None:
    """Read and hash each file of the extracted release, and compare nothing."""
    for path in library.manifest(pin).digests:
        digest_of((tree / path.relative_to(pin.path)).read_bytes())


def digest_of(data: bytes) -> str:
    """SHA-256 in hex."""
    return sha256(data).hexdigest()


def machine() -> dict[str, object]:
    """Processor, cores, memory and system."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "sha_extensions": " sha_ni" in info,
        "memory_GB": round(pages * page / 1e9, 1),
        "system": platform.platform(),
    }


if __name__ == "__main__":
    report_on_wheel("artifacts", __doc__, measure)
