"""``make install``: the package and its kernels into one environment; a compiler only where no built kernels are found.

Usage: install.py [--into DIR] [--kernels WHEEL]. Without ``--into`` the active virtual environment, else ``./venv``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = ("-m", "pip", "--disable-pip-version-check")


def run(*command: str | Path) -> None:
    """Run a command in the clone; what it prints is shown."""
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)


def pack(python: Path, folder: Path) -> None:
    """Make the wheel of the kernels in ``build/artifacts``."""
    command = [str(python), "-m", "kernels_src.packaging", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def environment_of(into: str | None) -> Path:
    """The Python of the environment to install into, which is made if it is not there."""
    folder = Path(into or os.environ.get("VIRTUAL_ENV") or ROOT / "venv").expanduser().absolute()
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Making the environment {folder}", flush=True)
        run(sys.executable, "-m", "venv", folder)
    return python


def wheels(python: Path, version: str, given: Path | None, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Where the wheel of the kernels may come from, without a compiler first: words for it, and the file."""
    name = f"cubin_runtime_kernels-{version}-py3-none-any.whl"
    if given is not None:
        yield "the wheel that was given", given.expanduser().absolute()
        return
    if (ROOT / "dist" / name).is_file():
        yield "the wheel that 'make dist' built", ROOT / "dist" / name
    if (ROOT / "build" / "artifacts" / f"hopper-{version}" / "checksums.txt").is_file():
        pack(python, scratch)
        yield "the kernels that 'make artifacts' built", scratch / name
    wanted = (f"cubin-runtime-kernels=={version}", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch))
    if subprocess.run(
        [python, *PIP, "download", "-qq", *wanted], cwd=ROOT, check=False, capture_output=True
    ).returncode:
        print(f"The package index has no cubin-runtime-kernels {version}; compiling it (minutes at first)", flush=True)
        run("make", "--no-print-directory", "artifacts", "CHECK=1")
        pack(python, scratch)
        yield "kernels compiled here", scratch / name
    else:
        yield "the wheel of the package index", scratch / name


def install_kernels(python: Path, version: str, given: Path | None) -> str | None:
    """Install the first wheel whose kernels are the pinned ones; where it came from, None if there is none."""
    command = python.parent / "cubin-runtime"
    with tempfile.TemporaryDirectory(prefix="cubin-runtime-install-") as scratch:
        for words, wheel in wheels(python, version, given, Path(scratch)):
            check = [command, "verify", f"hopper-{version}", "--complete", "--tree", wheel, "--quiet"]
            said = subprocess.run(check, check=False, capture_output=True, text=True)
            if said.returncode == 0:
                run(python, *PIP, "install", "-qq", "--no-deps", "--force-reinstall", wheel)
                return words
            print(f"Not the pinned kernels: {words}: {said.stderr.strip()}", flush=True)
    return None


def install_accelerator(python: Path) -> None:
    """Install the C part of launches; without a C compiler everything works, and a call takes more host time."""
    command = [python, *PIP, "install", "-qq", "--no-deps", ROOT / "accelerator"]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"Left out the accelerator, which needs a C compiler and Python's headers: {last}", flush=True)
    else:
        print("Installed the accelerator", flush=True)


def main() -> int:
    """Install; 0 if package and kernels are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", metavar="DIR", help="the environment; made if it is not there")
    parser.add_argument("--kernels", type=Path, metavar="WHEEL", help="the wheel of the kernels")
    given = parser.parse_args()
    python = environment_of(given.into)
    print(f"Installing the package into {python.parent.parent}", flush=True)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # modules of an earlier build would be installed too
    run(python, *PIP, "install", "-qq", f"{ROOT}[examples]")
    install_accelerator(python)
    asked = "from cubin_runtime._version import KERNELS_VERSION; print(KERNELS_VERSION)"
    version = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True, cwd="/").stdout.strip()
    words = install_kernels(python, version, given.kernels)
    if words is None:
        print("error: the package is installed, the kernels are not", file=sys.stderr)
        return 1
    print(f"Installed the kernels: {words}, verified against the pin")
    print(f"\nNext:\n  source {python.parent}/activate\n  cubin-runtime doctor        # what will work on this machine")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"error: {' '.join(map(str, error.cmd))} failed with code {error.returncode}") from None
