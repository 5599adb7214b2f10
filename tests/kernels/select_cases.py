"""Shapes, kernels and devices that tests of the choice of a decode kernel share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.cost_model import Costs
from cubin_runtime.kernels.native.decode.candidates import DecodeCandidate, Fit
from cubin_runtime.kernels.native.decode.grids import DecodeShape
from cubin_runtime.kernels.native.decode.select import DecodeSelection, select_decode
from cubin_runtime.launch.driver import DeviceFacts
from tests.kernels.decode_kernels import HOPPER, PORTABLE
from tests.launch.examples import H100

SHAPE = DecodeShape("bf16", 128, group=8, kv_heads=8, batch=64, max_seq_len=8192)
ALL = (*PORTABLE, *HOPPER)
WARPGROUPS = "warpgroups of 64 rows"
H200_DEVICE = replace(H100, name="NVIDIA H200")

shapes = st.builds(
    DecodeShape,
    dtype=st.sampled_from(["bf16", "fp16", "e4m3"]),
    head_dim=st.sampled_from([32, 64, 128, 256, 512]),
    group=st.integers(1, 32),
    kv_heads=st.integers(1, 64),
    batch=st.integers(1, 300),
    q_len=st.integers(1, 16),
    tokens=st.integers(0, 300),
    ragged=st.booleans(),
    max_seq_len=st.integers(0, 1 << 20),
    window_left=st.integers(-1, 5000),
    batch_invariant=st.booleans(),
)


def one(
    kernels: Iterable[NativeKernel], shape: DecodeShape, on: DeviceFacts = H200_DEVICE, costs: Costs | None = None
) -> DecodeSelection:
    """The only launch."""
    (selection,) = select_decode(kernels, shape, on, costs)
    return selection


def chosen(**changes: Any) -> DecodeSelection:
    return one(ALL, replace(SHAPE, **changes))


def launches(**changes: Any) -> list[tuple[object, int, int]]:
    """Arithmetic and rows of each launch of a batch_invariant decode."""
    made = select_decode(ALL, replace(SHAPE, batch_invariant=True, **changes), H200_DEVICE)
    return [(launch.kernel.traits["arithmetic"], launch.min_rows, launch.max_rows) for launch in made]


def rows_of(selection: DecodeSelection) -> tuple[object, int]:
    return selection.kernel.traits["rows"], selection.row_tiles


def fit_of(selection: DecodeSelection) -> Fit:
    return next(c.fit for c in selection.candidates if c.fit and c.kernel == selection.kernel)


def words(selection: DecodeSelection) -> dict[str, str]:
    return {candidate.kernel.name: str(candidate) for candidate in selection.candidates}


def microseconds(candidate: DecodeCandidate) -> float:
    return candidate.fit.estimate.microseconds if candidate.fit else float("inf")
