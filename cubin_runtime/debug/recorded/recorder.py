"""The recorder: files of the last calls, each with all that a replay needs."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...attention.hook import Run
from ...errors import CubinRuntimeError, StoreError, UsageError
from ...launch.driver import Driver
from ..observer import Observer, observers
from .call import RecordedCall, RecordedTensor
from .call_file import write_call
from .described import CallForm, form_of
from .snapshot import array_of, numpy_for, page_of, pages_named, read_elements, span_of

_log = logging.getLogger(__name__)
DEFAULT_CALLS, DEFAULT_BYTES = 64, 8 << 30


class _NotRecordedError(Exception):
    """The reason why a call is run and not written."""


class CallRecorder(Observer):
    """Writes the calls of all threads into one folder while it is entered, each into a file of its own.

    A call's inputs are read before it is launched, its outputs behind it, which waits for its stream twice. A call
    that fails, by an asynchronous fault too, is written with its error. The newest ``calls`` files of at most
    ``max_bytes`` together are kept; older ones of this recorder are deleted. Of caches, the pages that the page table
    names up to the lengths are written; of calls without such a table the whole cache. Calls that a stream
    captures, and calls larger than ``max_bytes``, are run and not written, which ``skipped`` counts and the log tells.
    A method ``run`` that was taken from its plan earlier, and replays of graphs, are not seen. Of several recorders the
    one entered last records.
    """

    def __init__(self, folder: str | Path, *, calls: int = DEFAULT_CALLS, max_bytes: int = DEFAULT_BYTES) -> None:
        """Raises ``UsageError`` for bounds below 1, and where numpy is missing."""
        if calls < 1 or max_bytes < 1:
            raise UsageError(f"calls={calls}, max_bytes={max_bytes}: expected 1 or more of both")
        numpy_for("recording calls")
        self.folder = Path(folder).absolute()  # the process may change its working folder
        self.skipped = 0
        self._limits = calls, max_bytes
        self._lock = threading.RLock()
        self._token = secrets.token_hex(4)  # process ids come again, in every container
        self._number = 0
        self._written: deque[tuple[Path, int]] = deque()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it wrote and kept, oldest first."""
        return tuple(file for file, _ in self._written.copy())

    def __enter__(self) -> CallRecorder:
        """Raises ``StoreError`` where the folder cannot be made."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the folder of recorded calls {self.folder} cannot be made: {error}") from error
        return super().__enter__()

    def observe(self, run: Run, launch: Callable[[], Any]) -> Any:
        """As ``Observer``; it also writes the call.

        Raises:
            StoreError: the file cannot be written; the call was launched.
            CubinRuntimeError: what ``launch`` raised, or the fault that its kernels met.
        """
        if _call_recorders()[-1:] != (self,):
            return launch()
        form, driver, stream = form_of(run), run.plan.runtime.driver, run.stream
        try:
            with driver.using(driver.context_on(form.device)):
                pages, tensors = self._inputs(form, driver, stream)
        except _NotRecordedError as reason:
            self.skipped += 1
            _log.warning("a call of %s is not recorded: %s", form.operator, reason)
            return launch()
        try:
            result = launch()
            with driver.using(driver.context_on(form.device)):
                driver.synchronize(stream)
                for name in form.outputs:
                    tensors[name] = replace(tensors[name], data=read_elements(driver, form.views[name]))
        except CubinRuntimeError as error:
            try:
                self._write(form, pages, tensors, str(error))
            except StoreError as unwritten:
                _log.warning("%s", unwritten)
            raise
        self._write(form, pages, tensors, "")
        return result

    def _inputs(self, form: CallForm, driver: Driver, stream: int) -> tuple[tuple[int, ...], dict[str, RecordedTensor]]:
        """The pages that are stored, and all tensors, outputs without elements."""
        if driver.is_capturing(stream):
            raise _NotRecordedError("the stream captures")
        driver.synchronize(stream)
        limit = self._limits[1]
        whole = sum(span_of(view) for name, view in form.views.items() if name not in form.paged)
        if whole > limit:
            raise _NotRecordedError(f"its tensors have {whole} bytes, expected at most {limit}")
        tensors = {name: RecordedTensor(view, b"", output=name in form.outputs) for name, view in form.views.items()}
        for name in form.views.keys() - form.paged - form.outputs:
            tensors[name] = RecordedTensor(form.views[name], read_elements(driver, form.views[name]))
        pages = _pages(form, tensors)
        paged = len(pages) * sum(span_of(page_of(form.views[name], 0)) for name in form.paged)
        if whole + paged > limit:
            raise _NotRecordedError(f"it reads {whole + paged} bytes, expected at most {limit}")
        for name in form.paged:
            view = form.views[name]
            data = b"".join(read_elements(driver, page_of(view, page)) for page in pages)
            tensors[name] = RecordedTensor(view, data, paged=True)
        return pages, tensors

    def _write(self, form: CallForm, pages: tuple[int, ...], tensors: dict[str, RecordedTensor], error: str) -> None:
        call = RecordedCall(form.operator, tensors, form.options, pages, form.kernels, form.origin, error)
        with self._lock:
            self._number += 1
            name = f"{os.getpid()}.{self._token}-{self._number:06d}-{form.operator}.safetensors"
            write_call(call, self.folder / name)
            self._written.append((self.folder / name, call.nbytes))
            most, limit = self._limits
            while len(self._written) > most or (
                len(self._written) > 1 and sum(size for _, size in self._written) > limit
            ):
                self._written.popleft()[0].unlink(missing_ok=True)


def record_process(folder: Path) -> None:
    """Record the calls of this process in ``folder`` from now on; once is enough. Errors as ``CallRecorder``."""
    if all(recorder.folder != folder.absolute() for recorder in _call_recorders()):
        CallRecorder(folder).__enter__()


def _call_recorders() -> tuple[CallRecorder, ...]:
    return tuple(one for one in observers() if isinstance(one, CallRecorder))


def _pages(form: CallForm, tensors: dict[str, RecordedTensor]) -> tuple[int, ...]:
    pages = form.pages
    if pages is None:
        return ()
    table, lengths = (array_of(one.view, one.data) for one in (tensors[pages.table], tensors[pages.lengths]))
    return pages_named(table // pages.keys_per_page, lengths.reshape(-1), pages.keys_per_entry, pages.pages)
