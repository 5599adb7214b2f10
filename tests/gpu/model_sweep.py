"""Every causal model of transformers with our attention: ``python -m tests.gpu.model_sweep --out DIR``.

Small random models, several processes on one GPU, each case beside transformers' own attention; ``sweep_cases`` has the
cases. ``transformers_models.json`` is written after every model. Without a GPU, ``--device cpu`` puts the package's
references in place of the kernels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("USE_HUB_KERNELS", "NO")

MODEL_SECONDS = 60  # a model that takes longer is given up
NAME = "transformers_models.json"


class Late(BaseException):
    """A model took too long; no case of it may go on, as it would behind an ``Exception``."""


def operators_of(device: str) -> Any:
    """The kernels, of the release that the benchmarks measure; on a CPU the references, for what the kernels take."""
    if device == "cpu":
        from tests.integrations.attention_stand_in import StandIn, in_domain

        return in_domain(StandIn().operators)
    from gpu_environment import built_sources

    from cubin_runtime import Config
    from cubin_runtime.attention import Runtime, set_default_runtime
    from cubin_runtime.integrations.transformers.operators import Operators

    store = Path(os.environ["CUBIN_RUNTIME_CACHE"])
    set_default_runtime(Runtime(Config(store=store, sources=built_sources(), offline=True)))
    return Operators()


def work(pipe: Connection, device: str) -> None:
    """A worker process: a row for each type of model that comes through the pipe."""
    import torch

    from tests.integrations.sweep_cases import swept

    torch.set_num_threads(1)
    operators = operators_of(device)

    def late(*_: Any) -> None:
        raise Late(f"more than {MODEL_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    while (kind := pipe.recv()) is not None:
        begin = time.monotonic()
        signal.alarm(MODEL_SECONDS)
        try:
            row = swept(kind, device, operators)
        except (Exception, Late) as error:
            row = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        pipe.send(row | {"seconds": round(time.monotonic() - begin, 1)})
        if device == "cuda":
            torch.cuda.synchronize()  # a sticky error ends the process here, and the next model gets a new one
            torch.cuda.empty_cache()


class Crew:
    """Worker processes, each fed by a thread; one that dies or hangs is replaced."""

    def __init__(self, kinds: list[str], device: str, keep: Any) -> None:
        self.left, self.device, self.keep = list(reversed(kinds)), device, keep
        self.lock = threading.Lock()
        self.context = multiprocessing.get_context("spawn")

    def run(self, workers: int, until: float) -> None:
        threads = [threading.Thread(target=self.feed, args=(until,)) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def feed(self, until: float) -> None:
        process, pipe = self.started()
        while time.monotonic() < until:
            with self.lock:
                if not self.left:
                    break
                kind = self.left.pop()
            row = None
            try:
                pipe.send(kind)
                if pipe.poll(min(2 * MODEL_SECONDS, max(1.0, until - time.monotonic()))):
                    row = pipe.recv()
            except (EOFError, OSError):
                pass
            with self.lock:
                self.keep(kind, row or {"status": "failed", "error": "the process ended or did not answer"})
            if row is None:
                process.kill()
                process, pipe = self.started()
        process.kill()

    def started(self) -> tuple[Any, Any]:
        here, there = self.context.Pipe()
        process = self.context.Process(target=work, args=(there, self.device), daemon=True)
        process.start()
        there.close()
        return process, here


def main() -> None:
    """Sweep, and write the rows of all models."""
    from tests.integrations.sweep_models import names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=int, default=240, help="no model begins after these (%(default)s)")
    parser.add_argument("--models", nargs="*", default=None, help="types of models; all, if left out")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    report = {"schema": 1, "device": given.device, **head(given.device), "models": {}}

    def keep(kind: str, row: dict[str, Any]) -> None:
        report["models"][kind] = row
        write(report, given.out / NAME)
        print(kind, row["status"], row.get("seconds"), row.get("error", ""), flush=True)

    kinds = given.models or list(names())
    Crew(kinds, given.device, keep).run(given.workers, time.monotonic() + given.seconds)
    report["models"] = {kind: report["models"].get(kind, {"status": "not reached"}) for kind in kinds}
    report["counts"] = dict(Counter(row["status"] for row in report["models"].values()))
    write(report, given.out / NAME)
    print(report["counts"])


def head(device: str) -> dict[str, Any]:
    """What the rows were measured with."""
    if device == "cpu":
        return {}
    from gpu_environment import gpu_environment
    from row_origin import commit

    return {"environment": gpu_environment(), "commit": commit()}


def write(report: dict[str, Any], path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    main()
