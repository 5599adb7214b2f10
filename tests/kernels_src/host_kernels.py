"""Kernels compiled by the host's C++ compiler: numerics without a device."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.native.reduction.plan import OperationLaunch
from cubin_runtime.launch.plan import LaunchPlan
from cubin_runtime.launch.structs import StructLayout
from cubin_runtime.testing.standin import cuda_include
from kernels_src.build import SOURCES, write_headers

HOST = Path(__file__).parent / "host"
EMULATOR = HOST / "emulate.cpp"
BLOCK_EMULATOR = HOST / "emulate_blocks.cpp"  # for kernels with shared memory and barriers


class HostKernel:
    """One kernel as a function of the host; ``launch`` runs a grid over host addresses."""

    def __init__(
        self, source: str, struct: str, defines: Mapping[str, int], folder: Path, emulator: Path = EMULATOR
    ) -> None:
        self.layout: StructLayout = LAYOUTS[struct]
        generated = folder / "generated"
        write_headers(generated, LAYOUTS)
        library = folder / f"{source.replace('/', '_')}-{'-'.join(f'{k}{v}' for k, v in defines.items())}.so"
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-w", "-shared", "-fPIC"]
        command += [
            f"-I{generated}",
            f"-I{SOURCES}",
            f"-I{cuda_include('crt/host_defines.h')}",
            f'-DSOURCE="{SOURCES / source}"',
            "-DKERNEL_NAME=kernel",
        ]
        command += [*(f"-D{name}={value}" for name, value in defines.items()), str(emulator), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._run = ctypes.CDLL(str(library)).run

    def launch(self, after: OperationLaunch | LaunchPlan) -> None:
        parameters = ctypes.create_string_buffer(self.layout.pack(after.values))
        self._run(parameters, (ctypes.c_int * 3)(*after.grid), after.block[0])


class HostArrays:
    """Host memory in the place of the device's."""

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}

    def upload(self, array: np.ndarray) -> int:
        kept = np.ascontiguousarray(array).copy()
        address = int(kept.__array_interface__["data"][0])
        self._held[address] = kept
        return address

    def download(self, address: int, array: np.ndarray) -> None:
        array[...] = self._held[address].reshape(array.shape)
