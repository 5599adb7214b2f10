"""Fuzz targets that go through the entry point of the command line, in this process.

The input is written where a verb reads it, or is given as its words or environment. Whatever comes, a verb ends with a
code of the table other than 1.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from cubin_runtime.cli import main
from tests.artifacts.releases import make_release

CODES = frozenset({0, 2, 3, 4, 5, 6, 7, 8, 9, 130})
_VARIABLES = ("SOURCES", "OFFLINE", "TIMEOUT", "RETRIES", "PROXY", "TOKENS", "PIN_KEYS", "LOG", "PROFILE", "CACHE")
_WHEEL = "flashinfer_python-9.1.0-py3-none-any.whl"


@contextmanager
def _place() -> Iterator[Path]:
    """A folder for one run, in memory where the machine has such a file system."""
    memory = "/dev/shm"
    place = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None)
    try:
        yield Path(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(place: Path, words: list[str], variables: Mapping[str, str] | None = None) -> str:
    """The exit code of a verb as a word; nothing from outside ``place`` is in its environment."""
    said = io.StringIO()
    environment = {
        "HOME": str(place / "home"),
        "PATH": "",
        "NO_PROXY": "*",
        "CUBIN_RUNTIME_CACHE": str(place / "store"),
        **(variables or {}),
    }
    with patch.dict(os.environ, environment, clear=True), redirect_stdout(io.StringIO()), redirect_stderr(said):
        code = main(words)
    assert code in CODES, f"{words} in {variables}: code {code}: {said.getvalue()}"
    return f"{'parsed' if code == 0 else 'refused'}, code {code}"


def fuzz_pins(data: bytes) -> str:
    """A pin file."""
    with _place() as place:
        (place / "pins.toml").write_bytes(data)
        return _run(place, ["list", "--pins", str(place / "pins.toml"), "--offline", "--json"])


def fuzz_wheel(data: bytes) -> str:
    """A wheel of FlashInfer, of which pins are made."""
    with _place() as place:
        (place / _WHEEL).write_bytes(data)
        return _run(place, ["pin", "--from-flashinfer", str(place / _WHEEL), "--json"])


def fuzz_artifacts(data: bytes) -> str:
    """FlashInfer's list of artifacts, in a wheel that is whole."""
    import zipfile

    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("flashinfer/artifacts.py", data)
    return fuzz_wheel(whole.getvalue())


def fuzz_record(data: bytes) -> str:
    """The list of files of an installed package, which carries a release."""
    with _place() as place:
        info = place / "tree" / "carrier-1.0.dist-info"
        made = make_release(place)
        info.mkdir()
        (info / "RECORD").write_bytes(data)
        (info / "METADATA").write_bytes(data)
        with patch("sys.path", [str(made.root), *sys.path]):
            return _run(place, ["verify", "made-1.0", "--tree", "package", "--pins", str(made.pin_file), "--json"])


def fuzz_words(data: bytes) -> str:
    """The words of a verb, a line each; neither network nor files outside the run's folder are written."""
    words = [os.fsdecode(line) for line in data.replace(b"\0", b"").split(b"\n")][:12]
    with _place() as place:
        outside = [word for word in words if "/" in word and "://" not in word]
        if outside or any(word.partition("=")[0] == "--out" for word in words):
            return "refused, not run"
        with patch("os.getcwd", lambda: str(place)):
            return _run(place, [*words, "--offline", "--json"])


def fuzz_environment(data: bytes) -> str:
    """The variables of a configuration, a line each in the order of ``_VARIABLES``."""
    lines = data.replace(b"\0", b"").split(b"\n")
    variables = {f"CUBIN_RUNTIME_{name}": os.fsdecode(line) for name, line in zip(_VARIABLES, lines, strict=False)}
    with _place() as place:
        variables["CUBIN_RUNTIME_CACHE"] = str(place / "store")
        return _run(place, ["doctor", "--offline", "--json"], variables)


CLI_TARGETS = {
    "pins": fuzz_pins,
    "wheel": fuzz_wheel,
    "artifacts": fuzz_artifacts,
    "record": fuzz_record,
    "words": fuzz_words,
    "environment": fuzz_environment,
}
