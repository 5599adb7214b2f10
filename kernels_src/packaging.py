"""Stage and build the data wheel of a release: ``python -m kernels_src.packaging [TREE] --out DIR``."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cubin_runtime._version import KERNELS_VERSION

from .release import RELEASE

TEMPLATE = Path(__file__).resolve().parent / "data_wheel"
LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
PACKAGE = "cubin_runtime_kernels"
# Zip archives hold times of files; this one makes two builds of one tree equal.
_EPOCH = "1577836800"


def stage(tree: Path, project: Path, version: str = KERNELS_VERSION) -> None:
    """Lay out in ``project`` what setuptools needs to build the data wheel of the release folder ``tree``."""
    package = project / PACKAGE
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(TEMPLATE / name, project / name)
    shutil.copyfile(LICENSE, project / "LICENSE")
    (project / "VERSION").write_text(version + "\n")
    (package / "__init__.py").write_text('"""Data alone: the release tree beside this file."""\n')
    shutil.copytree(tree, package / tree.name)


def build_wheel(tree: Path, out: Path, *, isolated: bool = True, version: str = KERNELS_VERSION) -> Path:
    """Build the wheel of ``tree`` into ``out`` and return its path.

    ``isolated=False`` uses the setuptools of this environment and so needs no network.

    Raises:
        FileNotFoundError: ``tree`` is not a release folder.
        subprocess.CalledProcessError: the build failed; what it printed went to the standard error.
    """
    if not (tree / "checksums.txt").is_file():
        raise FileNotFoundError(f"{tree}: no checksums.txt; build the release first (make artifacts)")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="data-wheel-") as scratch:
        project = Path(scratch) / "project"
        stage(tree, project, version)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        command += ["--wheel-dir", scratch, str(project)]
        if not isolated:
            command.insert(-1, "--no-build-isolation")
        environment = {**os.environ, "SOURCE_DATE_EPOCH": _EPOCH}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        (built,) = Path(scratch).glob("*.whl")
        return Path(shutil.move(built, out / built.name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the wheel from the command line; 1 and a message if the tree is missing or the build fails."""
    parser = argparse.ArgumentParser(prog="python -m kernels_src.packaging", description=__doc__)
    parser.add_argument("tree", type=Path, nargs="?", default=Path("build/artifacts") / RELEASE)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="the folder for the wheel (%(default)s)")
    parser.add_argument("--no-isolation", action="store_true", help="use the setuptools of this environment")
    given = parser.parse_args(arguments)
    try:
        wheel = build_wheel(given.tree, given.out, isolated=not given.no_isolation)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{wheel}: {wheel.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
