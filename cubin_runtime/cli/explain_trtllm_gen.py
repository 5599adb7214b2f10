"""``explain`` of a call of trtllm-gen kernels, of a recorded case, and of a file of cases."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..artifacts.atomic_write import replacing
from ..artifacts.library import Library
from ..artifacts.releases.catalog import open_kernel_index
from ..config import Config
from ..errors import StoreError, UsageError
from ..kernels.abi import abi_layouts
from ..kernels.trtllm_gen import explanation
from ..kernels.trtllm_gen.decision import Decision
from ..kernels.trtllm_gen.kernel_finder import KernelFinder
from ..kernels.trtllm_gen.traits import Policy
from . import output
from .example_call import Shapes, example_decision
from .recorded_cases import place_of, read_case, read_lines
from .recorded_decisions import decide_lines, decision_of_case, decision_record

RELEASE = "trtllm-gen-0.6.13"


def explain_call(shapes: Shapes, kernels: KernelFinder, policy: Policy, *, json: bool, candidates: bool) -> None:
    """Explain the call of these shapes; errors as ``example_decision``."""
    _show(example_decision(shapes, kernels, policy), "0x0", policy, json, candidates)


def explain_case(case: str, kernels: KernelFinder, policy: Policy, *, json: bool, candidates: bool) -> None:
    """Explain the case in a file, or on the standard input for ``-``; errors as ``decision_of_case``."""
    stated = read_case(Path(case))
    _show(decision_of_case(stated, kernels, policy), stated.get("stream"), policy, json, candidates)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Millions of small values and no cycles among them: looking for cycles would take a tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collecting()
def decide_all(cases: Path, out: Path | None, kernels: KernelFinder, *, both: bool) -> None:
    """Write the decision for each case of a file, one line of JSON each, to ``out`` or the standard output."""
    decisions = decide_lines(read_lines(cases), kernels, both=both, where=place_of(cases))
    if out is None:
        for decision in decisions:
            output.line(decision)
        return
    count = 0
    try:
        with _written(out) as opened:
            for decision in decisions:
                opened.write(decision + "\n")
                count += 1
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror}") from error
    output.note_line(f"{count} cases decided, written to {out}")


@contextmanager
def _written(out: Path) -> Iterator[IO[str]]:
    """A file that is replaced when the block ends well; a pipe or a device is written to."""
    if out.exists() and not out.is_file():
        # a FIFO that nobody reads is an error; one that somebody reads may wait for the reader
        descriptor = os.open(out, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        os.set_blocking(descriptor, True)
        with open(descriptor, "w", encoding="ascii") as opened:
            yield opened
        return
    out.parent.stat()  # a folder that is not there is not made
    with replacing(out) as descriptor, open(descriptor, "w", encoding="ascii", closefd=False) as opened:
        yield opened


def kernels_of(config: Config, release: str) -> KernelFinder:
    """The kernels of a trtllm-gen release; differences of its metadata's columns are noted."""
    library = Library(config)
    pin = library.pins.get(release)
    layouts = abi_layouts(pin.abi)
    if "KernelParams" not in layouts:
        raise UsageError(f"{pin.name}: its kernels take {', '.join(layouts)}, expected a trtllm-gen release")
    index = open_kernel_index(library, pin, fetch=not config.offline)
    for what, columns in (("new", index.new_columns), ("missing", index.missing_columns)):
        if columns:
            output.note_line(f"{pin.name}: {what} columns in the metadata: {', '.join(columns)}")
    return KernelFinder(index)


def _show(decision: Decision, stream: object, policy: Policy, json: bool, candidates: bool) -> None:
    if json:
        record = decision_record(decision, stream)
        outcome = ("ok", "error", "error_kind")  # of files of cases; here errors are in `errors`
        shown = {name: value for name, value in record.items() if name not in outcome}
        output.emit_json("explain", {"backend": "trtllm-gen", "policy": policy.value, **shown})
    else:
        output.explanation(explanation.choice(decision), explanation.details(decision) if candidates else ())
