"""Find the exact CUDA toolchain, or say the one line that installs it. Standard library alone.

``python -m kernels_src.toolchain`` prints what was found; exit code 1 if nothing was.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "nvidia-cuda-cccl": "13.0.85",
        "nvidia-cuda-crt": "13.0.88",
        "nvidia-cuda-nvcc": "13.0.88",
        "nvidia-cuda-runtime": "13.0.96",
        "nvidia-nvvm": "13.0.88",
    }
)
INSTALL_LINE = "python -m pip install " + " ".join(f"{name}=={PACKAGES[name]}" for name in PACKAGES)
NVCC_VERSION = PACKAGES["nvidia-cuda-nvcc"]

_NVCC_FILE = re.compile(r"(^|/)bin/nvcc$")
# Each of these changes what nvcc reads or how it is called, and so the bytes.
_STRIPPED = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")


class ToolchainError(Exception):
    """No toolchain of exactly the versions that define our bytes; the message holds the install line."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """An ``nvcc`` of the exact version; ``origin`` is ``packages`` or ``PATH``."""

    nvcc: Path
    origin: str

    def environment(self) -> dict[str, str]:
        """The process environment without the variables that change what nvcc does."""
        return {name: value for name, value in os.environ.items() if name not in _STRIPPED}

    def sha256(self) -> str:
        """The digest (hex) of the files that compile a kernel, wherever they lie, as ``nvcc --dryrun`` names them.

        These are nvcc and its profile, cicc, libdevice, ptxas, all headers of the toolkit, and the host compiler, which
        preprocesses and stands for the headers of the system.

        Raises:
            ToolchainError: nvcc does not name them, or one cannot be read.
        """
        digest = hashlib.sha256(NVCC_VERSION.encode())
        for name, file in self._files():
            try:
                digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
            except OSError as error:
                raise ToolchainError(f"{self.nvcc}: {error}") from error
        return digest.hexdigest()

    def _files(self) -> list[tuple[str, Path]]:
        command = [str(self.nvcc), "--dryrun", "-cubin", "-x", "cu", os.devnull]
        environment = self.environment()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise ToolchainError(f"{self.nvcc} does not say what it would run: {error}") from error
        values = dict(re.findall(r"^#\$ (\w+)=(.*)$", done.stderr, re.MULTILINE))
        preprocess = re.search(r"^#\$ (.* -E .*)$", done.stderr, re.MULTILINE)
        missing = {"_HERE_", "CICC_PATH", "NVVMIR_LIBRARY_DIR", "INCLUDES", "SYSTEM_INCLUDES"} - values.keys()
        if missing or preprocess is None:
            raise ToolchainError(f"nvcc --dryrun names no {', '.join(sorted(missing)) or 'preprocessor'}")
        host = shlex.split(preprocess[1])[0]
        here = Path(values["_HERE_"])
        files = [
            ("nvcc", self.nvcc),
            *((name, here / name) for name in ("nvcc", "nvcc.profile", "ptxas")),
            ("cicc", Path(values["CICC_PATH"]) / "cicc"),
            ("host", Path(shutil.which(host, path=environment.get("PATH")) or host)),
        ]
        words = shlex.split(f"{values['INCLUDES']} {values['SYSTEM_INCLUDES']}")
        folders = [Path(word.removeprefix("-I")).resolve() for word in words if word != "-isystem"]
        folders = [folder for folder in folders if not any(other in folder.parents for other in folders)]
        for folder in (Path(values["NVVMIR_LIBRARY_DIR"]), *folders):
            files += [(str(x.relative_to(folder)), x) for x in sorted(folder.rglob("*")) if x.is_file()]
        return files


def find_toolchain() -> Toolchain:
    """The pip packages of this environment if all are exact, else an exact ``nvcc`` on PATH.

    Raises:
        ToolchainError: neither; says what was found of both, and the one line that installs the packages.
    """
    nvcc, fault = nvcc_of_packages()
    if nvcc is not None:
        return Toolchain(nvcc, "packages")
    nvcc, path_fault = nvcc_on_path()
    if nvcc is not None:
        return Toolchain(nvcc, "PATH")
    raise ToolchainError(
        f"no CUDA toolchain of the exact version: {fault}; {path_fault}. Install it with\n  {INSTALL_LINE}"
    )


def nvcc_of_packages() -> tuple[Path | None, str]:
    """``nvcc`` of the installed packages, or None and the reason."""
    faults = []
    for name, wanted in PACKAGES.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            faults.append(f"{name} is not installed")
            continue
        if found != wanted:
            faults.append(f"{name} is {found}, expected {wanted}")
    if faults:
        return None, ", ".join(faults)
    for file in metadata.distribution("nvidia-cuda-nvcc").files or ():
        if _NVCC_FILE.search(file.as_posix()):
            return Path(str(file.locate())).resolve(), ""
    return None, "nvidia-cuda-nvcc holds no bin/nvcc"


def nvcc_on_path() -> tuple[Path | None, str]:
    """``nvcc`` on PATH if it reports the exact version, or None and the reason."""
    found = shutil.which("nvcc")
    if found is None:
        return None, "no nvcc on PATH"
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvcc on PATH does not run ({error})"
    match = re.search(r"\bV(\d+\.\d+\.\d+)", said.stdout)
    if match is None or match[1] != NVCC_VERSION:
        return None, f"nvcc on PATH reports {match[1] if match else 'no version'}, expected {NVCC_VERSION}"
    return Path(found), ""


def main() -> int:
    """Print the toolchain in force; 1 and the install line if there is none."""
    try:
        toolchain = find_toolchain()
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{toolchain.nvcc} ({toolchain.origin}, {NVCC_VERSION})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
