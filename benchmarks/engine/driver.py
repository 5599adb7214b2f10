"""Engines as processes that take commands, and a result that is written after every row."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from urllib.request import urlopen

from gpu_environment import built_sources, gpu_environment
from row_origin import commit, keep

HERE = Path(__file__).resolve().parent
OURS, PEER = "CUSTOM", "FLASH_ATTN"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


class Engine:
    """A worker process, asked by lines of JSON."""

    def __init__(self, folder: Path, name: str, options: Mapping[str, Any], **environment: str) -> None:
        self.backend = options["attention_backend"]
        self.log = folder / f"{name}.{self.backend}.log"
        with self.log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **surroundings(self.backend), **environment},
            )
        self.started: dict[str, Any] = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def wait(self) -> dict[str, Any]:
        """What the start took."""
        self.started = self.answer()
        return self.started

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """The answer to a command."""
        self.tell(do, **given)
        return self.answer()

    def tell(self, do: str, **given: Any) -> None:
        """Send a command whose answer is asked for later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: the engine ended; the message has the end of its log.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.backend} ended: {self.log.read_text()[-1500:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def graphs(self) -> list[str]:
        """What the log says of captured graphs."""
        lines = self.log.read_text().replace("\r", "\n").splitlines()
        said = [line for line in lines if "100%" in line and "Capturing" in line]
        return sorted({line.partition("Capturing ")[2].partition(":")[0] for line in said})

    def kernels(self) -> list[str]:
        """The kernels that our backend's log line names."""
        lines = [line for line in self.log.read_text().splitlines() if "cubin_runtime: layers of" in line]
        return sorted({name for line in lines for name in line.rpartition("run on ")[2].split(", ")})


class Server:
    """vLLM's HTTP server of a model."""

    def __init__(self, folder: Path, model: Path, backend: str, port: int, cache_bytes: int) -> None:
        named = {"model": str(model), "served-model-name": "m", "host": "127.0.0.1", "port": str(port)}
        named |= {"attention-backend": backend, "max-model-len": "8192", "kv-cache-memory-bytes": str(cache_bytes)}
        named |= {"compilation-config": json.dumps(GRAPHS)}
        arguments = [part for name, value in named.items() for part in (f"--{name}", value)]
        self.port = port
        self.log = folder / f"server.{backend}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **surroundings(backend)},
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def wait(self, seconds: int = 120) -> float:
        """Wait until the server answers; how long that took.

        Raises:
            RuntimeError: it ended, or took longer; the message has the end of its log.
        """
        begin = time.perf_counter()
        while (passed := time.perf_counter() - begin) < seconds and self._process.poll() is None:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                return round(passed, 1)
            time.sleep(0.2)
        raise RuntimeError(f"the server is not there: {self.log.read_text()[-1500:]}")

    def bursts(self) -> list[dict[str, Any]]:
        """What streaming clients measured."""
        asked = [sys.executable, str(HERE / "client.py"), str(self.port), "m"]
        ended = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
        rows: list[dict[str, Any]] = [json.loads(line) for line in ended.stdout.splitlines()]
        return rows or [{"error": ended.stderr[-800:]}]


class Run:
    """Where models are, where results go, and how much memory a cache may take."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.out, self.models, self.rounds = chosen.out, chosen.models, chosen.rounds
        self.names, self.cache_bytes = chosen.names, chosen.cache_bytes
        self.result: dict[str, Any] = {}
        self.path = self.out / "none"

    def begin(self, section: str) -> None:
        """A new result."""
        self.path = self.out / f"vllm.{section}.json"
        self.result = {"schema": 1, "commit": commit(), "environment": gpu_environment(), "rows": []}
        self.result["environment"]["packages"]["vllm"] = version("vllm")

    def row(self, **row: Any) -> None:
        """Add a row, and write the result."""
        self.result["rows"].append(row)
        keep(self.result, self.path)
        print(json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)

    def options(self, model: str, backend: str, **more: Any) -> dict[str, Any]:
        """Arguments of ``LLM``."""
        given = {"model": str(self.models / model), "attention_backend": backend, "compilation_config": GRAPHS}
        if model.endswith("-shape"):
            given["load_format"] = "dummy"
        return {**given, "kv_cache_memory_bytes": self.cache_bytes, **more}

    def pair(self, stack: ExitStack, model: str, environment: Mapping[str, str] = {}, **more: Any) -> list[Engine]:
        """Both engines, started at the same time."""
        engines = [
            stack.enter_context(Engine(self.out, model, self.options(model, backend, **more), **environment))
            for backend in (OURS, PEER)
        ]
        for engine in engines:
            engine.wait()
        return engines

    def judged(self, engines: list[Engine], model: str, label: str) -> dict[str, Any]:
        """Errors of the engines' tokens beside float32; the engines run at the same time."""
        files = {engine: self.out / f"tokens.{label}.{engine.backend}.json" for engine in engines}
        for engine, path in files.items():
            engine.tell("tokens", out=str(path))
        made = {engine.backend: engine.answer() for engine in engines}
        out = self.out / f"judged.{label}.json"
        named = [f"{engine.backend}={path}" for engine, path in files.items()]
        asked = [sys.executable, str(HERE / "judge.py"), str(self.models / model), str(out), *named]
        ended = subprocess.run(asked, capture_output=True, text=True, check=False)
        for path in files.values():
            path.unlink(missing_ok=True)
        return {"made": made, "judge": json.loads(out.read_text()) if out.exists() else ended.stderr[-800:]}

    def both(self, engines: list[Engine]) -> dict[str, Any]:
        """What all rows of a pair have in common."""
        names = [name for engine in engines for name in engine.kernels()]
        return {"start": {engine.backend: engine.started for engine in engines}, "cubins": dict(digests(names))}


def surroundings(backend: str) -> dict[str, str]:
    """Variables of an engine's process: no network, and caches that the other engine does not share."""
    scratch = Path(os.environ.get("ENGINE_SCRATCH", Path(gettempdir(), "engine")))
    caches = {name: str(scratch / f"{name}.{backend}") for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")}
    alone = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {**caches, **alone, "VLLM_PLUGINS": "cubin_runtime"}


def digests(names: list[str]) -> Iterator[tuple[str, str]]:
    """The digests of kernels' cubins."""
    from cubin_runtime import Config
    from cubin_runtime.attention import Runtime

    with TemporaryDirectory() as store:
        release = Runtime(Config(store=Path(store), sources=built_sources(), offline=True)).native_release()
    for kernel in release.kernels:
        if kernel.name in names:
            yield kernel.name, release.file_of(kernel).sha256
