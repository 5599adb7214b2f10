"""``explain --backend hopper``: which of our decode kernels a call would launch, why, and what others would take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import typer

from ..errors import UsageError
from . import output

if TYPE_CHECKING:
    from ..config import Config
    from ..launch.driver import DeviceFacts
    from ..launch.hopper.costs import Costs, Estimate
    from ..launch.hopper.select import Candidate, DecodeSelection, Fit
    from ..launch.hopper.shape import DecodeShape

BACKENDS = ("auto", "hopper", "trtllm-gen")
# The KV type and the query types that go with it; the first is the default.
QUERY_DTYPES: Mapping[str, tuple[str, ...]] = {"bf16": ("bf16",), "fp16": ("fp16",), "e4m3": ("bf16", "fp16", "e4m3")}
OUT_DTYPES = ("bf16", "fp16", "e4m3")
DEFAULT_SM = 90
THEIR_SMS = (100, 103)
# Options of the verb, by the names of its parameters: of this backend alone, and of the other alone.
OURS = frozenset({"batch_invariant", "tokens", "gpu"})
THEIRS = frozenset(
    {"case", "cases", "out", "both", "head_dim_v", "top_k", "causal", "multi_ctas", "skip_softmax"}
    | {"workspace", "occupancy", "policy"}
)
CANDIDATE_COLUMNS = ("kernel", "row tiles", "CTAs", "DRAM us", "L2 us", "tiles us", "merging us", "predicted us")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags say; None where a flag was not given. ``window`` counts visible tokens, 0 for all."""

    operation: str
    sm: int | None
    multiprocessors: int | None
    gpu: str | None
    batch: int
    q_len: int
    tokens: int | None
    kv_len: int
    heads_q: int
    heads_kv: int
    head_dim: int
    page: int
    dtype_q: str | None
    dtype_kv: str
    dtype_out: str | None
    window: int
    batch_invariant: bool

    def shape(self) -> DecodeShape:
        """The problem that the kernel is chosen for.

        Raises:
            UsageError: a flag is outside what our decode takes.
        """
        from ..attention.decode_checks import MAX_GROUP, PAGE_SIZES
        from ..launch.hopper.shape import DecodeShape

        if self.operation != "decode":
            raise UsageError(f"--op {self.operation!r}: the hopper backend has decode")
        for flag, value, most in self._counts():
            if not 1 <= value <= most:
                raise UsageError(f"{flag} {value}: expected 1 to {most}")
        if self.heads_q % self.heads_kv:
            raise UsageError(f"--heads-q {self.heads_q}: expected a multiple of --heads-kv {self.heads_kv}")
        if self.heads_q > MAX_GROUP * self.heads_kv:
            raise UsageError(f"--heads-q {self.heads_q}: expected at most {MAX_GROUP} for each of --heads-kv")
        if self.page not in PAGE_SIZES:
            raise UsageError(f"--page {self.page}: expected one of {', '.join(map(str, PAGE_SIZES))}")
        if self.window < 0:
            raise UsageError(f"--window {self.window}: expected at least 0")
        if self.tokens is not None and not 0 <= self.tokens <= self.batch * self.q_len:
            raise UsageError(f"--tokens {self.tokens}: expected 0 to batch x q_len, {self.batch * self.q_len}")
        self._check_dtypes()
        return DecodeShape(
            dtype=self.dtype_kv,
            head_dim=self.head_dim,
            group=self.heads_q // self.heads_kv,
            kv_heads=self.heads_kv,
            batch=self.batch,
            q_len=self.q_len,
            tokens=self.batch * self.q_len if self.tokens is None else self.tokens,
            ragged=self.tokens is not None,
            max_seq_len=self.kv_len,
            window_left=self.window - 1,
            batch_invariant=self.batch_invariant,
        )

    def _counts(self) -> tuple[tuple[str, int, int], ...]:
        from ..attention.decode_checks import MAX_Q_LEN

        most = (1 << 31) - 1
        return (
            ("--batch", self.batch, most),
            ("--q-len", self.q_len, MAX_Q_LEN),
            ("--kv-len", self.kv_len, most),
            ("--heads-q", self.heads_q, most),
            ("--heads-kv", self.heads_kv, most),
            ("--head-dim", self.head_dim, most),
        )

    def _check_dtypes(self) -> None:
        q_types = QUERY_DTYPES.get(self.dtype_kv)
        if q_types is None:
            raise UsageError(f"--dtype-kv {self.dtype_kv!r}: expected one of {', '.join(QUERY_DTYPES)}")
        if (self.dtype_q or q_types[0]) not in q_types:
            raise UsageError(
                f"--dtype-q {self.dtype_q!r}: expected {' or '.join(q_types)} with --dtype-kv {self.dtype_kv}"
            )
        if (self.dtype_out or q_types[0]) not in OUT_DTYPES:
            raise UsageError(f"--dtype-out {self.dtype_out!r}: expected one of {', '.join(OUT_DTYPES)}")


def takes(context: typer.Context, backend: str, sm: int | None) -> bool:
    """Whether the hopper backend explains this call: by its name, or where it is what ``auto`` takes.

    Raises:
        UsageError: the backend is unknown, or an option of the other one was given.
        BackendError: ``auto`` takes none on this GPU.
    """
    from ..attention.backends import AUTO, HOPPER, resolve_backend
    from ..launch.hopper.described import describe_device

    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    given = {name for name in context.params if _is_given(context, name)}
    ours = backend == HOPPER
    if backend == AUTO and sm is not None and not given & {"case", "cases"}:
        ours = sm not in THEIR_SMS and resolve_backend("paged_decode", AUTO, describe_device(sm)) == HOPPER
    for name in sorted(given & (THEIRS if ours else OURS)):
        words, other = ("hopper", "trtllm-gen") if ours else ("trtllm-gen", "hopper")
        raise UsageError(f"{_flag(context, name)}: not an option of --backend {words}, only of {other}")
    return ours


def explain(config: Config, release: str | None, asked: Asked, json: bool) -> None:
    """Print the choice for ``asked`` among the kernels of a release of ours."""
    from ..attention.runtime import OWN_RELEASE, Runtime
    from ..launch.hopper.costs import costs_of
    from ..launch.hopper.described import describe_device
    from ..launch.hopper.select import select_decode

    shape = asked.shape()
    device = describe_device(DEFAULT_SM if asked.sm is None else asked.sm, asked.multiprocessors, asked.gpu)
    costs = costs_of(device.name)
    kernels = Runtime(config, release=release or OWN_RELEASE).own_release().kernels
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
    yield "rows", f"{min(shape.rows, selection.most_rows)} in {fit.grid.row_tiles} x {kernel.traits['rows']}"
    yield "splits", selection.splits or "0: the grid cuts the line of all tiles"
    yield "predicted", f"{selection.microseconds:.1f} us: {_sum(fit.estimate)}"


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
    from ..launch.hopper.costs import stated

    return {
        "backend": "hopper",
        "launches": [_launch_record(selection, device) for selection in selections],
        "microseconds": sum(selection.microseconds for selection in selections),
        "shape": {f.name: getattr(shape, f.name) for f in fields(shape)},
        "device": {f.name: getattr(device, f.name) for f in fields(device)},
        "costs": {"gpu": costs.gpu, **stated(costs)},
    }


def _launch_record(selection: DecodeSelection, device: DeviceFacts) -> dict[str, Any]:
    kernel = selection.kernel
    return {
        "kernel": kernel.name,
        "symbol": kernel.symbol,
        "file": kernel.file,
        "status": kernel.status,
        "least_rows": selection.least_rows,
        "most_rows": selection.most_rows,
        "grid": [selection.ctas, 1, 1],
        "block": [kernel.threads, 1, 1],
        "smem": kernel.dynamic_shared_bytes,
        "heads_together": selection.heads_together,
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


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(context: typer.Context, name: str) -> str:
    option = next(parameter for parameter in context.command.params if parameter.name == name)
    return "CASE.json" if name == "case" else option.opts[0]
