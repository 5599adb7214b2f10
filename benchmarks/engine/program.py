"""The command line of both engines' benchmarks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from .driver import Run


def main(kind: type[Run], sections: tuple[Callable[[Run], None], ...]) -> None:
    """Run the sections that the arguments name; one that fails ends as a row that says so."""
    named = {each.__name__: each for each in sections}
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True, help="folder of engine/models.py")
    parser.add_argument("--names", nargs="*", help="models (those of the section)")
    parser.add_argument("--label", default="", help="part of the names of results")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, nargs="*", help="numbers of the jobs whose prompts are new, from 1 (all)")
    parser.add_argument("--cache-bytes", type=int, default=12_000_000_000, help="of a vLLM's cache (%(default)s)")
    parser.add_argument("--kv-cache-dtype", help="of engines that a section does not give one (the model's)")
    parser.add_argument("sections", nargs="+", choices=sorted(named))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    run = kind(chosen)
    for section in chosen.sections:
        begin = time.perf_counter()
        run.begin(section)
        try:
            named[section](run)
        except Exception as error:
            run.row(section=section, error=f"{type(error).__name__}: {error}")
        print(section, round(time.perf_counter() - begin, 1), "s", flush=True)
