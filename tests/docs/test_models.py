"""The page of models: every kernel that it names for a shape exists, and a shape without one is refused."""

from __future__ import annotations

import re

import pytest

from cubin_runtime import cli
from tests.cli.native_release import explain_arguments
from tests.docs.pages import PAGES
from tests.kernels.context_examples import KERNELS as CONTEXT_KERNELS
from tests.kernels.decode_kernels import HOPPER
from tests.kernels.mla_examples import KERNELS as MLA_KERNELS

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGES["docs/models.md"].splitlines()
    if line.startswith("| ") and not line.startswith(("| model", "| ---"))
]
NAMES = [row[0] for row in ROWS]


@pytest.fixture(scope="module")
def explain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    kernels = (*HOPPER, *MLA_KERNELS, *CONTEXT_KERNELS)
    return [*explain_arguments(tmp_path_factory.mktemp("models"), kernels), "--sm", "90", "--backend", "native"]


def shape_of(row: list[str]) -> list[str]:
    """The heads and columns of a row as options of ``explain``."""
    heads = re.findall(r"\d+", row[1])
    dim = sum(map(int, re.findall(r"\d+", row[2])))
    return ["--heads-q", heads[0], *(["--heads-kv", heads[1]] if len(heads) > 1 else []), "--head-dim", str(dim)]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row[3] in ("`paged_decode`", "`mla_decode`")], ids=lambda r: r[0]
)
def test_a_decode_that_the_page_names_has_a_kernel(row: list[str], explain: list[str]) -> None:
    assert cli.main([*explain, *shape_of(row), "--batch", "8", "--kv-len", "4096"]) == 0


@pytest.mark.parametrize("row", [row for row in ROWS if row[4] == "`context_attention`"], ids=lambda r: r[0])
def test_prompts_that_the_page_names_have_a_kernel(row: list[str], explain: list[str]) -> None:
    capped = ["--soft-cap"] if "soft cap" in row[5] else []
    assert cli.main([*explain, *shape_of(row), "--family", "prefill", "--kv-len", "4096", *capped]) == 0


@pytest.mark.parametrize("row", [row for row in ROWS if "(192, values of 128)" in row[4]], ids=lambda r: r[0])
def test_prompts_of_mla_have_a_kernel(row: list[str], explain: list[str]) -> None:
    heads = re.findall(r"\d+", row[1])[0]
    shape = ["--heads-q", heads, "--heads-kv", heads, "--head-dim", "192", "--head-dim-v", "128"]
    assert cli.main([*explain, *shape, "--family", "prefill", "--kv-len", "4096"]) == 0


def test_a_shape_without_kernels_is_refused(explain: list[str]) -> None:
    (row,) = [row for row in ROWS if row[3] == "no"]
    assert cli.main([*explain, *shape_of(row), "--kv-len", "4096"]) != 0


def test_every_row_names_its_kernels() -> None:
    assert len(set(NAMES)) == len(ROWS) > 15
    known = {"`paged_decode`", "`context_attention`", "`mla_decode`", "`sparse_mla_decode`", "no"}
    assert {row[3] for row in ROWS} <= known
