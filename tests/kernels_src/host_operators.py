"""Operators of one launch on the host: planned for a described device, run by an emulated kernel over host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.attention.step_plan import StepPlan
from cubin_runtime.launch.driver import DeviceFacts, Driver
from tests.attention.attention_examples import RELEASE_NAME, describe_release
from tests.kernels.copying_kernels import COPYING_VARIANTS, KERNELS
from tests.kernels_src.host_kernels import BLOCK_EMULATOR, HostKernel

# Two multiprocessors: few CTAs, each with much to do.
SMALL = DeviceFacts(0, "H200", (9, 0), 2, 232448, 233472, 60 << 20, 13000)
DTYPES = {np.dtype(np.float32): "float32", np.dtype(np.int32): "int32", np.dtype(np.bool_): "bool"}


class HostOperators:
    """A runtime without a driver, and the kernels that its plans name."""

    def __init__(self, folder: Path) -> None:
        tree, pins = describe_release(folder / "described", KERNELS)
        config = Config(store=folder / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
        self.runtime = Runtime(config, driver=Driver("/nonexistent/libcuda.so.1"), release=RELEASE_NAME)
        self.kernels = {
            v.name: HostKernel(v.source, v.struct, v.defines, folder / v.name, BLOCK_EMULATOR) for v in COPYING_VARIANTS
        }
        self.status = np.zeros(1, np.uint32)

    def run(self, plan: StepPlan, tensors: Mapping[str, TensorView], numbers: tuple[float, ...] = ()) -> int:
        """Run the plan's launch; the bits of its status word."""
        self.status[:] = 0
        addresses = plan.addresses_of(tensors)
        names = zip(plan.operator.values, plan.operator.tensors, strict=True)
        given: dict[str, Any] = {value: addresses.get(arg.name, 0) for value, arg in names}
        given |= {"status": address_of(self.status), **dict(zip(plan.operator.numbers, numbers, strict=True))}
        (launch,) = plan.launch_plans()
        values = {**launch.values, **{field: given[name] for field, name in launch.inputs.items()}}
        self.kernels[launch.kernel].launch(replace(launch, values=values))
        return int(self.status[0])


def address_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def view_on(array: np.ndarray, dtype: str | None = None) -> TensorView:
    """The view of a host array, strided as it is."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return TensorView(address_of(array), dtype or DTYPES[array.dtype], array.shape, strides)


def aligned(shape: tuple[int, ...], dtype: Any, fill: int = 0xFF) -> np.ndarray:
    """An array at a multiple of 64 bytes, every byte ``fill``."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + 64, fill, np.uint8)
    start = -address_of(memory) % 64
    return memory[start : start + size].view(dtype).reshape(shape)
