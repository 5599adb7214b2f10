"""The README's tables are what the code and the JSON say."""

from __future__ import annotations

from pages import ROOT

from tools.readme_figures import headlines, support_matrix, written


def test_the_support_matrix_and_the_headlines_are_up_to_date() -> None:
    text = (ROOT / "README.md").read_text()
    assert text == written(text), "run: python tools/readme_figures.py"


def test_the_matrix_states_what_was_measured_and_what_was_built() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in support_matrix().splitlines()[2:]]
    states = {(operator, state) for operator, *_, state in rows}
    assert {
        ("`paged_decode`", "measured"),
        ("`paged_decode`", "built, not run"),
        ("`mla_decode`", "measured"),
    } <= states


def test_there_are_four_headlines() -> None:
    assert headlines().count("**") == 2 * 4
