"""Launches recorded from the reference launcher: parameter bytes, descriptors and attributes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.launch import tensormap as rules
from cubin_runtime.launch.plan import LaunchAttributes
from cubin_runtime.launch.structs import FastModDiv
from cubin_runtime.launch.tensormap import TensorMapSpec

DATA = Path(__file__).parents[2] / "data"
LAUNCHES = json.loads((DATA / "trtllm_gen_launches.json").read_text())
MARKERS = json.loads((DATA / "trtllm_gen_layout.json").read_text())["params_hex_tma_placeholder"]
DESCRIPTORS = [
    pytest.param(made, id=f"{launch['case']}-{name}")
    for launch in LAUNCHES
    for name, made in launch["descriptors"].items()
]
every_launch = pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch["case"])


def value_of(kind: str, recorded: Any) -> object:
    """A recorded field as ``pack`` takes it: pointers came as hexadecimal text, divisors as their bytes."""
    if kind == "ptr":
        return recorded and int(recorded, 16)
    return FastModDiv.from_bytes(bytes.fromhex(recorded)) if kind == "FastModDiv" else recorded


def recorded_values(launch: dict[str, Any]) -> dict[str, object]:
    """All fields; each descriptor that was built is its marker byte, as in the recorded bytes."""
    values: dict[str, object] = {}
    for member in KERNEL_PARAMS.fields:
        if member.type == "CUtensorMap":
            built = member.name in launch["descriptors"]
            values[member.name] = bytes.fromhex(MARKERS[member.name]) * 128 if built else None
        else:
            values[member.name] = value_of(member.type, launch["fields"][member.name])
    return values


def word(table: dict[str, Any], code: int) -> str:
    """The word for an enum's number."""
    return next(name for name, entry in table.items() if getattr(entry, "code", entry) == code)


def spec_of(made: dict[str, Any]) -> TensorMapSpec:
    return TensorMapSpec(
        dtype=word(rules.DTYPES, made["dataType"]),
        address=int(made["address"], 16),
        dims=tuple(made["globalDim"]),
        strides=tuple(made["globalStrides"]),
        box=tuple(made["boxDim"]),
        element_strides=tuple(made["elementStrides"]),
        interleave=word(rules.INTERLEAVES, made["interleave"]),
        swizzle=word(rules.SWIZZLES, made["swizzle"]),
        l2_promotion=word(rules.L2_PROMOTIONS, made["l2Promotion"]),
        fill=word(rules.FILLS, made["oobFill"]),
    )


@every_launch
def test_recorded_fields_pack_to_the_recorded_bytes(launch: dict[str, Any]) -> None:
    packed = KERNEL_PARAMS.pack(recorded_values(launch))
    assert packed.hex() == launch["bytes"]


@every_launch
def test_recorded_bytes_unpack_and_pack_to_themselves(launch: dict[str, Any]) -> None:
    raw = bytes.fromhex(launch["bytes"])
    assert KERNEL_PARAMS.pack(KERNEL_PARAMS.unpack(raw)) == raw


@pytest.mark.parametrize("made", DESCRIPTORS)
def test_recorded_descriptors_break_no_rule(made: dict[str, Any]) -> None:
    spec_of(made).check()


@every_launch
def test_attributes_have_the_recorded_numbers_order_and_values(launch: dict[str, Any]) -> None:
    cluster, policy, pdl = (recorded["value"] for recorded in launch["attributes"].values())
    made = LaunchAttributes(tuple(cluster), policy[0], bool(pdl[0]), launch["nonportable"])
    expected = [(a["id"], struct.pack(f"<{len(a['value'])}i", *a["value"])) for a in launch["attributes"].values()]
    assert list(made.entries()) == expected
