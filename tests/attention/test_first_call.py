"""What the first call of a new form costs in Python calls and files, counted by the interpreter's profiler."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import cubin_runtime
from cubin_runtime.attention import Runtime, paged_decode
from cubin_runtime.kernels.native.decode import select
from tests.attention.attention_examples import Tensors

PACKAGE = str(Path(cubin_runtime.__file__).parent)
COST_MODEL = ("cost_model.py", "kernel_costs.py")  # its number of calls follows from the kernels to choose from
MOST_CALLS, MOST_FILES = 250, 25  # fewer by what earlier tests left in caches


@pytest.fixture(autouse=True)
def _as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fast path that other tests get from the first call on, and kernels of earlier tests to compare."""
    for cached in (select._look_through, select._form_of, select._selection, select._fits):
        cached.cache_clear()
    monkeypatch.setattr(import_module("cubin_runtime.attention.fast_path.operator_function"), "FULL_RUNS", 3)


def profiled(runtime: Runtime) -> tuple[int, int]:
    """The Python calls below the package but for the cost model's, and the files that they are in."""
    for bound in (64, 128, 256, 400, 400):  # modules and classes are then warm
        paged_decode(**vars(Tensors()), max_seq_len=bound, runtime=runtime)
    calls, files, tensors = 0, set[str](), vars(Tensors())

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        counted = code.co_filename.startswith(PACKAGE) and not code.co_filename.endswith(COST_MODEL)
        # Comprehensions are calls in some versions of Python only.
        if event == "call" and counted and not code.co_name.startswith("<"):
            calls += 1
            files.add(code.co_filename)

    sys.setprofile(profile)
    try:
        paged_decode(**tensors, max_seq_len=1000, runtime=runtime)
    finally:
        sys.setprofile(None)
    return calls, len(files)


def test_the_first_call_of_a_form_makes_few_calls_in_few_files(stub_runtime: Runtime) -> None:
    calls, files = profiled(stub_runtime)
    assert calls <= MOST_CALLS
    assert files <= MOST_FILES
