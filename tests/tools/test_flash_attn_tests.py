"""The driver of FlashAttention-3's own tests: the order of a test's parts, and what the report counts."""

from __future__ import annotations

import itertools
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Load a module of the driver, which takes some of FlashInfer's."""
    monkeypatch.syspath_prepend(str(TOOLS / "flashinfer_tests"))
    for name in ("run", "sampling"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def loaded(name: str) -> ModuleType:
        spec = spec_from_file_location(f"flash_attn_tests_{name}", TOOLS / "flash_attn_tests" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_parts_without_a_chunk_come_first_and_of_them_the_dimension_of_keys(load) -> None:  # type: ignore[no-untyped-def]
    parts = list(itertools.product([256, 512, 64], [37, 0]))
    found = load("plugin").ordered(parts)
    assert found[:3] == [(64, 0), (512, 0), (256, 0)]
    assert sorted(found) == sorted(parts)


def test_other_loops_keep_their_order(load) -> None:  # type: ignore[no-untyped-def]
    for parts in ([(False, 1), (False, 3), (True, 1)], [(1, False), (3, True)], []):
        assert load("plugin").ordered(list(parts)) == parts


def test_the_report_counts_by_function_and_reason(load) -> None:  # type: ignore[no-untyped-def]
    records = [
        {"collected": 9, "sample": 4},
        {"test": "test_flash_attn.py::test_a[1-2]", "outcome": "passed", "reason": "", "translated": 3},
        {
            "test": "test_flash_attn.py::test_a[1-3]",
            "outcome": "passed in part",
            "reason": "chunk=17: no",
            "translated": 0,
        },
        {"test": "test_flash_attn.py::test_b[x]", "outcome": "refused", "reason": "qv=a Tensor: no", "translated": 0},
        {"test": "test_flash_attn.py::test_b[y]", "outcome": "failed", "reason": "AssertionError: ", "translated": 1},
    ]
    report = load("run").summary(records)
    assert (report["collected"], report["sample"], report["ran"]) == (9, 4, 4)
    assert report["functions"]["test_a"] == {"passed": 1, "passed in part": 1, "with 16-bit queries for e4m3": 1}
    assert report["reasons"]["passed in part"] == {"chunk=N: no": 1}
    assert report["reasons"]["refused"] == {"qv=a Tensor: no": 1}
    assert [failure["test"] for failure in report["failures"]] == ["test_b::[y]"]
