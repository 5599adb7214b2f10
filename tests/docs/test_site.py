"""The site has every file that its pages link to, and its navigation groups the guides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT
from tools.site_links import BESIDE, dead_links, names_asked_for
from tools.site_tables import with_labels

HEAD = "<table><thead><tr><th>message</th><th>cause</th><th>what to do</th></tr></thead><tbody><tr>"
WORDS = f"{HEAD}<td>no</td><td>-</td><td>wait</td></tr></tbody></table>"
FIGURES = f"{HEAD}<td>1 x 1024</td><td>7.8 us</td><td>1.29</td></tr></tbody></table>"
BEHIND = frozenset(file.relative_to(ROOT) for pattern in BESIDE for file in ROOT.glob(pattern))


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_links_out_of_the_pages_lead_to_files_that_the_site_has(page: str) -> None:
    here = (ROOT / page).parent
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    links = (link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link)
    targets = {(here / link).resolve().relative_to(ROOT) for link in links if link}
    assert [str(target) for target in targets if target.parts[0] != "docs" and target not in BEHIND] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x"><a href=sub/c.html><img src="/p.png"><a href="https://h/x">')
    (tmp_path / "b.html").write_text('<a href="sub">folder</a>')
    (tmp_path / "sub").mkdir()
    (tmp_path / "p.png").write_bytes(b"")
    assert dead_links(tmp_path) == ["a.html: sub/c.html", "b.html: sub"]


def test_a_table_of_sentences_labels_its_cells_and_one_of_figures_does_not() -> None:
    words = with_labels(WORDS)
    assert words.count("data-words") == 1
    assert '<td data-label="what to do">wait</td>' in words
    assert '<td data-label="cause" data-none>-</td>' in words
    assert with_labels(FIGURES) == FIGURES


def test_what_a_page_of_the_reference_has_to_document_is_read_from_its_directives() -> None:
    page = (
        '# A\n\n::: a.b\n    options: {members: ["on", c]}\n\ntext\n\n::: a.d\n    options: {members: []}\n\n::: a.e\n'
    )
    assert names_asked_for(page) == ["a.b.on", "a.b.c", "a.d", "a.e"]


def test_no_group_of_the_navigation_has_more_than_ten_entries() -> None:
    lines = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0].splitlines()
    depth = [len(line) - len(line.lstrip()) for line in lines]
    groups = [place for place, line in enumerate(lines) if line.endswith(":")]
    sizes = {}
    for group in groups:
        inner = next((d for d in depth[group + 1 :]), 0)
        until = next((n for n in range(group + 1, len(lines)) if depth[n] <= depth[group]), len(lines))
        sizes[lines[group].strip()] = sum(d == inner for d in depth[group + 1 : until])
    assert sizes
    assert {name: size for name, size in sizes.items() if size > 10} == {}
