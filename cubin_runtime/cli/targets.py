"""The argument of verbs that names what they work on, and its completion."""

from __future__ import annotations

from typing import Annotated

import typer

from . import completion

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="PIN-or-PATH", help="Pinned releases, folders in them, or files.", autocompletion=completion.targets
    ),
]
