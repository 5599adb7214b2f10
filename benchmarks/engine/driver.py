"""Engines as processes that take commands, and a result that is written after every row."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from gpu_environment import built_sources, gpu_environment
from row_origin import commit, keep

from .commands import Requests
from .judge import judge

HERE = Path(__file__).resolve().parent
# Engines are forked from a process that has imported theirs, which takes half a minute, and has not touched the GPU.
PROCESSES = multiprocessing.get_context("fork")


def serve(connection: Any, make: Callable[[], Requests], log: Path, environment: Mapping[str, str]) -> None:
    """Make an engine, then answer the commands of a connection until ``stop``."""
    os.environ.update(environment)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    status = 0
    try:
        worker = make()
        connection.send(worker.started)
        while (command := connection.recv())["do"] != "stop":
            try:
                answer = getattr(worker, command.pop("do"))(**command)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send(answer)
        worker.stop()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # the engine's threads would hold the process


class Engine:
    """An engine in a process of its own, asked by commands; ``label`` names it in results.

    A command is a dictionary, ``{"do": NAME, ...}``; the answer is one too, and has ``error`` where the command failed.
    What the engine prints goes to a log.
    """

    def __init__(self, label: str, log: Path, make: Callable[[], Requests], environment: Mapping[str, str]) -> None:
        self.label, self.log = label, log
        self._connection, other = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=serve, args=(other, make, log, environment))
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
            RuntimeError: the engine ended; the message has the errors that its log names first, and the log's end.
        """
        while not self._connection.poll(0.5) and self._process.is_alive():
            pass
        try:
            answer: dict[str, Any] = self._connection.recv() if self._connection.poll() else {}
        except EOFError:
            answer = {}
        if not answer:
            said = self.log.read_text()
            # An engine's own process fails first, and the others tell of it at length.
            errors = [line[-300:] for line in said.splitlines() if "Error: " in line][:4]
            raise RuntimeError("\n".join((f"{self.label} ended:", *errors, "...", said[-1000:])))
        return answer

    def graphs(self) -> list[str]:
        """What the log says of captured graphs."""
        lines = self.log.read_text().replace("\r", "\n").splitlines()
        said = [line for line in lines if "100%" in line and "Capturing" in line]
        return sorted({line.partition("Capturing ")[2].partition(":")[0] for line in said})

    def kernels(self) -> list[str]:
        """The kernels that our backend's log line names."""
        lines = [line for line in self.log.read_text().splitlines() if "cubin_runtime: " in line and " run on " in line]
        return sorted({name for line in lines for name in line.rpartition("run on ")[2].split(", ")})


class Run(ABC):
    """Where models are, where results go, and how much memory a cache may take."""

    engine = ours = ""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.out, self.models, self.rounds, self.jobs = chosen.out, chosen.models, chosen.rounds, chosen.jobs
        self.names, self.cache_bytes, self.label = chosen.names, chosen.cache_bytes, chosen.label
        self.common = {"kv_cache_dtype": chosen.kv_cache_dtype} if chosen.kv_cache_dtype else {}
        self.result: dict[str, Any] = {}
        self.path = self.out / "none"
        self._imported = False

    def begin(self, section: str) -> None:
        """A new result."""
        self.path = self.out / f"{self.engine}.{section}{self.label}.json"
        self.result = {"schema": 1, "commit": commit(), "environment": gpu_environment(), **self.common, "rows": []}
        self.result["environment"]["packages"][self.engine] = version(self.engine)

    def row(self, **row: Any) -> None:
        """Add a row, with the layers of its model, and write the result."""
        if "model" in row:
            config = json.loads((self.models / row["model"] / "config.json").read_text())
            row["num_layers"] = config["num_hidden_layers"]
        self.result["rows"].append(row)
        keep(self.result, self.path)
        print(json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)

    @abstractmethod
    def peer_of(self, model: str) -> str:
        """The engine's own backend beside ours."""

    @abstractmethod
    def maker(self, options: dict[str, Any], in_process: bool) -> Callable[[], Requests]:
        """What makes an engine in the process that calls it."""

    @abstractmethod
    def options(self, model: str, backend: str, **more: Any) -> dict[str, Any]:
        """Arguments of an engine."""

    @abstractmethod
    def surroundings(self, backend: str) -> dict[str, str]:
        """Variables of an engine's process."""

    @abstractmethod
    def import_engine(self) -> None:
        """Import what every engine needs, before engines are forked."""

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
        variants = {self.ours: {}, self.peer_of(model): {}, **more}
        return self.start(stack, model, variants, in_process, environment, **options)

    def start(
        self,
        stack: ExitStack,
        model: str,
        variants: Mapping[str, Mapping[str, Any]],
        in_process: bool = False,
        environment: Mapping[str, str] = {},
        wait: bool = True,
        **options: Any,
    ) -> list[Engine]:
        """Engines that differ in some options, by labels that begin with the backend's name, started together."""
        if not self._imported:
            self.import_engine()
            self._imported = True
        engines = []
        for label, own in variants.items():
            backend = label.split()[0]
            log = self.out / f"{self.path.stem}.{model}.{label.replace(' ', '_')}.log"
            make = self.maker(self.options(model, backend, **{**self.common, **options, **own}), in_process)
            around = {**self.surroundings(backend), **environment}
            engines.append(stack.enter_context(Engine(label, log, make, around)))
        if wait:
            for engine in engines:
                engine.wait()
        return engines

    def ready(self, engines: list[Engine]) -> tuple[list[Engine], dict[str, str]]:
        """Of engines that are starting those that started, and by their labels why the others did not."""
        started, failed = [], {}
        for engine in engines:
            try:
                engine.wait()
                started.append(engine)
            except RuntimeError as error:
                failed[engine.label] = str(error)
        return started, failed

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

    def refused(self, asked: Mapping[str, tuple[str, dict[str, Any]]]) -> None:
        """Start engines of ours, named models with options, that should refuse it; a row says why each did."""
        with ExitStack() as stack:
            engines = {}
            for name, (model, more) in asked.items():
                (engines[name],) = self.start(stack, model, {f"{self.ours} {name}": {}}, wait=False, **more)
            for name, engine in engines.items():
                try:
                    engine.wait()
                    self.row(refused=name, line="it started")
                except RuntimeError:
                    lines = engine.log.read_text().splitlines()
                    said = [line for line in lines if "not supported" in line or "UsageError" in line]
                    self.row(refused=name, lines=(said or [line for line in lines if "Error" in line])[:3])

    def both(self, engines: list[Engine]) -> dict[str, Any]:
        """What all rows of a pair have in common."""
        names = [name for engine in engines for name in engine.kernels()]
        return {"start": {engine.label: engine.started for engine in engines}, "cubins": dict(digests(names))}


def scratch() -> Path:
    """Where caches of engines are."""
    return Path(os.environ.get("ENGINE_SCRATCH", Path(gettempdir(), "engine")))


def digests(names: list[str]) -> Iterator[tuple[str, str]]:
    """The digests of kernels' cubins."""
    from cubin_runtime import Config
    from cubin_runtime.attention import Runtime

    with TemporaryDirectory() as store:
        release = Runtime(Config(store=Path(store), sources=built_sources(), offline=True)).native_release()
    for kernel in release.kernels:
        if kernel.name in names:
            yield kernel.name, release.file_of(kernel).sha256
