"""The README's tables and that of FlashInfer's functions are what the code and the JSON say."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.decode.freshness import is_fresh, pinned
from cubin_runtime import attention
from cubin_runtime.artifacts.cubins.cubin import Architecture
from cubin_runtime.attention.backends import TABLE
from kernels_src.variants import VARIANTS
from tests.docs.pages import ROOT
from tools.readme_figures import OPERATIONS, backend_matrix, headlines, support_matrix, written
from tools.readme_figures import PAGES as TABLES

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_are_up_to_date(page: str) -> None:
    assert (ROOT / page).read_text() == written(page), "run: make figures"


@pytest.mark.parametrize("function", [name for name in TABLE if hasattr(attention, name)])
def test_a_gpu_is_in_the_table_of_backends_exactly_if_a_kernel_was_built_for_it(function: str) -> None:
    operation = OPERATIONS.get(function, function)
    built = [Architecture.parse(kernel.sm) for kernel in VARIANTS if kernel.operation == operation]
    support = TABLE[function]["native"]
    gpus = {gpu for other in TABLE.values() for one in other.values() for gpu in (*one.automatic, *one.built)}
    served = {(major, minor) for major, minor in gpus if any(a.runs_on(10 * major + minor) for a in built)}
    assert served == support.automatic | support.built


def test_each_function_of_flashinfer_names_its_backends() -> None:
    rows = backend_matrix().splitlines()[2:]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == {
        name for name in TABLE if not hasattr(attention, name)
    }
    (row,) = [row for row in rows if "`trtllm_ragged_attention_deepseek`" in row]
    assert row.endswith("| `native`: SM90 | `trtllm-gen`: SM100, SM103 | - |")


def test_the_matrix_states_what_was_measured_and_what_was_built() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in support_matrix().splitlines()[2:]]
    states = {(operator, state) for operator, *_, state in rows}
    assert {
        ("`paged_decode`", "measured"),
        ("`paged_decode`", "built, not run"),
        ("`mla_decode`", "measured"),
    } <= states


def test_there_are_five_headlines_or_fewer_where_kernels_are_newer_than_their_figures() -> None:
    digests = pinned(RESULTS)
    names = ("decode", "prefill", "host_cost", "vllm_figures")
    decode, prefill, host, engine = (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)
    cited = (
        [row for row in decode["rows"] if (row["section"], row["q_len"]) == ("gqa", 1)],
        [row for row in prefill["rows"] if row["case"] == "causal D 128 S 8192"],
        [host["microseconds"]["plan.run, same tensors"]],
        [row for row in engine["rows"] if row["model"] == "llama-shape"],
    )
    fresh = sum(any(is_fresh(row, digests) for row in rows) for rows in cited)
    assert headlines().count("**") == 2 * (1 + fresh)
