"""Pack what ``run.py`` needs: FlashInfer's Python files, its attention tests, and pure dependencies, in one archive.

    python tools/flashinfer_tests/stage.py WHEEL REPOSITORY --tag v0.6.17 --into STAGED [--site FOLDER]

``WHEEL`` is that of flashinfer-python, of the tag's version; ``REPOSITORY`` a clone of its public repository, with or
without a work tree; ``--site`` a folder of packages that the machine with the GPU lacks (``pip install --target``).
Nothing of this belongs into this repository: the archive is for the machine of whoever fetched it.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

# XQA, XQA MLA, trtllm-gen decode and context, MLA; and the helpers that they import.
TESTS = re.compile(r"tests/(attention/test_(xqa|trtllm_gen_(attention|mla)).*\.py|test_helpers/.*\.py|utils_fp8\.py)")
# Not our operators: sparse MLA of another model, and kernels that choose pages.
OTHERS = ("dsv4", "block_sparse")


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--tag", required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--site", type=Path)
    given = parser.parse_args()
    given.into.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(given.into, "w:xz") as archive:
        add(archive, "staged.json", json.dumps({"wheel": given.wheel.name, "tests": given.tag}).encode())
        add_package(archive, given.wheel)
        add_tests(archive, given.repository, given.tag)
        if given.site:
            archive.add(given.site, "site", filter=without_caches)
    print(f"{given.into}: {given.into.stat().st_size / (1 << 20):.1f} MiB")


def add_package(archive: tarfile.TarFile, wheel: Path) -> None:
    """Add a wheel's Python files, and its metadata."""
    with zipfile.ZipFile(wheel) as opened:
        for name in opened.namelist():
            if (name.startswith("flashinfer/") and name.endswith(".py")) or name.endswith("dist-info/METADATA"):
                add(archive, name, opened.read(name))


def add_tests(archive: tarfile.TarFile, repository: Path, tag: str) -> None:
    """Add the test files of a tag."""
    listed = git(repository, "ls-tree", "-r", "--name-only", tag, "tests").decode().splitlines()
    for path in listed:
        if TESTS.fullmatch(path) and not any(other in path for other in OTHERS):
            add(archive, path, git(repository, "show", f"{tag}:{path}"))


def git(repository: Path, *arguments: str) -> bytes:
    """What git prints."""
    return subprocess.run(["git", "-C", str(repository), *arguments], check=True, stdout=subprocess.PIPE).stdout


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add one file."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave compiled Python out."""
    return None if "__pycache__" in member.name else member


if __name__ == "__main__":
    main()
