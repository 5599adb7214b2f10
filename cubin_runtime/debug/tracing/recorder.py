"""The recorder: files of definitions and workloads, each distinct one written once."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any

from ...artifacts.atomic_write import replace_file, take_back
from ...attention.hook import Run
from ..observer import Observer, observers
from .calls import traced
from .schema import Scalar, TracedCall

_log = logging.getLogger(__name__)
_NAMESPACE = uuid.UUID("6f1f3c0a-5f0e-5b6e-9a37-2b1d6a0f4c11")


class Recorder(Observer):
    """Writes the calls of all threads, while it is entered, below one folder (a trace set of flashinfer-bench).

    ``definitions/OP_TYPE/NAME.json`` says what an operator is: axes, tensors, constraints, a reference in torch.
    ``workloads/OP_TYPE/NAME.jsonl`` has a line for each distinct call: its sizes and numbers. Contents of tensors are
    neither read nor written, so nothing waits for the device and a call may be recorded while a stream captures.
    What the folder has already is kept and not written again. Calls that cannot be traced are counted by reason in
    ``untraced``, which the log tells at the end. Replays of graphs, and a method ``run`` that was taken from its plan
    earlier, are not seen.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()  # the process may change its working folder
        self._lock = threading.RLock()
        self._workloads: dict[Path, _Workloads] = {}
        self._untraced: Counter[str] = Counter()

    @property
    def untraced(self) -> Mapping[str, int]:
        """The number of calls that were not written, by the reason."""
        with self._lock:
            return MappingProxyType(dict(self._untraced))

    def observe(self, run: Run, launch: Callable[[], Any]) -> Any:
        """As ``Observer``; what was launched is written, or counted."""
        result = launch()
        self._record(traced(run))
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        untraced = self.untraced
        if untraced:
            counts = "; ".join(f"{count} of {reason}" for reason, count in untraced.items())
            _log.warning("%s: %d calls are not recorded: %s", self.folder, sum(untraced.values()), counts)

    def _record(self, call: TracedCall | str) -> None:
        if not isinstance(call, str):
            self.add(call)
            return
        with self._lock:
            self._untraced[call] += 1

    def add(self, call: TracedCall) -> None:
        """Write the definition and the workload of ``call`` unless they are there.

        Raises:
            UsageError: tensors of the call disagree about an axis.
            OSError: the folder cannot be written.
        """
        definition = call.definition()
        name = definition["name"]
        workload = _workload(call)
        number = str(uuid.uuid5(_NAMESPACE, json.dumps([name, workload])))
        line = {"definition": name, "workload": {**workload, "uuid": number}, "solution": None, "evaluation": None}
        described = self.folder / "definitions" / call.op_type / f"{name}.json"
        lines = self.folder / "workloads" / call.op_type / f"{name}.jsonl"
        with self._lock:
            workloads = self._workloads.get(lines)
            if workloads is None:
                described.parent.mkdir(parents=True, exist_ok=True)
                if not described.exists():
                    replace_file(described, json.dumps(definition, indent=2).encode() + b"\n")
                workloads = self._workloads[lines] = _Workloads(lines)
            workloads.add(number, json.dumps(line))


def record(call: TracedCall | str) -> None:
    """Give ``call`` to every recorder that is entered; a str is the reason why a call cannot be traced.

    Raises:
        as ``Recorder.add``.
    """
    for recorder in observers():
        if isinstance(recorder, Recorder):
            recorder._record(call)


def recording() -> bool:
    """Return whether any recorder of traces is entered."""
    return any(isinstance(one, Recorder) for one in observers())


def _workload(call: TracedCall) -> dict[str, Any]:
    inputs = {
        part.name: {"type": "scalar", "value": part.value} if isinstance(part, Scalar) else {"type": "random"}
        for part in call.inputs
    }
    return {"axes": call.variable_axes(), "inputs": inputs}


@contextmanager
def _alone(opened: IO[bytes]) -> Iterator[None]:
    """Only one process at a time is in such a block for a file; where locks do not work, nobody waits."""
    with suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file, too


class _Workloads:
    """The workloads in a file, to which other processes add theirs: an engine's ranks send the same calls."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._numbers = set[str]()
        self._end = 0  # of what was read

    def add(self, number: str, line: str) -> None:
        """Append a workload that is not there."""
        if number in self._numbers:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a+b", buffering=0) as opened, _alone(opened):
            self._read_on(opened)
            if number not in self._numbers:
                self._append(opened, line)
                self._numbers.add(number)

    def _read_on(self, opened: IO[bytes]) -> None:
        """Read what was added; a line that cannot be read is left as it is, a cut one is ended."""
        opened.seek(self._end)
        text = opened.read()
        if text and not text.endswith(b"\n"):
            self._append(opened, "")
        self._end = opened.tell()
        for line in text.splitlines():
            with suppress(ValueError, LookupError, TypeError, RecursionError):
                self._numbers.add(json.loads(line)["workload"]["uuid"])

    def _append(self, opened: IO[bytes], line: str) -> None:
        """Write a line at once, so that those of several processes do not mix; a full disk keeps no part of it."""
        data = line.encode() + b"\n"
        count = opened.write(data)
        if count < len(data):
            take_back(opened.fileno(), count)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
