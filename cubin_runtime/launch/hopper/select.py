"""Which of our decode kernels fits a problem on a device, and the grid it gets: a pure choice from metadata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...artifacts.own_kernels import MEASURED, OwnKernel
from ...errors import UsageError
from ..driver import DeviceFacts

OPERATION = "paged_decode"
# Shared memory that the driver keeps for itself in each resident block (CUDA programming guide).
_RESERVED_SHARED_BYTES = 1024
# The numbers below were measured on an H200 (benchmarks/results/grid_choice.json).
# KV heads that CTAs next to each other read side by side: up to this many, if at most 1 CTA in 32 idles.
_HEADS_TOGETHER = 8
_IDLE_SHARE = 32
# Below this many tiles a multiprocessor, one CTA with all the loads in flight beats two.
_TILES_FOR_FULL_RESIDENCY = 200


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What decides the kernel and the grid: ``dtype`` of the KV cache (``bf16``), counts, bounds and options."""

    dtype: str
    head_dim: int
    group: int
    kv_heads: int
    batch: int
    max_seq_len: int
    q_len: int = 1
    tokens: int = 0
    ragged: bool = False
    window_left: int = -1
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class DecodeSelection:
    """The kernel chosen, its CTAs, the KV heads they read side by side, why, and a word on each kernel looked at."""

    kernel: OwnKernel
    ctas: int
    heads_together: int
    row_tiles: int
    splits: int
    microseconds: float
    reason: str
    candidates: tuple[tuple[str, str], ...]


def select_decode(kernels: Iterable[OwnKernel], shape: DecodeShape, device: DeviceFacts) -> DecodeSelection:
    """The kernel with the least padding of the query group; of equals, the one closest to the device.

    Raises:
        UsageError: no kernel fits; the message says what those for this device can do.
    """
    number = device.capability[0] * 10 + device.capability[1]
    looked_at: list[tuple[str, str]] = []
    fitting: list[OwnKernel] = []
    for kernel in kernels:
        if kernel.operation != OPERATION:
            continue
        verdict = _unfit(kernel, shape, number)
        looked_at.append((kernel.name, verdict or f"fits, pads {shape.group} rows to {kernel.traits['rows']}"))
        if not verdict:
            fitting.append(kernel)
    if not fitting:
        raise UsageError(
            f"no decode kernel for {shape.dtype}, head_dim {shape.head_dim}, {shape.group} query heads a KV head "
            f"on compute capability {device.capability[0]}.{device.capability[1]}: "
            + ("; ".join(f"{name}: {word}" for name, word in looked_at) or "the release has no decode kernel")
        )
    best = min(
        fitting,
        key=lambda k: (
            -(-shape.q_len * shape.group // _trait(k, "rows")),
            _trait(k, "rows"),
            -k.architecture.number,
            k.architecture.suffix != "a",
        ),
    )
    row_tiles = -(-shape.q_len * shape.group // _trait(best, "rows"))
    splits = -(-128 // shape.kv_heads) if shape.batch_invariant else 0
    tiles = shape.batch * shape.kv_heads * row_tiles * max(1, -(-shape.max_seq_len // _trait(best, "tile_tokens")))
    resident = _resident(best, device)
    if tiles < _TILES_FOR_FULL_RESIDENCY * device.multiprocessors:
        resident = 1
    ctas = min(resident * device.multiprocessors, tiles)
    together = max(
        d for d in range(1, _HEADS_TOGETHER + 1) if shape.kv_heads % d == 0 and ctas % d * _IDLE_SHARE <= ctas
    )
    ctas -= ctas % together
    status = "" if best.status == MEASURED else f", {best.status}"
    reason = (
        f"built for {best.architecture}{status}; {shape.group} query heads a KV head in {best.traits['rows']} rows; "
        f"at most {tiles} tiles of {best.traits['tile_tokens']} tokens over {ctas} CTAs "
        f"({resident} on each of {device.multiprocessors} multiprocessors), {together} KV heads side by side"
    )
    return DecodeSelection(best, ctas, together, row_tiles, splits, 0.0, reason, tuple(looked_at))


def _unfit(kernel: OwnKernel, shape: DecodeShape, number: int) -> str:
    if not kernel.architecture.runs_on(number):
        return f"built for {kernel.architecture}"
    for name, wanted in (("dtype", shape.dtype), ("head_dim", shape.head_dim)):
        if kernel.traits[name] != wanted:
            return f"{name} is {kernel.traits[name]}"
    return ""


def _resident(kernel: OwnKernel, device: DeviceFacts) -> int:
    by_shared = device.shared_bytes_per_multiprocessor // (kernel.dynamic_shared_bytes + _RESERVED_SHARED_BYTES)
    return max(1, min(by_shared, _trait(kernel, "ctas_per_multiprocessor")))


def _trait(kernel: OwnKernel, name: str) -> int:
    return int(kernel.traits[name])
