"""``explain --backend hopper`` of a paged decode: which kernel a call would launch, why, and what others would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import output
from .explaining_own import DEFAULT_HEADS_KV

if TYPE_CHECKING:
    from ..artifacts.tables.native_kernels import NativeKernel
    from ..kernels.native.cost_model import Costs, Estimate
    from ..kernels.native.decode.select import Candidate, DecodeSelection, Fit
    from ..kernels.native.decode.shape import DecodeShape
    from ..launch.driver import DeviceFacts
    from .explaining_own import Asked

CANDIDATE_COLUMNS = ("kernel", "row tiles", "CTAs", "DRAM us", "L2 us", "tiles us", "merging us", "predicted us")


def shape_of(asked: Asked) -> DecodeShape:
    """The problem that the kernel is chosen for.

    Raises:
        UsageError: a flag is outside what our paged decode takes.
    """
    from ..attention.decode_call import MAX_Q_LEN
    from ..attention.paged_cache import MAX_GROUP, PAGE_SIZES, Q_DTYPES
    from ..kernels.native.decode.shape import DecodeShape

    heads_kv = DEFAULT_HEADS_KV if asked.heads_kv is None else asked.heads_kv
    if asked.head_dim_v not in (None, asked.head_dim):
        raise UsageError(f"--head-dim-v {asked.head_dim_v}: expected {asked.head_dim} as --head-dim is")
    if not 1 <= heads_kv < 1 << 31:
        raise UsageError(f"--heads-kv {heads_kv}: expected 1 to {(1 << 31) - 1}")
    asked.check_sizes(MAX_Q_LEN, (1 << 31) - 1, PAGE_SIZES)
    if asked.heads_q % heads_kv:
        raise UsageError(f"--heads-q {asked.heads_q}: expected a multiple of --heads-kv {heads_kv}")
    if asked.heads_q > MAX_GROUP * heads_kv:
        raise UsageError(f"--heads-q {asked.heads_q}: expected at most {MAX_GROUP} for each of --heads-kv")
    if asked.window < 0:
        raise UsageError(f"--window {asked.window}: expected at least 0")
    return DecodeShape(
        dtype=asked.dtype_kv,
        q_dtype=asked.query_dtype(Q_DTYPES),
        head_dim=asked.head_dim,
        group=asked.heads_q // heads_kv,
        kv_heads=heads_kv,
        batch=asked.batch,
        q_len=asked.q_len,
        tokens=asked.batch * asked.q_len if asked.tokens is None else asked.tokens,
        ragged=asked.tokens is not None,
        max_seq_len=asked.kv_len,
        window_left=asked.window - 1,
        batch_invariant=asked.batch_invariant,
    )


def explain(kernels: Sequence[NativeKernel], shape: DecodeShape, device: DeviceFacts, json: bool) -> None:
    """Print the choice for ``shape`` among ``kernels``."""
    from ..kernels.native.cost_model import costs_of
    from ..kernels.native.decode.select import select_decode

    costs = costs_of(device.name)
    selections = select_decode(kernels, shape, device, costs)
    if json:
        output.emit_json("explain", _record(selections, shape, device, costs))
        return
    output.facts(_facts(selections, device, costs))
    for selection in selections:
        output.line()
        output.facts(_launch_facts(selection, shape))
        output.line()
        output.table((*CANDIDATE_COLUMNS, "why not"), map(_cells, _of_device(selection, device)))


def _facts(selections: Sequence[DecodeSelection], device: DeviceFacts, costs: Costs) -> Iterator[tuple[str, object]]:
    yield "device", f"{device.name}, {device.multiprocessors} multiprocessors, costs of {costs.gpu}"
    yield "launches", len(selections)
    yield "predicted", f"{sum(selection.microseconds for selection in selections):.1f} us"
    elsewhere = [c for c in selections[0].candidates if not _runs_on(c, device)]
    if elsewhere:
        targets = sorted({str(c.kernel.architecture) for c in elsewhere})
        yield "elsewhere", f"{len(elsewhere)} decode kernels built for {', '.join(targets)}"


def _launch_facts(selection: DecodeSelection, shape: DecodeShape) -> Iterator[tuple[str, object]]:
    kernel = selection.kernel
    fit = _fit_of(selection)
    yield "kernel", kernel.name
    yield "why", selection.reason
    yield (
        "grid",
        f"{selection.ctas} CTAs of {kernel.threads} threads, {kernel.dynamic_shared_bytes} bytes shared memory",
    )
    yield "rows", f"{min(shape.rows, selection.max_rows)} in {fit.grid.row_tiles} x {kernel.traits['rows']}"
    yield "splits", selection.splits or f"0: {_cut(selection)}"
    yield "predicted", f"{selection.microseconds:.1f} us: {_sum(fit.estimate)}"


def _cut(selection: DecodeSelection) -> str:
    if selection.cluster_size > 1:
        return f"clusters of {selection.cluster_size} CTAs cut a pair each"
    return "each CTA has a pair" if selection.cluster_size else "the grid cuts the line of all tiles"


def _sum(time: Estimate) -> str:
    return (
        f"{time.fixed_us:.1f} to the first byte + the most of {time.dram_us:.1f} DRAM, {time.l2_us:.1f} L2, "
        f"{time.tiles_us:.1f} a CTA's tiles + {time.merge_us:.1f} merging"
    )


def _fit_of(selection: DecodeSelection) -> Fit:
    return next(c.fit for c in selection.candidates if c.fit and c.kernel == selection.kernel)


def _runs_on(candidate: Candidate, device: DeviceFacts) -> bool:
    major, minor = device.capability
    return candidate.kernel.architecture.runs_on(10 * major + minor)


def _of_device(selection: DecodeSelection, device: DeviceFacts) -> list[Candidate]:
    """Those that run on the device: the chosen, then others that fit by time, then those that do not fit."""
    here = [c for c in selection.candidates if _runs_on(c, device)]
    return sorted(
        here,
        key=lambda c: (c.fit is None, c.fit.estimate.microseconds if c.fit else 0.0, c.kernel != selection.kernel),
    )


def _cells(candidate: Candidate) -> tuple[object, ...]:
    if candidate.fit is None:
        return (candidate.kernel.name, *[""] * (len(CANDIDATE_COLUMNS) - 1), candidate.unfit)
    grid, time = candidate.fit.grid, candidate.fit.estimate
    terms = (time.dram_us, time.l2_us, time.tiles_us, time.merge_us, time.microseconds)
    rows = f"{grid.row_tiles} x {candidate.kernel.traits['rows']}"
    return (candidate.kernel.name, rows, grid.ctas, *(f"{term:.1f}" for term in terms), "")


def _record(
    selections: Sequence[DecodeSelection], shape: DecodeShape, device: DeviceFacts, costs: Costs
) -> dict[str, Any]:
    from ..kernels.native.cost_model import stated

    return {
        "backend": "hopper",
        "operator": "paged_decode",
        "launches": [_launch_record(selection, shape, device) for selection in selections],
        "microseconds": sum(selection.microseconds for selection in selections),
        "shape": {f.name: getattr(shape, f.name) for f in fields(shape)},
        "device": {f.name: getattr(device, f.name) for f in fields(device)},
        "costs": {"gpu": costs.gpu, **stated(costs)},
    }


def _launch_record(selection: DecodeSelection, shape: DecodeShape, device: DeviceFacts) -> dict[str, Any]:
    from ..kernels.native.decode.plan import launch_grid

    kernel = selection.kernel
    return {
        "kernel": kernel.name,
        "symbol": kernel.symbol,
        "file": kernel.file,
        "status": kernel.status,
        "least_rows": selection.min_rows,
        "most_rows": selection.max_rows,
        "grid": list(launch_grid(selection, shape.batch, shape.kv_heads)),
        "block": [kernel.threads, 1, 1],
        "smem": kernel.dynamic_shared_bytes,
        "heads_together": selection.cta_group_size,
        "cluster_parts": selection.cluster_size,
        "row_tiles": selection.row_tiles,
        "splits": selection.splits,
        "microseconds": selection.microseconds,
        "reason": selection.reason,
        "candidates": [_candidate_record(c) for c in _of_device(selection, device)],
    }


def _candidate_record(candidate: Candidate) -> dict[str, Any]:
    told: dict[str, Any] = {"kernel": candidate.kernel.name, "traits": dict(candidate.kernel.traits)}
    if candidate.fit is None:
        return told | {"fits": False, "why_not": candidate.unfit}
    grid, time = candidate.fit.grid, candidate.fit.estimate
    terms = {f.name: getattr(time, f.name) for f in fields(time)}
    return told | {
        "fits": True,
        "grid": {f.name: getattr(grid, f.name) for f in fields(grid)},
        "microseconds": time.microseconds,
        "terms": terms,
        "limit": time.limit,
    }
