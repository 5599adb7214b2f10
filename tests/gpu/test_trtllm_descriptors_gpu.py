"""Every distinct TMA descriptor of the recorded reference launches, encoded and moved by a real driver."""

from __future__ import annotations

import ctypes
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.launch.driver import Driver
from cubin_runtime.launch.tensormap import DTYPES, FILLS, INTERLEAVES, L2_PROMOTIONS, SWIZZLES, TensorMapSpec

pytestmark = pytest.mark.gpu

RECORDS = Path(__file__).parents[1] / "data" / "trtllm_gen_cases.jsonl.xz"
PACKED = "16u4_align16b"  # only devices from compute capability 10 on take it


def word_of(words: dict[str, Any], number: int) -> str:
    (found,) = [word for word, value in words.items() if getattr(value, "code", value) == number]
    return found


def spec_of(recorded: dict[str, Any]) -> TensorMapSpec:
    """A recorded call of cuTensorMapEncodeTiled as our value; addresses are made up, their alignment is not."""
    return TensorMapSpec(
        dtype=word_of(DTYPES, recorded["dataType"]),
        address=int(recorded["address"], 16) % 256,
        dims=tuple(recorded["globalDim"]),
        strides=tuple(recorded["globalStrides"]),
        box=tuple(recorded["boxDim"]),
        element_strides=tuple(recorded["elementStrides"]),
        interleave=word_of(INTERLEAVES, recorded["interleave"]),
        swizzle=word_of(SWIZZLES, recorded["swizzle"]),
        l2_promotion=word_of(L2_PROMOTIONS, recorded["l2Promotion"]),
        fill=word_of(FILLS, recorded["oobFill"]),
    )


def test_every_recorded_descriptor_is_taken_by_our_rules_and_by_the_driver_and_may_be_moved() -> None:
    with lzma.open(RECORDS, "rt") as lines:
        recorded = [call for line in lines for call in (json.loads(line).get("tma") or {}).values() if call]
    specs = {spec for spec in map(spec_of, recorded) if spec.dtype != PACKED}
    driver = Driver()
    driver.set_current(driver.primary_context(0))
    memory = driver.allocate(4096)
    buffer = ctypes.create_string_buffer(192)
    aligned = -(-ctypes.addressof(buffer) // 64) * 64
    try:
        for spec in specs:
            placed, moved = (spec._replace(address=memory + offset + spec.address) for offset in (0, 2048))
            ctypes.memmove(aligned, placed.encode(driver), 128)
            driver.call("cuTensorMapReplaceAddress", aligned, moved.address)
            assert ctypes.string_at(aligned, 128) == moved.encode(driver)
    finally:
        driver.free(memory)
    assert len(specs) > 1000
    print(f"{len(specs)} distinct descriptors of {len(recorded)} recorded")
