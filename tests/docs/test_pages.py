"""Every block of code in the pages is run, and what the pages name exists."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.pages import BLOCKS, ELSEWHERE, PAGES, ROOT, pages_with
from tests.docs.python_blocks import problems_of
from tests.docs.sandbox import Sandbox

# `text` is what a program prints; the files of the others are read by the tests of the page that has them.
OF_FILES = {"dockerfile": "docs/operators.md", "yaml": "docs/operators.md", "nginx": "docs/operators.md"}


@pytest.mark.parametrize("page", pages_with("sh"))
def test_the_commands_of_a_page_succeed_in_their_order(sandbox: Sandbox, page: str) -> None:
    found = [block.text for block in BLOCKS if (block.page, block.kind) == (page, "sh")]
    if any("openssl" in block for block in found):
        pytest.importorskip("cryptography")
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl here")
    for block in found:
        sandbox.run(block, sandbox.new_store())


@pytest.mark.parametrize("command", ["make no-such-target", "pip install torch", "python benchmarks/none.py"])
def test_a_command_that_does_not_exist_is_found(sandbox: Sandbox, command: str) -> None:
    with pytest.raises(AssertionError, match="stand-in: "):
        sandbox.run(command, sandbox.new_store())


def test_every_kind_of_block_is_run_by_a_test() -> None:
    others = {(block.kind, block.page) for block in BLOCKS} - set(OF_FILES.items())
    assert {kind for kind, _ in others} <= {"sh", "python", "text"}


def test_a_page_that_is_tested_elsewhere_names_its_test() -> None:
    assert [test for page, test in ELSEWHERE.items() if page in PAGES and not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_imports_exist_and_calls_match_their_signatures(page: str) -> None:
    text = "\n".join(block.text for block in BLOCKS if (block.page, block.kind) == (page, "python"))
    assert problems_of(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from cubin_runtime.attention import no_such_name", "no_such_name"),
        ("from cubin_runtime.attention import paged_decode\npaged_decode(q, k)", "missing a required"),
        ("from cubin_runtime.attention import default_runtime\ndefault_runtime(wrong=1)", "wrong"),
    ],
)
def test_python_that_does_not_fit_is_found(text: str, problem: str) -> None:
    assert problem in " ".join(problems_of(text))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link}
    here = (ROOT / page).parent
    assert [target for target in targets if target and not (here / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_cell_of_a_table_is_a_paragraph(page: str) -> None:
    cells = [cell for line in PAGES[page].splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert [cell for cell in cells if len(cell.split()) > 40] == []


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"\S+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert named == {str(Path(page).relative_to("docs")) for page in PAGES if page.startswith("docs/")}
