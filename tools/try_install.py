"""``make test-install``: each way to install, in a clean environment, and in a root folder with Python only.

Needs built kernels (``make artifacts``) and, for the dependencies, the package index once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cubin_runtime._version import KERNELS_VERSION  # noqa: E402

RELEASE = f"hopper-{KERNELS_VERSION}"
PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")
USE = "from cubin_runtime import Runtime; print(len(Runtime().native_release().kernels), 'kernels')"
VERIFY = ("verify", RELEASE, "--complete", "--tree", "package")
SKIPPED = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "idlelib", "config-*", "*.a")


def run(*command: str | Path, env: Mapping[str, str], fails: bool = False) -> str:
    """What a command prints, both streams; an error with it where the command ends otherwise than expected."""
    done = subprocess.run(
        [str(word) for word in command], env=env, cwd="/", capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    if (done.returncode != 0) != fails:
        raise SystemExit(f"error: {' '.join(map(str, command))}: code {done.returncode}\n{said}")
    return said


class Trial:
    """A folder with the wheels, and environments that install from them alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.house = folder / "wheels"
        self.env = {"HOME": str(folder), "PATH": str(folder), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.house)}

    def build_wheels(self) -> None:
        """Both wheels, and those of everything that the package depends on."""
        copy = self.folder / "clone"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
        build = ["wheel", "--no-build-isolation", "--wheel-dir", str(self.house), str(copy)]
        subprocess.run([sys.executable, *PIP, *build], check=True)
        packaging = [sys.executable, "-m", "kernels_src.packaging", "--no-isolation", "--out", str(self.house)]
        subprocess.run(packaging, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def environment(self, name: str) -> Path:
        """The Python of a new environment."""
        run(sys.executable, "-m", "venv", self.folder / name, env=self.env)
        return self.folder / name / "bin" / "python"

    def two_wheels(self) -> str:
        """The wheel files of ``make dist``."""
        python = self.environment("two-wheels")
        both = [file for file in self.house.iterdir() if file.name.startswith("cubin_runtime")]
        run(python, *PIP, "install", *both, env=self.env)
        return run(python.parent / "cubin-runtime", *VERIFY, env=self.env)

    def extra(self) -> str:
        """``pip install "cubin-runtime[kernels]"`` from an index (a folder of wheels)."""
        python = self.environment("extra")
        run(python, *PIP, "install", "cubin-runtime[kernels]", env=self.env)
        return run(python, "-c", USE, env=self.env)

    def told(self) -> str:
        """The package alone, then the command that its error and ``doctor`` name."""
        python = self.environment("told")
        run(python, *PIP, "install", "cubin-runtime", env=self.env)
        error = run(python, "-c", USE, env=self.env, fails=True)
        (command,) = re.findall(r"'(pip install [^']+)'", error)
        before = run(python.parent / "cubin-runtime", "doctor", env=self.env)
        (verdict,) = re.findall(r"^native kernels: (.*)", before, re.MULTILINE)
        if not verdict.startswith("no,") or f"'{command}'" not in verdict:
            raise SystemExit(f"error: doctor does not say {command!r}:\n{before}")
        run(python.parent / command.split()[0], *command.split()[1:], env=self.env)
        if f"native kernels: yes, {RELEASE}" not in run(python.parent / "cubin-runtime", "doctor", env=self.env):
            raise SystemExit("error: doctor does not see the kernels that it asked for")
        return f"{command}: {run(python, '-c', USE, env=self.env)}"

    def clone(self) -> str:
        """``make install`` without a compiler on PATH."""
        env = {**os.environ, "PATH": "/usr/bin:/bin", "CC": "false", "CXX": "false"}
        into = self.folder / "clone-install"
        (wheel,) = self.house.glob("cubin_runtime_kernels-*")
        run(sys.executable, self.folder / "clone" / "tools" / "install.py", "--into", into, "--kernels", wheel, env=env)
        return run(into / "bin" / "python", "-c", USE, env=self.env)

    def bare_root(self) -> str:
        """A root folder with only Python, its libraries and the wheels: no shell, no tools, no /etc."""
        if os.geteuid() != 0:
            return "left out, as only root can change the root"
        root = self.folder / "root"
        base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
        binary, library = base / "bin" / version, base / "lib" / version
        shutil.copytree(library, root / library.relative_to("/"), ignore=SKIPPED, symlinks=True)
        for file in needed_by([binary, *(library / "lib-dynload").glob("*.so")]):
            target = root / file.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        for name in ("dev", "tmp"):
            (root / name).mkdir()
        os.mknod(root / "dev" / "null", 0o020666, os.makedev(1, 3))
        shutil.copytree(self.house, root / "wheels")
        inside = {"HOME": "/tmp", "PATH": "/nothing", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
        enter = (shutil.which("chroot") or "chroot", root)
        run(*enter, binary, "-m", "venv", "/env", env=inside)
        run(*enter, "/env/bin/python", *PIP, "install", "cubin-runtime[kernels]", env=inside)
        return run(*enter, "/env/bin/python", "-c", USE, env=inside)


def needed_by(files: list[Path]) -> set[Path]:
    """The files and the shared libraries that they load, by the names that they load them by."""
    found = set(files)
    for file in files:
        said = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
        found |= {Path(name) for name in re.findall(r"(/\S+) \(0x", said)}
    return found


def main() -> int:
    """Try every way; the first that fails ends the run with what it printed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cubin-runtime-install-") as folder:
        trial = Trial(Path(folder))
        trial.build_wheels()
        for way in (trial.two_wheels, trial.extra, trial.told, trial.clone, trial.bare_root):
            words = (way.__doc__ or "").splitlines()[0]
            print(f"ok  {words}\n      {way().strip().splitlines()[-1]}", flush=True)
    print(f"Every way to install works ({time.monotonic() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
