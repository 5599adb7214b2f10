"""No call to the system that fails ends a verb with exit code 1: each call of the package fails once, at every verb."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.cli import main
from tests.artifacts.releases import make_release, zip_tree

PACKAGE = str(Path(__file__).parents[2] / "cubin_runtime" / "artifacts")
CALLS = ("open", "close")
MOST = 60
VERBS = {
    "fetch": ["fetch", "made-1.0", "--source", "{tree}"],
    "verify": ["verify", "made-1.0", "--source", "{tree}", "--store", "{filled}"],
    "verify a tree": ["verify", "made-1.0", "--tree", "{tree}"],
    "verify a zip": ["verify", "made-1.0", "--tree", "{zip}"],
    "where": ["where", "made/fmha/kernels.bin", "--source", "{tree}"],
    "list": ["list", "made-1.0", "--source", "{tree}"],
    "export": ["export", "made-1.0", "--source", "{tree}", "--out", "{out}.zip"],
    "mirror": ["mirror", "made-1.0", "--source", "{tree}", "--out", "{out}"],
    "gc": ["gc", "made-1.0", "--source", "{tree}", "--store", "{filled}", "--temps"],
    "pin": ["pin", "other", "--source", "{other}", "--sha256", "{digest}"],
}


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: int) -> Iterator[list[int]]:
    """In the block the package's call number ``number`` to ``os.call`` fails, after it did its work if it closes."""
    real: Callable[..., Any] = getattr(os, call)
    count = [0]

    def failing_once(*arguments: Any, **options: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
            return real(*arguments, **options)
        count[0] += 1
        if call == "close":
            real(*arguments)
        if count[0] == number:
            raise OSError(code, os.strerror(code))
        return None if call == "close" else real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing_once)
        yield count


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_that_fails_is_never_a_bug(
    environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, call: str
) -> None:
    monkeypatch.setattr(Store, "sync", lambda store: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    made = make_release(environment)
    other = make_release(environment / "other", name="other-1.0", folder="other")
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(made.pin_file))
    archive = zip_tree(made.root, environment / "tree.zip", prefix="")
    assert main(["fetch", "made-1.0", "--source", str(made.root), "--store", str(environment / "whole")]) == 0
    words = {"tree": made.root, "zip": archive, "other": other.root, "digest": other.pin.manifest_sha256}
    for number in range(1, MOST):
        for place in ("filled", "store", "out", "home"):
            shutil.rmtree(environment / place, ignore_errors=True)
        shutil.copytree(environment / "whole", environment / "filled", copy_function=shutil.copyfile)
        given = [w.format(**words, filled=environment / "filled", out=environment / "out") for w in VERBS[verb]]
        with failing(monkeypatch, call, number, errno.EIO) as count:
            code = main(given)
        said = capsys.readouterr().err
        assert (code == 1, "Traceback" in said) == (False, False), f"{call} number {number}: {said}"
        if count[0] < number:
            return
