"""Record the README's picture of the command line: fetch, verify, explain, and a tampered artifact that is refused.

Run: ``python tools/record_terminal.py`` (after ``make artifacts``) runs the commands on the built release and writes
``docs/terminal.svg``; ``--release FOLDER`` takes the tree from elsewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "artifacts"
TITLE = "cubin-runtime"
WIDTH = 108
EXPLAINED = "cubin-runtime explain --sm 90 --batch 64 --kv-len 8192 --heads-q 64"
LINES_OF_ONE = 8


@dataclass(frozen=True)
class Shown:
    """A command, what it printed, its exit code, and what a reader should know before it."""

    command: str
    output: str
    code: int
    note: str = ""


def record(tree: Path, release: str, explained: str = EXPLAINED) -> list[Shown]:
    """Run the story on a store of its own, with ``release`` from ``tree`` and without a network."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(tree / release, place / "mirror" / release)
        kernel = sorted((place / "mirror" / release).rglob("*_sm90a.cubin"))[0]
        cubin = kernel.relative_to(place / "mirror")
        shown = [
            _run(place, f"cubin-runtime fetch {release} --source mirror"),
            _run(place, f"cubin-runtime verify {release} --complete"),
            _run(place, explained),
        ]
        kernel.chmod(0o644)
        damaged = bytearray(kernel.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        kernel.write_bytes(bytes(damaged))
        shown.append(
            _run(
                place, f"cubin-runtime verify {cubin} --tree mirror", note="One bit of the file changes in the mirror."
            )
        )
        return shown


def _run(place: Path, command: str, note: str = "") -> Shown:
    program = [sys.executable, "-c", "from cubin_runtime.cli import main; raise SystemExit(main())"]
    left_out = ("CUBIN_RUNTIME_CACHE", "CUBIN_RUNTIME_SOURCES", "CUBIN_RUNTIME_PIN_KEYS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    own = {
        **dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"), str(place)),
        "CUBIN_RUNTIME_CACHE": str(place / "store"),
        "CUBIN_RUNTIME_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(WIDTH),
    }
    done = subprocess.run(
        [*program, *shlex.split(command)[1:]],
        cwd=place,
        env={**kept, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    text = done.stdout.replace(f"{place}/", "")
    return Shown(command, text, done.returncode, note)


def picture(shown: Sequence[Shown]) -> str:
    """The commands and the first lines of what they printed, as an SVG of a terminal."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for number, one in enumerate(shown):
        if number:
            console.print()
        if one.note:
            console.print(Text(f"# {one.note}", style="dim"))
        console.print(Text.assemble(("$ ", "bold green"), (one.command, "bold")))
        lines = one.output.expandtabs(4).rstrip().splitlines()
        for text in lines[:LINES_OF_ONE]:
            style = "red" if one.code else ""
            console.print(Text(text, style=style), overflow="fold" if one.code else "ellipsis", no_wrap=not one.code)
        if len(lines) > LINES_OF_ONE:
            console.print(Text(f"... {len(lines) - LINES_OF_ONE} more lines", style="dim"))
        if one.code:
            console.print(Text(f"exit code {one.code}", style="dim"))
    svg = console.export_svg(title=TITLE, theme=DIMMED_MONOKAI, unique_id="terminal")
    # The font is the reader's: nothing is loaded from another host.
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace(
        "Fira Code", "ui-monospace, Menlo, Consolas"
    )


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--release", type=Path, help="the tree of the native release; default: the one in build/artifacts"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "terminal.svg", help="where the picture goes")
    given = parser.parse_args()
    tree = given.release or next((one for one in sorted(BUILT.glob("hopper-*"))), None)
    if tree is None or not tree.is_dir():
        parser.error(f"no release in {given.release or BUILT}: run `make artifacts` first, or name one with --release")
    given.out.write_text(picture(record(tree.parent, tree.name)))


if __name__ == "__main__":
    main()
