"""Links of the documentation site: which files of the repository it has, and which links lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

# Files of the repository that the pages may link to; the site has them under the same names.
BESIDE = ("benchmarks/results/*.json", "benchmarks/results/*.txt", "examples/*.py", "examples/custom_kernel/*.*")


def names_asked_for(markdown: str) -> list[str]:
    """What the directives of a page of the reference document: the members that they name, else the object."""
    names = []
    for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", markdown + "\n", re.MULTILINE):
        members = re.search(r"members: \[([^\]]+)\]", options)
        shown = [] if "show_root_heading: false" in options else [name]
        names += [f"{name}.{member}" for member in re.findall(r"\w+", members[1])] if members else shown
    return names


def dead_links(site: Path) -> list[str]:
    """``PAGE: LINK`` for each link of a built site to the site itself that leads to no file in it."""
    dead = []
    for page in sorted(site.rglob("*.html")):
        for link in sorted(set(re.findall(r'(?:href|src)="?([^"\s>]+)', page.read_text()))):
            target = unquote(link.partition("#")[0].partition("?")[0])
            base = site if target.startswith("/") else page.parent
            elsewhere = re.match(r"[a-z]+:|//", target)
            if target and not elsewhere and not (base / target.lstrip("/")).is_file():
                dead.append(f"{page.relative_to(site)}: {link}")
    return dead
