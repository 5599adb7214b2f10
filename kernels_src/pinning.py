"""Write the pin of a built release into a pins file: ``python -m kernels_src.pinning [TREE] [--check]``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.pins.pin import BUILTIN_PINS, Pin, format_pin, parse_pins

from .release import RELEASE, Release, read_release

MAX_FILE_BYTES = 8 << 20
LICENCE = "Apache-2.0"

_TABLE = re.compile(r"^\[\[pin\]\]$", re.MULTILINE)
# Blank lines and comments after a table's last key belong to what follows.
_TAIL = re.compile(r"(?<=\n)([ \t]*(#[^\n]*)?\n)+\Z")


def pin_of(release: Release, *, name: str | None = None, abi: str = RELEASE) -> Pin:
    """The pin of a built release; it has no sources of its own, the data wheel carries it."""
    return Pin(
        name=name or release.folder.name,
        path=ArtifactPath(release.folder.name),
        manifest_sha256=release.manifest_sha256,
        files=release.files,
        bytes=release.bytes,
        max_file_bytes=MAX_FILE_BYTES,
        index_sha256=None,
        abi=abi,
        licence=LICENCE,
        sources=(),
    )


def with_pin(text: str, pin: Pin) -> str:
    """The pins file ``text`` with ``pin`` in place of the table of its name, or appended."""
    head, *tables = _TABLE.split(text)
    for i, table in enumerate(tables):
        if [known.name for known in parse_pins(f"[[pin]]{table}".encode(), "pins")] == [pin.name]:
            kept = _TAIL.search(table)
            tables[i] = format_pin(pin).removeprefix("[[pin]]") + (kept[0] if kept else "")
            return head + "".join(f"[[pin]]{table}" for table in tables)
    return (text.rstrip("\n") + "\n\n" if text.strip() else "") + format_pin(pin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare from the command line; 1 if the pin differs."""
    parser = argparse.ArgumentParser(prog="python -m kernels_src.pinning", description=__doc__)
    parser.add_argument("tree", type=Path, nargs="?", default=Path("build/artifacts") / RELEASE)
    parser.add_argument("--pins", type=Path, default=BUILTIN_PINS, help="the pins file (the built-in one)")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    given = parser.parse_args(arguments)
    pin = pin_of(read_release(given.tree))
    text = given.pins.read_text()
    pinned = {known.name: known for known in parse_pins(text.encode(), str(given.pins))}.get(pin.name)
    if pinned == pin:
        print(f"{pin.name}: the pin is the built release, {pin.manifest_sha256}")
        return 0
    if given.check:
        print(
            f"error: {pin.name}: the pin is not the built release\n"
            f"  built   {pin.manifest_sha256}\n"
            f"  pinned  {pinned.manifest_sha256 if pinned else 'nothing'}\n"
            "Sources and pin belong together: run 'make artifacts' and commit the pins with the change.",
            file=sys.stderr,
        )
        return 1
    given.pins.write_text(with_pin(text, pin))
    print(f"{pin.name}: pinned {pin.manifest_sha256} in {given.pins}; review the diff and commit it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
