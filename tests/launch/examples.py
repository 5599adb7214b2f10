"""Small structs, kernels, specs and plans for the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cubin_runtime.artifacts.cubins.cubin import Architecture, Cubin, KernelFacts, Parameter
from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.launch.abi import LaunchNeeds
from cubin_runtime.launch.driver import DeviceFacts
from cubin_runtime.launch.plan import LaunchAttributes, LaunchPlan
from cubin_runtime.launch.structs import Field, StructLayout
from cubin_runtime.launch.tensormap import TensorMapSpec

SYMBOL = "decode"
DIGEST = "ab" * 32
LAYOUT = StructLayout.declare(
    "DecodeParams",
    [
        Field("k", "CUtensorMap", "keys"),
        Field("out", "ptr", "output"),
        Field("scale", "float", "softmax scale"),
        Field("batch", "int32", "sequences"),
        Field("group", "FastModDiv", "heads"),
        Field("lengths", "ptr", "KV lengths"),
    ],
    tensor_map_alignment=128,
)
SPEC = TensorMapSpec(
    dtype="bfloat16",
    address=0x7F0000000000,
    dims=(128, 64, 8, 100),
    strides=(2048, 256, 131072),
    box=(64, 64, 1, 1),
    element_strides=(1, 1, 1, 1),
    swizzle="128B",
    l2_promotion="128B",
)
VALUES: dict[str, Any] = {"k": SPEC, "out": 0x1000, "scale": 0.125, "batch": 7, "group": 3, "lengths": 0x2000}
H100 = DeviceFacts(0, "H100", (9, 0), 132, 232448, 233472, 52428800, 13000)


def device(major: int, minor: int) -> DeviceFacts:
    return replace(H100, name=f"SM {major}.{minor}", capability=(major, minor))


def kernel_facts(
    sizes: tuple[int, ...] = (LAYOUT.size,), max_threads: int | None = 384, static: int = 0
) -> KernelFacts:
    parameters = tuple(Parameter(i, 0, size) for i, size in enumerate(sizes))
    return KernelFacts(SYMBOL, parameters, max_threads, 168, static)


def cubin(architecture: str = "90a", facts: KernelFacts | None = None) -> Cubin:
    return Cubin(DIGEST, Architecture.parse(architecture), {SYMBOL: facts or kernel_facts()})


def needs(**changes: Any) -> LaunchNeeds:
    return LaunchNeeds(LAYOUT, 384, LAYOUT.fingerprint)._replace(**changes)


def plan(**changes: Any) -> LaunchPlan:
    """A plan whose path stands for any artifact; the launcher only carries it."""
    start: dict[str, Any] = {
        "kernel": "paged_decode_d128",
        "symbol": SYMBOL,
        "path": ArtifactPath("hopper-0.1.0/fmha/decode.cubin"),
        "sha256": DIGEST,
        "layout": LAYOUT,
        "grid": (132, 2, 3),
        "block": (384, 1, 1),
        "shared_bytes": 200000,
        "attributes": LaunchAttributes((2, 1, 1), 1, True),
        "values": VALUES,
        "why": "the only one",
    }
    return LaunchPlan(**{**start, **changes})
