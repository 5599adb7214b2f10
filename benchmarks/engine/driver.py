"""Engines as processes that take commands, and a result that is written after every row."""

from __future__ import annotations

import argparse
import json
import multiprocessing
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

from .judge import judge
from .worker import serve

HERE = Path(__file__).resolve().parent
OURS, PEER, MLA_PEER = "CUSTOM", "FLASH_ATTN", "FLASH_ATTN_MLA"
# Engines are forked from a process that has imported vLLM, which takes half a minute, and has not touched the GPU.
PROCESSES = multiprocessing.get_context("fork")
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


class Engine:
    """A vLLM in a process of its own, asked by commands; ``label`` names it in results."""

    def __init__(
        self, folder: Path, name: str, options: Mapping[str, Any], in_process: bool, **environment: str
    ) -> None:
        self.backend = self.label = options["attention_backend"]
        self.log = folder / f"{name}.log"
        self._connection, other = PROCESSES.Pipe()
        around = {**surroundings(self.backend), **environment}
        self._process = PROCESSES.Process(target=serve, args=(other, dict(options), in_process, self.log, around))
        self._process.start()
        other.close()
        self.started: dict[str, Any] = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process, if it is there."""
        with suppress(OSError):
            self._connection.send({"do": "stop"})
        self._process.join(15)
        if self._process.is_alive():
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
        self._connection.send({"do": do, **given})

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: the engine ended; the message has the end of its log.
        """
        while not self._connection.poll(0.5) and self._process.is_alive():
            pass
        try:
            answer: dict[str, Any] = self._connection.recv() if self._connection.poll() else {}
        except EOFError:
            answer = {}
        if not answer:
            raise RuntimeError(f"{self.label} ended: {self.log.read_text()[-1500:]}")
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
        named |= {"compilation-config": json.dumps(GRAPHS), "gpu-memory-utilization": "0.05"}
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
        self.names, self.cache_bytes, self.label = chosen.names, chosen.cache_bytes, chosen.label
        self.result: dict[str, Any] = {}
        self.path = self.out / "none"

    def begin(self, section: str) -> None:
        """A new result."""
        self.path = self.out / f"vllm.{section}{self.label}.json"
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
        # Engines share the card: a small part of its memory suffices for a start, whatever the cache takes.
        given |= {"kv_cache_memory_bytes": self.cache_bytes, "gpu_memory_utilization": 0.05}
        return {**given, **more}

    def pair(
        self,
        stack: ExitStack,
        model: str,
        in_process: bool = False,
        environment: Mapping[str, str] = {},
        more: Mapping[str, Mapping[str, Any]] = {},
        **options: Any,
    ) -> list[Engine]:
        """Both backends and ``more`` variants, started at the same time."""
        peer = MLA_PEER if model.startswith("deepseek") else PEER
        return self.start(stack, model, {OURS: {}, peer: {}, **more}, in_process, environment, **options)

    def start(
        self,
        stack: ExitStack,
        model: str,
        variants: Mapping[str, Mapping[str, Any]],
        in_process: bool = False,
        environment: Mapping[str, str] = {},
        **options: Any,
    ) -> list[Engine]:
        """Engines that differ in some options, by labels that begin with the backend's name, started together."""
        engines = []
        for label, own in variants.items():
            given = self.options(model, label.split()[0], **{**options, **own})
            name = f"{self.path.stem}.{model}.{label.replace(' ', '_')}"
            engine = Engine(self.out, name, given, in_process, **environment)
            engine.label = label
            engines.append(stack.enter_context(engine))
        for engine in engines:
            engine.wait()
        return engines

    def judged(self, engines: list[Engine], model: str, label: str) -> dict[str, Any]:
        """Errors of the engines' tokens beside float32; the engines run at the same time, and have ended then."""
        files = {each.label: self.out / f"tokens.{label}.{each.label.replace(' ', '_')}.json" for each in engines}
        for engine in engines:
            engine.tell("tokens", out=str(files[engine.label]))
        made = {engine.label: engine.answer() for engine in engines}
        for engine in engines:
            engine.end()  # float32 takes the memory of two engines
        out = self.out / f"judged.{label}.json"
        process = PROCESSES.Process(target=judge, args=(self.models / model, out, files))
        process.start()
        process.join()
        result = json.loads(out.read_text()) if out.exists() else f"exit code {process.exitcode}"
        for path in (out, *files.values()):
            path.unlink(missing_ok=True)
        return {"made": made, "judge": result}

    def both(self, engines: list[Engine]) -> dict[str, Any]:
        """What all rows of a pair have in common."""
        names = [name for engine in engines for name in engine.kernels()]
        return {"start": {engine.label: engine.started for engine in engines}, "cubins": dict(digests(names))}


def import_engine() -> None:
    """Import what every engine needs, before engines are forked.

    Raises:
        RuntimeError: that initialized CUDA, which no forked process could use then.
    """
    os.environ.update(surroundings(PEER))
    import torch
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_worker  # noqa: F401

    if torch.cuda.is_initialized():
        raise RuntimeError("importing vLLM initialized CUDA")


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
