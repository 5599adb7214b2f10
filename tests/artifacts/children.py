"""Running a test's body where root's powers, the disk or the mounts are different."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

import cubin_runtime

PACKAGE_ROOT = Path(cubin_runtime.__file__).parent.parent
ORDINARY_USER = 65534
# imported before the drop: the interpreter itself may lie where only root can read
DROP = f"""
import os, pathlib, requests, cubin_runtime.artifacts.library, cubin_runtime.artifacts.verification
from cubin_runtime.artifacts.fetch import dispatch, process_pool, report
from cubin_runtime.artifacts.sources import archive, directory, http, package
os.setgroups([])
os.setgid({ORDINARY_USER})
os.setuid({ORDINARY_USER})
"""
# for a child that uses the command line, which imports as late as it can: all of it, and the parser warmed up
EVERYTHING = """
import contextlib, encodings.cp437, importlib, os, pkgutil, shlex, shutil, tempfile, zipfile
import cubin_runtime.artifacts, cubin_runtime.cli
for package in (cubin_runtime.artifacts, cubin_runtime.cli):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
    cubin_runtime.cli.main(["where", "unknown", "--store", "/nowhere", "--offline"])
"""


def refuse_threads(monkeypatch: pytest.MonkeyPatch, most: int = 0) -> None:
    """Let this process start ``most`` threads more, as under a limit on processes."""
    start, left = threading.Thread.start, iter(range(most))

    def limited(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def run_child(
    body: str, *arguments: object, as_user: bool = False, mounts: str = "", before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a new process and return it, finished.

    ``as_user`` drops to an ordinary user first; ``mounts`` is shell text that runs before, in a mount
    namespace of the child alone; ``before`` is source that runs while the child still has all its powers.
    ``sys.argv[1:]`` are the arguments.
    """
    if as_user and os.getuid() != 0:
        pytest.skip("only root can become another user")
    source = before + (DROP if as_user else "") + textwrap.dedent(body)
    command = [sys.executable, "-c", source, *map(str, arguments)]
    if mounts:
        command = ["unshare", "-m", "sh", "-ec", f'{mounts}\nexec "$@"', "sh", *command]
    root = readable_copy() if as_user else PACKAGE_ROOT
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=root)


@functools.cache
def readable_copy() -> Path:
    """A folder to import the package and its tests from that every user can read, wherever the clone lies."""
    place = Path(tempfile.mkdtemp(prefix="cubin-runtime-package-"))
    atexit.register(shutil.rmtree, place)
    for name in ("cubin_runtime", "tests"):
        shutil.copytree(PACKAGE_ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for directory, _, files in os.walk(place):
        os.chmod(directory, 0o755)
        for file in files:
            os.chmod(os.path.join(directory, file), 0o644)
    return place


@functools.cache
def can_mount() -> str:
    """Why mounts in a namespace of our own are not possible here; empty if they are."""
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-ec", "mount -t tmpfs none /mnt"],
            capture_output=True,
            text=True,
            timeout=100,
        )
    except FileNotFoundError:
        return "there is no unshare command"
    return done.stderr.strip() if done.returncode else ""


def needs_mounts() -> None:
    if reason := can_mount():
        pytest.skip(f"mounting in a namespace is not allowed here: {reason}")
