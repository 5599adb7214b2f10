"""The launches behind the main one, on kernels of our own: a plan's reduction and LSE as parameters and geometry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...artifacts.path import ArtifactPath
from ...artifacts.tables.native_kernels import NativeKernel
from ...errors import UsageError
from ...launch.plan import LaunchAttributes, LaunchPlan
from ...launch.structs import StructLayout
from .fill import partial_address
from .plan import Planned
from .reduction import ReductionLaunch

REDUCTION = "kv_reduction"
LSE = "lse_from_statistics"
# Probabilities in e4m3 are scaled by the largest e4m3 number; the main kernels leave that factor in the sums.
FP8_SUM_SCALE = 448.0


@dataclass(frozen=True, slots=True)
class AfterMain:
    """One launch behind the main one: what it does, on what grid, with which parameters.

    ``operation`` and ``traits`` name the kernel; ``values`` are all fields of its struct, null pointers 0.
    """

    operation: str
    traits: Mapping[str, str]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    values: Mapping[str, object]
    pdl: bool


def launches_after(planned: Planned) -> tuple[AfterMain, ...]:
    """The reduction, then the LSE, as far as the plan has them."""
    found = []
    if planned.reduction is not None:
        found.append(_reduction(planned, planned.reduction))
    lse = planned.lse
    if lse is not None:
        values = {
            "statistics": lse.stats,
            "lse": lse.lse,
            "token_stride": lse.strides[0],
            "head_stride": lse.strides[1],
            "rows": lse.rows,
            "heads_q": lse.heads_q,
        }
        found.append(AfterMain(LSE, {}, lse.grid, lse.block, values, lse.pdl))
    return tuple(found)


def _reduction(planned: Planned, launch: ReductionLaunch) -> AfterMain:
    problem, geometry = planned.problem, planned.selection.geometry
    at = problem.pointers
    values: dict[str, object] = {
        "out": at.out,
        "partial_out": partial_address(problem, planned.meta),
        "partial_statistics": at.scratch,
        "softmax_statistics": at.softmax_stats,
        "seq_lens": at.seq_lens,
        "cum_seq_lens_q": at.cum_seq_lens_q,
        "top_k_lens": at.top_k_lens if launch.variable_top_k else 0,
        "sinks": at.sinks,
        "device_softmax_scale_log2": at.softmax_scale_log2,
        "max_q": problem.max_q,
        "ctas_q": geometry.ctas_q,
        "ctas_kv": geometry.ctas_kv,
        "ctas_per_tile": launch.ctas_per_tile,
        "value_ctas": launch.value_ctas,
        "heads_q": problem.heads_q,
        "heads_per_cta": geometry.heads_per_cta,
        "tokens_per_cta": planned.maps.tokens_per_cta,
        "tile_q": launch.tile_q,
        "tile_kv": planned.meta.tile_kv,
        "head_dim": launch.head_dim,
        "head_dim_v": launch.head_dim_v,
        "top_k": problem.top_k if launch.sparse else 0,
        "softmax_scale_log2": problem.softmax_scale_log2,
        "sum_scale": FP8_SUM_SCALE if launch.fp8_query else 1.0,
    }
    traits = {"dtype_partial": launch.dtype_partial, "dtype_out": launch.dtype_out}
    return AfterMain(REDUCTION, traits, launch.grid, launch.block, values, launch.pdl)


def choose_own(kernels: Iterable[NativeKernel], operation: str, traits: Mapping[str, str], sm: int) -> NativeKernel:
    """Our kernel for an operation that runs on compute capability ``sm`` (100, 103, 90).

    Raises:
        UsageError: the release has none.
    """
    fitting = [
        kernel
        for kernel in kernels
        if kernel.operation == operation
        and kernel.architecture.runs_on(sm)
        and all(kernel.traits.get(name) == wanted for name, wanted in traits.items())
    ]
    if not fitting:
        words = ", ".join(f"{name} {word}" for name, word in traits.items())
        raise UsageError(f"our release has no {operation} kernel{' for ' + words if words else ''} on SM {sm}")
    return max(fitting, key=lambda kernel: kernel.architecture.number)


def own_launch_plan(
    after: AfterMain, kernel: NativeKernel, path: ArtifactPath, sha256: str, layout: StructLayout
) -> LaunchPlan:
    """``after`` on ``kernel``, whose cubin lies at ``path``, as the launch layer takes it."""
    return LaunchPlan(
        kernel=kernel.name,
        symbol=kernel.symbol,
        path=path,
        sha256=sha256,
        layout=layout,
        grid=after.grid,
        block=after.block,
        shared_bytes=kernel.dynamic_shared_bytes,
        attributes=LaunchAttributes(programmatic_serialization=after.pdl),
        values=after.values,
        reason=f"{after.operation} behind a trtllm-gen kernel",
    )
