"""The demo's decode: planned from metadata, shown field by field, launched where there is a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from demo_text import detail

from cubin_runtime import CubinRuntimeError
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins import Pin
from cubin_runtime.attention import PagedDecodePlan, Runtime, TensorView, plan_paged_decode
from cubin_runtime.attention.reference import bfloat16_bits, bfloat16_values, paged_decode_reference
from cubin_runtime.launch.driver import DeviceFacts, Driver
from cubin_runtime.launch.tensormap import TensorMapSpec

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 64, 8, 128, 64
LENGTHS = (2048, 1, 777, 64, 1500, 0, 1024, 2000)
MAX_SEQ_LEN = max(LENGTHS)
HOPPER = (9, 0)
TIMED_RUNS = 50
ERROR_LIMIT = 1e-2  # relative, of the norm: bf16 inputs and outputs, fp32 sums

# Planning needs facts of a device, not a device. These are an H200's.
H200 = DeviceFacts(
    ordinal=0,
    name="NVIDIA H200",
    capability=HOPPER,
    multiprocessors=132,
    shared_bytes_per_block_optin=227 << 10,
    shared_bytes_per_multiprocessor=228 << 10,
    l2_bytes=60 << 20,
    driver_version=13000,
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The decode's tensors on the host; bf16 as its 16 bits, the cache ``[pages, K or V, token, head, dim]``."""

    q: np.ndarray
    cache: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray


def make_inputs() -> Inputs:
    """Random values, pages in random order."""
    rng = np.random.default_rng(1)
    columns = -(-MAX_SEQ_LEN // PAGE_SIZE)
    pages = len(LENGTHS) * columns
    values = rng.standard_normal((pages, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM), dtype=np.float32)
    return Inputs(
        q=bfloat16_bits(rng.standard_normal((len(LENGTHS), Q_HEADS, HEAD_DIM), dtype=np.float32)),
        cache=bfloat16_bits(values),
        page_table=rng.permutation(pages).astype(np.int32).reshape(len(LENGTHS), columns),
        seq_lens=np.array(LENGTHS, dtype=np.int32),
    )


def views_at(inputs: Inputs, addresses: tuple[int, int, int, int, int]) -> tuple[TensorView, ...]:
    """q, K, V, page table, lengths and output as views of memory at ``addresses`` (K and V share one tensor)."""
    q, cache, table, lens, out = addresses
    shape = inputs.cache.shape
    strides = tuple(stride // inputs.cache.itemsize for stride in inputs.cache.strides)
    k, v = (
        TensorView(cache + half * inputs.cache.strides[1], "bfloat16", shape[:1] + shape[2:], strides[:1] + strides[2:])
        for half in (0, 1)
    )
    return (
        TensorView.contiguous(q, "bfloat16", inputs.q.shape),
        k,
        v,
        TensorView.contiguous(table, "int32", inputs.page_table.shape),
        TensorView.contiguous(lens, "int32", inputs.seq_lens.shape),
        TensorView.contiguous(out, "bfloat16", inputs.q.shape),
    )


def plan_and_launch(library: Library, pin: Pin) -> None:
    """Plan a decode with the kernels of ``pin``, print the plan, and launch it if a Hopper GPU is there."""
    runtime = Runtime(library.config, release=pin.name)
    inputs = make_inputs()
    detail(f"{len(LENGTHS)} requests of up to {MAX_SEQ_LEN} tokens, {Q_HEADS} query heads, {KV_HEADS} KV heads,")
    detail(f"head_dim {HEAD_DIM}, pages of {PAGE_SIZE} tokens, bf16")
    lacking = _why_no_launch(runtime.driver)
    if lacking:
        placed = views_at(inputs, (0x10_0000, 0x1000_0000, 0x20_0000, 0x30_0000, 0x40_0000))
        show(plan_paged_decode(*placed, max_seq_len=MAX_SEQ_LEN, runtime=runtime, device_facts=H200))
        detail(f"Launching needs a Hopper GPU, and {lacking}.")
        detail("All up to the driver call was done, for the facts of an H200 and made-up addresses.")
        return
    with on_device(runtime.driver, inputs) as views:
        plan = plan_paged_decode(*views, max_seq_len=MAX_SEQ_LEN, runtime=runtime)
        show(plan)
        launch_and_compare(runtime.driver, plan, inputs, views)
    runtime.modules.close()


def show(plan: PagedDecodePlan) -> None:
    """Print which kernel and why, the launch, and the parameter struct field by field."""
    launch = plan.launch_plan()
    detail(f"kernel   {launch.kernel}, sha256 {launch.sha256}")
    detail(f"why      {launch.reason}")
    for name, word in plan.selection.candidates:
        detail(f"         {name}: {word}")
    detail(f"launch   grid {launch.grid}, block {launch.block}, {launch.shared_bytes} bytes of dynamic shared memory")
    detail(f"         {launch.attributes}; workspace {plan.workspace_bytes} bytes")
    detail(
        f"struct   {launch.layout.name}, {launch.layout.size} bytes, fingerprint {launch.layout.fingerprint[:16]}..."
    )
    for row in plan.describe():
        text = f"dims {row.value.dims}" if isinstance(row.value, TensorMapSpec) else row.text
        detail(f"  {row.offset:4}  {row.type:<12} {row.name:<20} {text:<24} {row.meaning}")
    for row in plan.describe():
        if isinstance(row.value, TensorMapSpec):
            detail(f"{row.name}    {row.value}")


def launch_and_compare(driver: Driver, plan: PagedDecodePlan, inputs: Inputs, views: tuple[TensorView, ...]) -> None:
    """Run the plan, hold the output against numpy in float64, and time it with events."""
    workspace = plan.prepare()
    plan.run(*views, workspace=workspace)
    plan.check(workspace)
    got = np.empty(inputs.q.shape, dtype=np.uint16)
    driver.copy_to_host(got, views[5].pointer)
    k, v = (bfloat16_values(inputs.cache[:, half]) for half in (0, 1))
    q = bfloat16_values(inputs.q)
    want, _ = paged_decode_reference(q, k, v, inputs.page_table, inputs.seq_lens, 1 / math.sqrt(HEAD_DIM))
    difference = bfloat16_values(got) - want
    error = float(np.linalg.norm(difference) / np.linalg.norm(want))
    detail(f"launched on {driver.device().name}: relative error {error:.1e} against float64,")
    detail(f"largest difference {np.abs(difference).max():.1e} where the largest value is {np.abs(want).max():.2f}")
    if not error <= ERROR_LIMIT:
        raise AssertionError(f"relative error {error:.1e}, expected at most {ERROR_LIMIT}")
    start, end = driver.create_event(), driver.create_event()
    driver.record(start, 0)
    for _ in range(TIMED_RUNS):
        plan.run(*views, workspace=workspace)
    driver.record(end, 0)
    driver.synchronize_event(end)
    detail(f"{driver.elapsed_ms(start, end) / TIMED_RUNS * 1e3:.1f} us a run, mean of {TIMED_RUNS} in a row")


@contextmanager
def on_device(driver: Driver, inputs: Inputs) -> Iterator[tuple[TensorView, ...]]:
    """The inputs in device memory taken through the driver, with room for the output."""
    driver.ensure_context(0)
    arrays = (inputs.q, inputs.cache, inputs.page_table, inputs.seq_lens)
    held = [driver.allocate(array.nbytes) for array in (*arrays, inputs.q)]
    try:
        for address, array in zip(held, arrays, strict=False):
            driver.copy_to_device(address, array)
        q, cache, table, lens, out = held
        yield views_at(inputs, (q, cache, table, lens, out))
    finally:
        for address in held:
            driver.free(address)


def _why_no_launch(driver: Driver) -> str:
    try:
        if driver.device_count() == 0:
            return "the driver sees no device"
        facts = driver.device(0)
    except CubinRuntimeError as error:
        return f"there is none here ({error})"
    if facts.capability != HOPPER:
        return f"this is an {facts.name} of compute capability {facts.capability[0]}.{facts.capability[1]}"
    return ""
