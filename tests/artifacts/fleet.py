"""Fetching processes that tests start, watch and kill, and what must hold in a store whatever happens."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.artifacts.children import PACKAGE_ROOT
from tests.artifacts.releases import Release

# Two workers of each fetch whatever the machine has, so that a small release already uses them.
SMALL_CREWS = """
from cubin_runtime.artifacts.fetch import process_pool
process_pool.OBJECTS_A_PROCESS = 8
process_pool.available_cores = lambda: 2
"""
# A shell starts its background jobs with SIGINT ignored, and children inherit that.
INTERRUPTIBLE = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
FETCH = """
import sys
from pathlib import Path
from tests.artifacts.releases import PATIENT_LIMITS, QUICK_POLICY
from cubin_runtime.artifacts.library import Library
from cubin_runtime.config import Config
from cubin_runtime.errors import CubinRuntimeError
store, pins, source, jobs = sys.argv[1:5]
library = Library(Config(Path(store), (source,), (Path(pins),)), limits=PATIENT_LIMITS, policy=QUICK_POLICY)
pin = library.pins.get("made-1.0")
try:
    print(library.fetch(pin, jobs=int(jobs)))
except CubinRuntimeError as error:
    print(type(error).__name__, error.exit_code, error)
    sys.exit(error.exit_code)
"""
COMMAND_LINE = "import sys\nfrom cubin_runtime.cli import main\nsys.exit(main(sys.argv[1:]))\n"


def start_python(source: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Python source in a new process that SIGINT interrupts, its output kept; a session of its own, as from a shell."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [sys.executable, "-c", INTERRUPTIBLE + source, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def start_fetcher(
    release: Release, store: Path, source: str, *, workers: bool, jobs: int = 4, before: str = ""
) -> subprocess.Popen[str]:
    """A process that fetches the release and prints its report or its named error."""
    code = (SMALL_CREWS if workers else "") + before + FETCH
    return start_python(code, store, release.pin_file, source, jobs)


def children_of(pid: int) -> list[int]:
    """Process ids of the children that a process has now."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.01)


def wrong_objects(store: Path) -> list[str]:
    """Names in the store's object folders, temporaries aside, whose bytes are not those of the name."""
    wrong: list[str] = []
    for file in (store / "sha256").rglob("*"):
        if file.name.startswith(".tmp-") or file.is_dir():
            continue
        if hashlib.sha256(file.read_bytes()).hexdigest() != file.name:
            wrong.append(file.name)
    return wrong


def temporaries(store: Path) -> list[str]:
    return [file.name for file in (store / "sha256").rglob(".tmp-*")]
