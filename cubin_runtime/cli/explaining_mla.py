"""``explain --backend hopper`` of an MLA decode: which kernel a call would launch, on which grid, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import output
from .explaining_own import LATENTS

if TYPE_CHECKING:
    from ..artifacts.tables.native_kernels import NativeKernel
    from ..kernels.native.mla.select import MlaSelection, MlaShape
    from ..launch.driver import DeviceFacts
    from .explaining_own import Asked


def shape_of(asked: Asked) -> MlaShape:
    """The problem that the kernel is chosen for.

    Raises:
        UsageError: a flag is outside what our MLA decode takes.
    """
    from ..attention.latent_cache import Q_DTYPES
    from ..kernels.native.mla.select import (
        MAX_HEADS,
        MAX_QUERIES,
        PAGE_SIZES,
        MlaShape,
    )

    latent = LATENTS[asked.head_dim]
    asked.check_sizes(MAX_QUERIES, MAX_HEADS, PAGE_SIZES)
    for flag, value, only in (("--head-dim-v", asked.head_dim_v, latent), ("--heads-kv", asked.heads_kv, 1)):
        if value not in (None, only):
            raise UsageError(f"{flag} {value}: expected {only} with --head-dim {asked.head_dim}, which is MLA")
    if asked.window:
        raise UsageError(f"--window {asked.window}: MLA decode sees all keys, expected 0")
    return MlaShape(
        dtype=asked.dtype_kv,
        q_dtype=asked.query_dtype(Q_DTYPES),
        latent=latent,
        rope=asked.head_dim - latent,
        heads=asked.heads_q,
        batch=asked.batch,
        q_len=asked.q_len,
        ragged=asked.tokens is not None,
        max_seq_len=asked.kv_len,
        batch_invariant=asked.batch_invariant,
    )


def explain(kernels: Sequence[NativeKernel], shape: MlaShape, device: DeviceFacts, json: bool) -> None:
    """Print the choice for ``shape`` among ``kernels``."""
    from ..kernels.native.mla.select import select_mla_decode

    selection = select_mla_decode(kernels, shape, device)
    if json:
        output.emit_json("explain", _record(selection, shape, device))
        return
    output.facts(_facts(selection, shape, device))
    output.line()
    output.table(("kernel", "word on it"), selection.candidates)


def _facts(selection: MlaSelection, shape: MlaShape, device: DeviceFacts) -> Iterator[tuple[str, object]]:
    kernel = selection.kernel
    yield "device", f"{device.name}, {device.multiprocessors} multiprocessors"
    yield "kernel", kernel.name
    yield "why", selection.reason
    block = f"{kernel.threads} threads, {kernel.dynamic_shared_bytes} bytes shared memory"
    yield "grid", f"{selection.ctas} CTAs of {block}"
    yield "teams", f"{_teams(selection)} of {selection.cta_group_size}, each on that many row tiles of a request"
    yield "rows", f"{shape.rows} in {selection.row_tiles} x {kernel.traits['rows']}"
    yield "splits", selection.splits or "0: the grid cuts the line of all tiles"


def _teams(selection: MlaSelection) -> int:
    return selection.ctas // selection.cta_group_size


def _record(selection: MlaSelection, shape: MlaShape, device: DeviceFacts) -> dict[str, Any]:
    kernel = selection.kernel
    launch = {
        "kernel": kernel.name,
        "symbol": kernel.symbol,
        "file": kernel.file,
        "status": kernel.status,
        "grid": [selection.ctas, 1, 1],
        "block": [kernel.threads, 1, 1],
        "smem": kernel.dynamic_shared_bytes,
        "teams": _teams(selection),
        "tiles_together": selection.cta_group_size,
        "row_tiles": selection.row_tiles,
        "splits": selection.splits,
        "reason": selection.reason,
        "candidates": [{"kernel": name, "word": word} for name, word in selection.candidates],
    }
    return {
        "backend": "hopper",
        "operator": "mla_decode",
        "launches": [launch],
        "shape": {f.name: getattr(shape, f.name) for f in fields(shape)},
        "device": {f.name: getattr(device, f.name) for f in fields(device)},
    }
