"""Fetching a whole release: ours beside flashinfer-python's ``download_artifacts``, same nginx, same run.

Run ``python benchmarks/fetch_peers.py`` with nginx installed and the published wheel at hand (``make
test-release`` gets it). The peer is installed into an environment of its own under ``build/``. Writes
``benchmarks/results/fetch.json`` and the plot ``docs/fetch_throughput.png``; ``--plot`` draws it again alone, and
``--only PART`` measures one part again and keeps the others.

Ours is timed as a whole process of the command line, the peer as the call alone, after its imports. Nothing
is removed shortly before a timed run: ext4 searches long for inodes that were not recently freed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from parts.nginx import Nginx, nginx, nginx_binary
from parts.throughput_plot import draw

from cubin_runtime import Config, __version__
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins.pin import Pin

ROOT = Path(__file__).resolve().parents[1]
PIN = "trtllm-gen-0.6.13"
WHEEL = "flashinfer_cubin-0.6.13-py3-none-any.whl"
PEER = "flashinfer-python==0.7.2.post1"
ONE_MODEL = ["--sm", "100", "--dtype", "bf16", "--head-dim", "128", "--family", "decode"]
JOBS = (1, 2, 4, 8, 16, 32)
PEER_JOBS = (1, 4, 16)
PROCESSES_AT_ONCE = 8
REST_SECONDS = 40
PARTS = ("rounds", "pools", "processes_at_once", "one_model", "throughput")
ALONE = """
from cubin_runtime.artifacts.fetch import process_pool
process_pool.OBJECTS_A_PROCESS = 1 << 62
"""
OURS = """
import json, resource, sys, time
began = time.perf_counter()
from cubin_runtime.cli import main
code = main(sys.argv[2:])
mine, theirs = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
open(sys.argv[1], "w").write(json.dumps({"parent": mine * 1024, "largest_worker": theirs * 1024}))
sys.exit(code)
"""


def main() -> None:
    """Measure everything and write one JSON file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cubin-runtime-test"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, default=cache / WHEEL)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "fetch.json")
    parser.add_argument("--image", type=Path, default=ROOT / "docs" / "fetch_throughput.png")
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has the peer; default: install it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, help="measure this part again and put it into the JSON file")
    parser.add_argument("--plot", action="store_true", help="draw the plot from the JSON file, measure nothing")
    given = parser.parse_args()
    if not given.plot:
        if not given.wheel.is_file():
            parser.error(f"no wheel at {given.wheel}; `make test-release` gets it")
        if nginx_binary() is None:
            parser.error("nginx is not installed (Debian: apt-get install nginx-light)")
        peer = given.peer_python or install_peer(ROOT / "build" / "peer")
        with tempfile.TemporaryDirectory(prefix="cubin-runtime-fetch-") as folder:
            if given.only:
                report = json.loads(given.out.read_text())
                report |= measure_part(given.wheel, Path(folder), peer, given.only, given.rounds)
            else:
                report = measure(given.wheel, Path(folder), peer, given.rounds)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps(report, indent=2))
    draw(json.loads(given.out.read_text()), given.image)


def measure_part(wheel: Path, folder: Path, peer: Path, part: str, rounds: int) -> dict[str, object]:
    """One part alone, and beside whom it was measured."""
    with bench_of(wheel, folder, peer) as bench:
        return bench.context() | (bench.rounds(rounds) if part == "rounds" else {part: getattr(bench, part)()})


def measure(wheel: Path, folder: Path, peer: Path, rounds: int) -> dict[str, object]:
    """All figures; seconds and bytes."""
    with bench_of(wheel, folder, peer) as bench:
        measured = bench.rounds(rounds)
        bench.rest()
        parts = {part: getattr(bench, part)() for part in PARTS if part != "rounds"}
        return bench.context() | measured | parts


@contextmanager
def bench_of(wheel: Path, folder: Path, peer: Path) -> Iterator[Bench]:
    """A bench on a running server, with the release in the page cache."""
    pin = Library(Config(store=folder / "none", sources=())).pins.get(PIN)
    tree = extract(wheel, folder / "tree", pin)
    with nginx(tree, folder / "nginx") as server:
        bench = Bench(server, folder, peer, pin)
        bench.warm(tree)
        yield bench


class Bench:
    """One server and one folder; every store is a new one below it."""

    def __init__(self, server: Nginx, folder: Path, peer: Path, pin: Pin) -> None:
        self.server = server
        self.folder = folder
        self.peer_python = peer
        self.pin = pin
        self._stores = 0

    def warm(self, tree: Path) -> None:
        """Read the tree once, so that every run finds it in the page cache."""
        for file in tree.rglob("*"):
            if file.is_file():
                file.read_bytes()

    def context(self) -> dict[str, object]:
        """When, where and of what it was measured."""
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": {
                "cubin_runtime": __version__,
                "python": platform.python_version(),
                "nginx": self.server.version,
                "peer": PEER,
                "release": PIN,
                "files": self.pin.files,
                "bytes": self.pin.bytes,
            },
        }

    def rounds(self, count: int) -> dict[str, object]:
        """So many rounds, their medians, and the ratios of these."""
        measured = [self.round() for _ in range(count)]
        return {"medians": medians(measured), "ratios": ratios(medians(measured)), "rounds": measured}

    def round(self) -> dict[str, float]:
        """Peer and ours, cold and again, and both sorts of verification."""
        found: dict[str, float] = {"load_before": os.getloadavg()[0]}
        theirs, ours = self.new_store("peer"), self.new_store("ours")
        self.settle()
        found["peer_cold_s"] = self.run_peer(theirs)
        found["peer_again_s"] = self.run_peer(theirs)
        found["peer_files_besides"] = sum(file.name.endswith(".lock") for file in theirs.rglob("*"))
        self.settle()
        self.server.forget()
        found["ours_cold_s"], memory = self.run_ours(ours, "fetch")
        found["ours_cold_bytes_sent"] = self.sent()
        found |= {f"ours_cold_{name}_peak_bytes": size for name, size in memory.items()}
        found["ours_again_s"], _ = self.run_ours(ours, "fetch")
        found["ours_files_besides"] = besides(ours)
        found["sha256_two_threads_s"] = statistics.median(hash_store(ours) for _ in range(3))
        found["ours_verify_library_s"] = statistics.median(self.verify(ours) for _ in range(3))
        found["ours_verify_process_s"] = statistics.median(self.run_ours(ours, "verify")[0] for _ in range(3))
        found["load_after"] = os.getloadavg()[0]
        return {name: round(value, 3) for name, value in found.items()}

    def pools(self, rounds: int = 4) -> dict[str, object]:
        """Cold fetches with worker processes and with threads of one process alone, in turns."""
        found: dict[str, list[float]] = {"processes_s": [], "threads_s": []}
        for _ in range(rounds):
            for name, before in (("processes_s", ""), ("threads_s", ALONE)):
                self.settle()
                found[name].append(round(self.run_ours(self.new_store("pool"), "fetch", before=before)[0], 3))
        processes, threads = (statistics.median(found[name]) for name in ("processes_s", "threads_s"))
        return {**found, "threads_over_processes": round(threads / processes, 2), "load": os.getloadavg()[0]}

    def processes_at_once(self) -> dict[str, object]:
        """Several fetches of everything into one empty store, started together."""
        store = self.new_store("together")
        self.server.forget()
        began = time.perf_counter()
        with ThreadPoolExecutor(PROCESSES_AT_ONCE) as pool:
            times = list(pool.map(lambda _: self.run_ours(store, "fetch")[0], range(PROCESSES_AT_ONCE)))
        sent = self.sent()
        return {
            "processes": PROCESSES_AT_ONCE,
            "seconds": round(time.perf_counter() - began, 2),
            "last_process_s": round(max(times), 2),
            "bytes_sent": sent,
            "bytes_of_one_copy": self.pin.bytes,
            "copies": round(sent / self.pin.bytes, 5),
            "files_besides": besides(store),
        }

    def one_model(self) -> dict[str, object]:
        """What one model needs, from an empty store, its metadata included; the median of three runs."""
        self.settle()
        seconds = []
        for _ in range(3):
            store = self.new_store("model")
            self.server.forget()
            seconds.append(self.run_ours(store, "fetch", *ONE_MODEL)[0])
        sent = self.sent()
        files = [file for file in (store / "sha256").rglob("*") if file.is_file()]
        return {
            "filters": " ".join(ONE_MODEL),
            "seconds": round(statistics.median(seconds), 3),
            "files": len(files),
            "bytes_sent": sent,
            "share_of_release": round(sent / self.pin.bytes, 4),
            "load": os.getloadavg()[0],
        }

    def throughput(self) -> dict[str, list[dict[str, float]]]:
        """Cold fetches of everything with so many jobs; the peer with so many threads."""
        found: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
        for jobs in JOBS:
            self.settle()
            seconds, _ = self.run_ours(self.new_store("jobs"), "fetch", "--jobs", str(jobs))
            found["ours"].append(self.point(jobs, seconds))
        self.rest()
        for jobs in PEER_JOBS:
            self.settle()
            found["peer"].append(self.point(jobs, self.run_peer(self.new_store("jobs"), jobs)))
        return found

    def point(self, jobs: int, seconds: float) -> dict[str, float]:
        """One point of the plot; MB are 10^6 bytes."""
        rate = self.pin.bytes / seconds / 1e6
        return {"jobs": jobs, "seconds": round(seconds, 3), "MB_per_s": round(rate, 1), "load": os.getloadavg()[0]}

    def run_ours(self, store: Path, *words: str, before: str = "") -> tuple[float, dict[str, int]]:
        """One process of the command line: its seconds, and the peak memory of it and its largest worker."""
        with tempfile.NamedTemporaryFile() as memory:
            verb, *rest = words
            options = ["--store", str(store), "--json", *rest]
            if verb == "fetch":
                options += ["--source", self.server.url]
            command = [sys.executable, "-c", before + OURS, memory.name, verb, PIN, *options]
            began = time.perf_counter()
            subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - began, json.loads(Path(memory.name).read_text())

    def run_peer(self, store: Path, threads: int | None = None) -> float:
        """The peer's call into a folder; its own default is 4 threads."""
        variables = environment()
        if threads is not None:
            variables["FLASHINFER_CUBIN_DOWNLOAD_THREADS"] = str(threads)
        script = str(ROOT / "benchmarks" / "parts" / "peer_download.py")
        release = (self.pin.path, self.pin.manifest_sha256)
        command = [str(self.peer_python), script, self.server.url, str(store), *map(str, release)]
        done = subprocess.run(
            command, env=variables, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        return float(done.stdout.split()[-1])

    def verify(self, store: Path) -> float:
        """Seconds of the library's own verification, its manifest parsed."""
        library = Library(Config(store=store, sources=()))
        library.manifest(self.pin)
        began = time.perf_counter()
        report = library.verify(self.pin, complete=True)
        assert report.ok == self.pin.files
        return time.perf_counter() - began

    def sent(self) -> int:
        """Bytes that the server sent since it was told to forget; its log comes a moment later."""
        time.sleep(0.5)
        return self.server.sent()[1]

    def new_store(self, name: str) -> Path:
        """A folder that does not exist yet."""
        self._stores += 1
        return self.folder / f"{name}-{self._stores}"

    def settle(self) -> None:
        """Let the disk write what the run before left."""
        os.sync()
        time.sleep(1)

    def rest(self) -> None:
        """Remove all stores and wait until the file system has forgotten that."""
        for store in self.folder.glob("*-*"):
            shutil.rmtree(store)
        os.sync()
        time.sleep(REST_SECONDS)


def besides(store: Path) -> int:
    """Files of a store that are neither artifacts nor the manifest."""
    objects = sum(1 for file in (store / "sha256").rglob("*") if file.is_file() and not file.name.startswith("."))
    return sum(1 for file in store.rglob("*") if file.is_file()) - objects


def hash_store(store: Path) -> float:
    """Seconds that two threads take to read and hash every object."""
    files = sorted(str(file) for file in (store / "sha256").rglob("*") if file.is_file())

    def work(part: Sequence[str]) -> None:
        for name in part:
            with open(name, "rb") as file:
                sha256(file.read()).hexdigest()

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (files[::2], files[1::2])))
    return time.perf_counter() - began


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


def ratios(found: dict[str, float]) -> dict[str, float]:
    """The figures that have a target."""
    return {
        "cold_speedup": round(found["peer_cold_s"] / found["ours_cold_s"], 2),
        "verify_library_over_two_thread_sha256": round(
            found["ours_verify_library_s"] / found["sha256_two_threads_s"], 2
        ),
        "verify_process_over_two_thread_sha256": round(
            found["ours_verify_process_s"] / found["sha256_two_threads_s"], 2
        ),
    }


def extract(wheel: Path, tree: Path, pin: Pin) -> Path:
    """The release's folder as it lies on the publisher's server."""
    prefix = f"flashinfer_cubin/cubins/{pin.path}/"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree, [name for name in archive.namelist() if name.startswith(prefix)])
    return tree / "flashinfer_cubin" / "cubins"


def install_peer(folder: Path) -> Path:
    """An environment with the peer and the three packages that its downloader imports."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "filelock", "requests", "tqdm"], check=True)
        subprocess.run([*pip, "--no-deps", PEER], check=True)
    return python


def environment() -> dict[str, str]:
    """Ours on the path, no proxy for loopback."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def machine() -> dict[str, object]:
    """Processor, cores, memory and system."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "sha_extensions": " sha_ni" in info,
        "memory_GB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "system": platform.platform(),
        "one_minute_load_at_the_end": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
