"""How the demo speaks: numbered headings and indented lines."""

from __future__ import annotations

import itertools

_number = itertools.count(1)


def heading(title: str) -> None:
    """Print the next step's number and title."""
    print(f"\n{next(_number)}. {title}", flush=True)


def detail(text: str) -> None:
    """Print one line under the heading."""
    print(f"   {text}", flush=True)
