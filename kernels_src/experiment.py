"""Build a copy of the release in which some kernels have other build options, to measure the two beside each other.

``python -m kernels_src.experiment NAME --define L2_POLICY=evict_unchanged [--only GLOB ...]`` takes the built release
and writes ``build/experiments/hopper-VERSION-NAME`` with the kernels that match and have the options, compiled with
them, and all others as they are, and its pin into ``build/experiments/pins.toml``. Nothing of it is shipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cubin_runtime.artifacts.tables.native_kernels import FILE_NAME
from cubin_runtime.kernels.native.layouts import LAYOUTS

from .build import build
from .compiling import BuildError
from .kernel_cache import kernel_cache
from .pinning import pin_of, with_pin
from .release import RELEASE, Release, write_release
from .toolchain import ToolchainError, find_toolchain
from .variants import VARIANTS, Variant

OUT, BASE = Path("build/experiments"), Path("build/artifacts") / RELEASE


def with_options(variants: Sequence[Variant], patterns: Sequence[str], options: Mapping[str, str]) -> list[Variant]:
    """Those variants that match a glob and have one of the build options, with its value replaced.

    A trait that has the option's name in lower case gets the value too.

    Raises:
        BuildError: there is none.
    """
    found = []
    for variant in variants:
        mine = {name: value for name, value in options.items() if name in variant.defines}
        if mine and any(fnmatchcase(variant.name, pattern) for pattern in patterns):
            stated = {name.lower(): value for name, value in mine.items() if name.lower() in variant.traits}
            changed = replace(variant, defines={**variant.defines, **mine}, traits={**variant.traits, **stated})
            found.append(changed)
    if not found:
        raise BuildError(f"no variant that matches {' '.join(patterns)} has an option {' or '.join(options)}")
    return found


def overlay(base: Path, changed: Release, name: str) -> Release:
    """Write the release ``name`` beside ``changed``: its kernels, and those of ``base`` that it lacks."""
    trees = (base, changed.folder)
    entries: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for tree in trees:
        for entry in json.loads((tree / FILE_NAME).read_text())["kernels"]:
            entries[entry["name"]] = entry
            files[entry["file"]] = (tree / entry["file"]).read_bytes()
    return write_release(changed.folder.parent, name, files, list(entries.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Build from the command line; 1 and a message on the standard error if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kernels_src.experiment", description=__doc__)
    parser.add_argument("name", help="what tells the experiment's release from others")
    parser.add_argument("--define", action="append", required=True, metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument("--only", action="append", metavar="GLOB", help="of kernels; may be repeated (all)")
    parser.add_argument("--base", type=Path, default=BASE, help="the built release (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of experiments (%(default)s)")
    given = parser.parse_args(arguments)
    release, pins = f"{RELEASE}-{given.name}", given.out / "pins.toml"
    try:
        options = dict(word.split("=", 1) for word in given.define)
        variants = with_options(VARIANTS, given.only or ["*"], options)
        compiled = build(given.out, variants, LAYOUTS, find_toolchain(), release=release, cache=kernel_cache())
        whole = overlay(given.base, compiled, release)
    except (BuildError, ToolchainError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = pins.read_text() if pins.exists() else ""
    pins.write_text(with_pin(text, pin_of(whole, abi=RELEASE)))
    print(f"{whole.folder}: {len(variants)} kernels of {whole.files - 1} are the experiment's; pinned in {pins}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
