"""A paged decode planned once for shapes, strides and options, and run many times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..kernels.native.decode.plan import (
    CacheView,
    DecodeProblem,
    decode_launches,
    decode_plan,
)
from ..kernels.native.decode.select import DecodeSelection
from ..launch.launcher import LaunchPlan
from ..launch.semaphore_workspace import SemaphoreWorkspace
from ..launch.workspace import Workspace
from .decode_tensors import DecodeTensors, decode_tensors, split_scale
from .launched_plan import LaunchedPlan
from .runtime import Runtime
from .views import TensorView


class PagedDecodePlan(LaunchedPlan[DecodeSelection, DecodeProblem]):
    """A paged decode; made by ``plan_paged_decode``. One launch, but for some ragged ``batch_invariant`` decodes."""

    def __init__(
        self,
        runtime: Runtime,
        tensors: DecodeTensors,
        kv_layout: str,
        selections: Sequence[DecodeSelection],
        problem: DecodeProblem,
        of_torch: bool = False,
    ) -> None:
        self.kv_layout = kv_layout
        self.launches = decode_launches(selections, problem)
        super().__init__(runtime, tensors, selections, problem, [launch.regions for launch in self.launches], of_torch)

    def launch_plans(self, k_address: int | None = None, v_address: int | None = None) -> tuple[LaunchPlan, ...]:
        """The launches as values: kernel, grid, attributes, every parameter. Needs no GPU.

        The caches are those that the plan was made with, at other addresses where given.
        """
        planned = self._tensors
        k = _cache(planned.k, k_address or planned.k.pointer)
        v = _cache(planned.v, v_address or planned.v.pointer)
        return tuple(
            decode_plan(launch.selection, *file, self.problem, k, v)
            for launch, file in zip(self.launches, self._files, strict=True)
        )

    def run(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        page_table: Any,
        seq_lens: Any,
        out: Any,
        lse: Any = None,
        *,
        q_cu_seq_lens: Any = None,
        mask: Any = None,
        sinks: Any = None,
        softmax_scale: Any = None,
        output_scale: Any = None,
        workspace: Workspace | SemaphoreWorkspace,
        stream: Any = None,
        max_seq_len: int | None = None,
    ) -> None:
        """Run on tensors of the shapes, strides and dtypes that the plan was made for; see ``paged_decode``.

        A tensor that the plan was made without must be left out, and the reverse. Options that are no tensors
        (window, layout, bound of the query tokens, ``batch_invariant``) are the plan's.

        Args:
            softmax_scale: of this step: a number, or None for the plan's number; a plan made with a tensor takes a
                tensor. ``output_scale`` likewise.
            workspace: from ``prepare(stream)``, or the caller's own of ``workspace_bytes``. One that other plans
                use as well must be reset in between, unless it is a ``SemaphoreWorkspace``.
            stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current
                stream of the tensors' device for a plan made with torch tensors, else the legacy default stream.
            max_seq_len: bound on the lengths of this step; None: the plan's. It never exceeds the plan's.

        Raises:
            UsageError: a tensor differs from what was planned, or a number is outside its domain.
            WorkspaceError: the workspace is too small or belongs to another stream.
            DeviceError: the kernel cannot be loaded or launched.
        """
        softmax_number, softmax_tensor = split_scale(softmax_scale, "softmax_scale")
        output_number, output_tensor = split_scale(output_scale, "output_scale")
        optional = (lse, q_cu_seq_lens, mask, sinks, softmax_tensor, output_tensor)
        given = (q, k_cache, v_cache, page_table, seq_lens, out, *optional)
        self._run(given, softmax_number, output_number, workspace, stream, max_seq_len)

    def _tensors_of(self, given: tuple[Any, ...]) -> DecodeTensors:
        return decode_tensors(given, self.kv_layout)

    def _misaligned(self, addresses: tuple[int, ...]) -> bool:
        q, _, _, page_table, seq_lens, out, lse, cu, mask, sinks, softmax_scale, output_scale = addresses
        together = q | page_table | seq_lens | lse | cu | mask | sinks | softmax_scale | output_scale
        return bool(together & 3 or out & 7)


def _cache(view: TensorView, pointer: int) -> CacheView:
    # A dimension of size 1 may carry any stride; the descriptor wants a valid one.
    strides = [s if size > 1 else view.shape[3] for size, s in zip(view.shape[:3], view.strides, strict=False)]
    return CacheView(pointer, strides[0], strides[1], strides[2])
