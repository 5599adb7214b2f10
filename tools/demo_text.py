"""The output of the demo: numbered headings and indented lines; ``DEMO=full`` adds the details."""

from __future__ import annotations

import itertools
import os
import textwrap

FULL = os.environ.get("DEMO", "") == "full"
_WIDTH = 110
_number = itertools.count(1)


def heading(title: str) -> None:
    """Print the next step's number and title."""
    print(f"\n{next(_number)}. {title}", flush=True)


def say(text: str) -> None:
    """Print a sentence under the heading, folded to the width of a page."""
    for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False):
        print(f"   {line}", flush=True)


def draw(text: str) -> None:
    """Print a line as it is."""
    print(f"   {text}", flush=True)


def detail(text: str) -> None:
    """Print a line of the details."""
    if FULL:
        print(f"     | {text}", flush=True)
