"""vLLM's options, its backends, and its server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from .commands import Requests
from .driver import HERE, Run, scratch
from .vllm_worker import Worker

OURS, PEER, MLA_PEER, LISTS_PEER = "CUSTOM", "FLASH_ATTN", "FLASH_ATTN_MLA", "FLASHMLA_SPARSE"
PACKED = "fp8_ds_mla"  # a cache of e4m3 with scales in its rows
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# Engines share the card: a small part of its memory suffices for a start, whatever the cache takes.
PART_OF_MEMORY = 0.05


class VllmRun(Run):
    """A run of vLLM."""

    engine, ours = "vllm", OURS

    def peer_of(self, model: str) -> str:
        """FlashAttention-3, for MLA too; FlashMLA where an indexer chooses the keys."""
        if model.startswith("deepseek-lists"):
            return LISTS_PEER
        return MLA_PEER if model.startswith("deepseek") else PEER

    def maker(self, options: dict[str, Any], in_process: bool) -> Callable[[], Requests]:
        """What makes an engine in the process that calls it."""
        return partial(Worker, options, in_process)

    def options(self, model: str, backend: str, **more: Any) -> dict[str, Any]:
        """Arguments of ``LLM``."""
        given = {"model": str(self.models / model), "attention_backend": backend, "compilation_config": GRAPHS}
        if model.endswith("-shape"):
            given["load_format"] = "dummy"
        if model.startswith("deepseek-lists"):
            given["max_num_seqs"] = 64  # DeepGEMM compiles a kernel for every 32 requests that a graph may have
        given |= {"kv_cache_memory_bytes": self.cache_bytes, "gpu_memory_utilization": PART_OF_MEMORY}
        return {**given, **more}

    def surroundings(self, backend: str) -> dict[str, str]:
        """Variables of an engine's process: no network, and caches that the other engine does not share."""
        return surroundings(backend)

    def import_engine(self) -> None:
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


class Server:
    """vLLM's HTTP server of a model."""

    def __init__(self, folder: Path, model: Path, backend: str, port: int, cache_bytes: int) -> None:
        named = {"model": str(model), "served-model-name": "m", "host": "127.0.0.1", "port": str(port)}
        named |= {"attention-backend": backend, "max-model-len": "8192", "kv-cache-memory-bytes": str(cache_bytes)}
        named |= {"compilation-config": json.dumps(GRAPHS), "gpu-memory-utilization": str(PART_OF_MEMORY)}
        arguments = [part for name, value in named.items() for part in (f"--{name}", value)]
        self.backend, self.port = backend, port
        self.log = folder / f"server.{port}.log"
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


def surroundings(backend: str) -> dict[str, str]:
    """Variables of an engine's process: no network, and caches that the other engine does not share."""
    caches = {name: str(scratch() / f"{name}.{backend}") for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")}
    alone = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {**caches, **alone, "VLLM_PLUGINS": "cubin_runtime"}
