"""Compiling C against the real cuda.h, and the controls of the stand-in for libcuda."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from ..values import dataclass

if TYPE_CHECKING:
    from .cubin_under_test import CubinUnderTest

SOURCE = Path(__file__).with_name("standin.c")


def cuda_include(needs: str = "cuda.h") -> Path:
    """The folder of a cuda.h of CUDA 13 or newer, beside the header ``needs``.

    It is that of a pip wheel of the toolkit, CUDA_HOME, or the system's.
    """
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [site / "cu13" / "include", site / "cuda_runtime" / "include"]
    folders += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders += sorted((path / "include" for path in Path("/usr/local").glob("cuda*")), reverse=True)
    for folder in folders:
        if (folder / "cuda.h").is_file() and (folder / needs).is_file() and _version(folder / "cuda.h") >= 13000:
            return folder
    looked = ", ".join(map(str, folders))
    raise FileNotFoundError(f"no cuda.h of CUDA 13 with {needs} in {looked}: pip install nvidia-cuda-runtime==13.0.96")


def _version(header: Path) -> int:
    match = re.search(r"^#define CUDA_VERSION (\d+)", header.read_text(errors="replace"), re.MULTILINE)
    return int(match[1]) if match else 0


def compile_c(source: Path, output: Path, *options: str) -> None:
    """Run the C compiler with every warning an error."""
    command = [os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-cpp"]
    command += [f"-I{cuda_include()}", *options, str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: code {done.returncode}\n{done.stderr}")


def build_standin(folder: Path) -> Path:
    """Compile the stand-in into ``folder``; the path of the library.

    Raises:
        FileNotFoundError: there is no cuda.h of CUDA 13 or no C compiler.
    """
    library = folder / "libcuda_standin.so"
    compile_c(SOURCE, library, "-shared", "-fPIC", "-pthread")
    return library


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the log: the function and what arrived, as text."""

    name: str
    seen: dict[str, str]


class StandIn:
    """Configures the stand-in and reads its log."""

    def __init__(self, path: Path) -> None:
        """``path`` is the library that ``build_standin`` made; ``Driver(path)`` opens the same."""
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.standin_log.restype = ctypes.c_char_p
        self._library.standin_image.restype = ctypes.c_void_p
        self._library.standin_make_context.restype = ctypes.c_void_p
        self._capability = (9, 0)

    def exports(self) -> set[str]:
        """The driver functions it has."""
        table = subprocess.run(["nm", "-D", str(self.path)], capture_output=True, text=True, check=True).stdout
        return set(re.findall(r" T (cu\w+)", table))

    def reset(self) -> None:
        """Reset to one device of compute capability 9.0 without kernels, faults or a log."""
        self._capability = (9, 0)
        self._library.standin_reset()

    def pose_as(self, major: int, minor: int) -> None:
        """Set the compute capability of all devices."""
        self._capability = (major, minor)
        self._library.standin_set_device(major, minor, 1)

    def without_device(self) -> None:
        """Set the number of devices to 0."""
        self._library.standin_set_device(9, 0, 0)

    def with_devices(self, count: int) -> None:
        """Set the number of devices."""
        self._library.standin_set_device(*self._capability, count)

    def describe(
        self,
        name: str,
        capability: tuple[int, int],
        multiprocessors: int,
        shared_per_multiprocessor: int,
        l2: int,
        clusters: int,
    ) -> None:
        """Set the devices' properties; sizes in bytes, a block may have 1 KiB of shared memory less.

        ``clusters`` clusters of any kernel are active at once.
        """
        self.pose_as(*capability)
        block = shared_per_multiprocessor - 1024
        self._library.standin_describe(name.encode(), multiprocessors, shared_per_multiprocessor, block, l2, clusters)

    def make_up_memory(self, first: int) -> None:
        """Return addresses from ``first`` on for allocations, the same in every run, without memory behind them."""
        self._library.standin_make_up_memory(ctypes.c_uint64(first))

    def write_whole_descriptors(self) -> None:
        """Let descriptors contain all arguments that they were encoded from."""
        self._library.standin_write_whole_descriptors()

    def make_context(self, device: int) -> int:
        """The handle of another context of ``device``, like a program's own or a green context."""
        context: int = self._library.standin_make_context(device)
        return context

    def add_kernel(self, symbol: str, sizes: tuple[int, ...], max_threads: int = 1024) -> None:
        """Add a kernel with parameters of these sizes in bytes to all modules."""
        array = (ctypes.c_size_t * max(1, len(sizes)))(*sizes)
        self._library.standin_add_kernel(symbol.encode(), array, len(sizes), max_threads)

    def add_cubin(self, cubin: CubinUnderTest) -> None:
        """Add a cubin's kernel to all modules, as its ELF describes it."""
        sizes = tuple(parameter.size for parameter in cubin.facts.parameters)
        self.add_kernel(cubin.symbol, sizes, cubin.facts.max_threads or 1024)

    def accept_kernels(self, size: int) -> None:
        """Let every module have any kernel, with one parameter of ``size`` bytes."""
        self._library.standin_accept_kernels(ctypes.c_size_t(size))

    def images(self) -> list[bytes]:
        """The images of the loaded modules, in order."""
        images, size = list[bytes](), ctypes.c_size_t()
        while address := self._library.standin_image(len(images), ctypes.byref(size)):
            images.append(ctypes.string_at(address, size.value))
        return images

    def fail(self, call: str, code: int, *, skip: int = 0, times: int = -1) -> None:
        """Let a driver function return ``code`` after ``skip`` successful calls, ``times`` times (-1: always)."""
        self._library.standin_fail(call.encode(), code, skip, times)

    def fault(self, code: int) -> None:
        """Cause an asynchronous fault of this code, after which the context is unusable."""
        self._library.standin_fault(code)

    def hide_parameter_info(self) -> None:
        """Hide the sizes of parameters, as drivers before CUDA 12.4 do."""
        self._library.standin_hide_parameter_info()

    def clear_log(self) -> None:
        """Forget the calls so far."""
        self._library.standin_clear_log()

    def calls(self, name: str) -> list[Call]:
        """The calls of one driver function, in order."""
        lines = self._library.standin_log().decode().splitlines()
        split = [line.split(" ") for line in lines]
        return [
            Call(words[0], dict(word.split("=", 1) for word in words[1:] if "=" in word))
            for words in split
            if words[0] == name
        ]

    def names(self) -> list[str]:
        """The functions called, in order, as far as they are logged."""
        return [line.split(" ")[0] for line in self._library.standin_log().decode().splitlines()]

    def call(self, name: str) -> dict[str, str]:
        """Return what the only call of ``name`` received; an error if there were others."""
        (only,) = self.calls(name)
        return only.seen
