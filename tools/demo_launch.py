"""The demo's decode: planned from metadata, shown field by field, launched where there is a GPU."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from demo_text import detail, draw, say

from cubin_runtime import CubinRuntimeError
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins.pin import Pin
from cubin_runtime.attention import PagedDecodePlan, Runtime, TensorView, plan_paged_decode
from cubin_runtime.attention.reference import bfloat16_bits, bfloat16_values, paged_decode_reference
from cubin_runtime.launch.driver import DeviceFacts, Driver

LENGTHS = (4096, 1, 0, 777, 2500, 64, 3333, 1024)
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 64, 8, 128, 64
BOUND = 4096
TILE = 64  # keys of a tile of these kernels
REPEATS = 50
# What to plan for where there is no GPU: an H200 as its driver describes it.
DESCRIBED = DeviceFacts(0, "NVIDIA H200 (from its description)", (9, 0), 132, 232448, 233472, 60 << 20, 13000)


def plan_and_launch(library: Library, pin: Pin) -> None:
    """Plan a decode with the kernels of ``pin`` and launch it if a device is there."""
    runtime = Runtime(library.config, release=pin.name)
    try:
        device = runtime.driver.device(0)
    except CubinRuntimeError as error:
        tensors = _made_up_tensors()
        _show(_plan(runtime, tensors, DESCRIBED), DESCRIBED)
        say("There is no GPU here: everything except the driver's launch call was done.")
        detail(f"{error}")
        return
    if device.capability != (9, 0):
        say(f"{device.name} has compute capability {'.'.join(map(str, device.capability))}; these kernels are for 9.0.")
        return
    _launch(runtime, device)


def _plan(runtime: Runtime, tensors: Sequence[TensorView], device: DeviceFacts) -> PagedDecodePlan:
    return plan_paged_decode(*tensors, max_seq_len=BOUND, runtime=runtime, device_facts=device)


def _show(plan: PagedDecodePlan, device: DeviceFacts) -> None:
    (launch,), (selection,), (rows,) = plan.launch_plans(), plan.selections, plan.describe()
    say(
        f"{len(LENGTHS)} requests of up to {BOUND} keys, {Q_HEADS} query heads over {KV_HEADS} KV heads, "
        f"on an {device.name}."
    )
    say(f"Chosen: {launch.kernel}, grid {launch.grid}, block {launch.block}.")
    detail(f"because    {launch.reason}")
    for candidate in selection.candidates:
        detail(f"looked at  {candidate.kernel.name}: {candidate}")
    detail(f"launch     grid {launch.grid}, block {launch.block}, {launch.shared_bytes} bytes of shared memory")
    detail(f"attributes {launch.attributes}")
    detail(f"workspace  {plan.workspace_bytes} bytes")
    detail(f"parameters {launch.layout.name}, {launch.layout.size} bytes; what is null here comes with each run:")
    for row in rows:
        detail(f"  {row.offset:4d} {row.type:12s} {row.name:20s} {row.text:44s} {row.meaning}")
    _picture(launch.values, launch.grid[1])


def _picture(values: Mapping[str, object], groups: int) -> None:
    """Which CTA group computes which KV tile; only for one that shares all tiles, and takes all heads at once."""
    if values["splits"] or values["head_groups"] != 1:
        return
    tiles = [max(1, -(-length // TILE)) for length in LENGTHS]
    total, first = sum(tiles), 0
    groups = min(groups, total)
    begins = [group * total // groups for group in range(groups)]
    say(f"{groups} groups of CTAs, one letter each, share the {total} tiles of {TILE} keys evenly:")
    for length, count in zip(LENGTHS, tiles, strict=True):
        letters = (chr(ord("A") + bisect_right(begins, tile) - 1) for tile in range(first, first + count))
        draw(f"  {length:4d} keys  {''.join(letters)}")
        first += count
    say("A request of several letters is split, and its partial results are merged; no length was read on the host.")


def _made_up_tensors() -> list[TensorView]:
    pages = sum(-(-length // PAGE_SIZE) for length in LENGTHS)
    shapes = _shapes(pages)
    return [TensorView.contiguous(0x7F0000000000 + (i << 32), dtype, shape) for i, (dtype, shape) in enumerate(shapes)]


def _shapes(pages: int) -> list[tuple[str, tuple[int, ...]]]:
    batch = len(LENGTHS)
    query = ("bfloat16", (batch, Q_HEADS, HEAD_DIM))
    cache = ("bfloat16", (pages, PAGE_SIZE, KV_HEADS, HEAD_DIM))
    return [query, cache, cache, ("int32", (batch, BOUND // PAGE_SIZE)), ("int32", (batch,)), query]


def _launch(runtime: Runtime, device: DeviceFacts) -> None:
    driver = runtime.driver
    driver.set_current(driver.primary_context(0))
    host = _random_host()
    tensors = [_upload(driver, array, dtype) for array, (dtype, _) in zip(host, _shapes(host[1].shape[0]), strict=True)]
    plan = _plan(runtime, tensors, device)
    _show(plan, device)
    stream = driver.create_stream(blocking=True)
    workspace = plan.prepare(stream)
    plan.run(*tensors, workspace=workspace, stream=stream)
    driver.synchronize(stream)
    bits = np.empty(host[0].shape, dtype=np.uint16)
    driver.copy_to_host(bits, tensors[5].pointer)
    values = [bfloat16_values(part) for part in host[:3]]
    expected, _ = paged_decode_reference(*values, host[3], host[4], 1 / math.sqrt(HEAD_DIM))
    error = np.linalg.norm(bfloat16_values(bits) - expected) / np.linalg.norm(expected)
    say(f"Launched. The output differs from float64 on the host by {error:.1e} of its norm.")
    if not error < 6e-3:
        raise AssertionError(f"relative error {error:.1e}, expected below 6e-3")
    microseconds = _time(driver, plan, tensors, workspace, stream)
    say(f"The median of {REPEATS} launches is {microseconds:.1f} us, with warm caches.")


def _random_host() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    used = [-(-length // PAGE_SIZE) for length in LENGTHS]
    shapes = _shapes(sum(used))
    query, keys, values = (bfloat16_bits(rng.standard_normal(shape, dtype=np.float32)) for _, shape in shapes[:3])
    table = np.full(shapes[3][1], -1, dtype=np.int32)
    pages = iter(rng.permutation(sum(used)))
    for request, count in enumerate(used):
        table[request, :count] = [next(pages) for _ in range(count)]
    poison = np.full(shapes[5][1], 0x7FC0, dtype=np.uint16)
    return [query, keys, values, table, np.asarray(LENGTHS, dtype=np.int32), poison]


def _upload(driver: Driver, array: np.ndarray[Any, Any], dtype: str) -> TensorView:
    address = driver.allocate(array.nbytes)
    driver.copy_to_device(address, array)
    return TensorView.contiguous(address, dtype, array.shape)


def _time(driver: Driver, plan: PagedDecodePlan, tensors: Sequence[TensorView], workspace: Any, stream: int) -> float:
    start, end = driver.create_event(), driver.create_event()
    times = []
    for _ in range(REPEATS):
        driver.record(start, stream)
        plan.run(*tensors, workspace=workspace, stream=stream)
        driver.record(end, stream)
        driver.synchronize_event(end)
        times.append(driver.elapsed_ms(start, end) * 1e3)
    return statistics.median(times)
