"""Every measured figure that a person wrote into a page is in a result that the page names, as it is printed."""

from __future__ import annotations

import pytest
from pages import PAGES
from stated import figures_of, is_measured, numbers_in, results_of

# Figures that somebody chose and nobody measured: limits, tolerances, the sizes of a layout.
CHOSEN = {
    "docs/fetching.md": {("30", "s"), ("60", "s")},
    "docs/launch_path.md": {("256", "times"), ("10", "us")},
    "docs/operators.md": {("2", "s")},
    "docs/results/correctness.md": {("12", "x")},
    "docs/testing.md": {("2", "%"), ("0.4", "%"), ("0.15", "%"), ("0.2", "%"), ("0.05", "%"), ("4", "%")},
}
USERS = [page for page in PAGES if page != "CONTRIBUTING.md" and not page.startswith("docs/contributing/")]


def unmeasured(page: str, text: str) -> set[tuple[str, str]]:
    """The figures of a page that no result it names has, and that nobody chose."""
    values = frozenset(value for result in results_of(text) for value in numbers_in(result))
    return {(number, unit) for number, unit in figures_of(text) if not is_measured(number, unit, values)} - CHOSEN.get(
        page, set()
    )


@pytest.mark.parametrize("page", USERS)
def test_a_stated_figure_is_in_a_result_that_the_page_names(page: str) -> None:
    assert unmeasured(page, PAGES[page]) == set()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/getting_started.md", "docs/models.md"])
def test_summaries_state_no_figure_of_their_own(page: str) -> None:
    assert list(figures_of(PAGES[page])) == []


@pytest.mark.parametrize(
    ("sentence", "missing"),
    [
        ("It is 1.93 times as fast ([`a`](host_cost.json)).", {("1.93", "times")}),
        ("It takes 5.0 us to 7.9 us; `host_cost.json`.", set()),
        ("MLA takes 1.85 times as long (`mla.json`).", {("1.85", "times")}),
        ("98% of read bandwidth", {("98", "%")}),
    ],
)
def test_a_figure_that_no_result_has_is_found(sentence: str, missing: set[tuple[str, str]]) -> None:
    assert unmeasured("", sentence) == missing
