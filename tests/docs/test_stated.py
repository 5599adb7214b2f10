"""Measured figures in hand-written sentences are those of named rows, of the pinned release unless the page says so."""

from __future__ import annotations

import sys

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.docs.stated import EARLIER, RESULTS, STATED, WITHOUT_KERNELS, Stated, hand_written, unexplained

sys.path.append(str(ROOT / "benchmarks"))

from decode.freshness import is_fresh, pinned

# Figures that somebody chose and nobody measured: limits, tolerances, the sizes of a layout.
CHOSEN = {
    "docs/debugging.md": ["16 launches"],
    "docs/decode_kernels.md": ["15%"],  # what the cost model calls near
    "docs/fetching.md": ["30 s", "60 s"],
    "docs/operators.md": ["2 s"],
    "docs/results/correctness.md": ["12 x"],
    "docs/testing.md": ["2 %", "0.4 %", "0.15 %", "0.2 %", "0.05 %", "4 %"],
}
USERS = [page for page in PAGES if page != "CONTRIBUTING.md" and not page.startswith("docs/contributing/")]
ALL = [pytest.param(page, one, id=f"{page}-{one.words}") for page in STATED for one in STATED[page]]
DIGESTS = pinned(RESULTS)


@pytest.mark.parametrize(("page", "one"), ALL)
def test_a_page_says_what_the_rows_of_the_result_say(page: str, one: Stated) -> None:
    assert one.text() in hand_written(PAGES[page])


@pytest.mark.parametrize(("page", "one"), ALL)
def test_figures_of_other_kernels_than_the_pinned_ones_are_said_to_be_of_an_earlier_release(
    page: str, one: Stated
) -> None:
    fresh = one.result in WITHOUT_KERNELS or all(is_fresh(row, DIGESTS) for row in one.cited())
    before, _, _ = hand_written(PAGES[page]).partition(one.text())
    assert fresh or EARLIER in before


@pytest.mark.parametrize("page", USERS)
def test_every_figure_with_a_unit_is_stated_or_chosen(page: str) -> None:
    assert unexplained(PAGES[page], STATED.get(page, ())) == CHOSEN.get(page, [])


def test_summaries_state_no_figure_of_their_own() -> None:
    summaries = ["README.md", "docs/index.md", "docs/getting_started.md", "docs/models.md", "docs/results/index.md"]
    assert [page for page in summaries if unexplained(PAGES[page], ())] == []


@pytest.mark.parametrize(
    ("sentence", "missing"),
    [
        ("It is 1.93 times as fast.", ["1.93 times"]),
        ("**Prefill,** 1.05 to 1.18 times.", []),
        ("Prefill takes 1.05 to 1.18 times as long.", ["1.05 to 1.18 times"]),
        ("98% of read bandwidth, as `98% of` says", ["98%"]),
    ],
)
def test_a_figure_that_no_statement_has_is_found(sentence: str, missing: list[str]) -> None:
    assert unexplained(sentence, STATED["docs/batch_invariance.md"]) == missing
