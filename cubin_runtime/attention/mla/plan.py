"""An MLA decode planned once for shapes, strides and options, and run many times."""

from __future__ import annotations

from typing import Any

from ...kernels.native.mla.plan import (
    LatentCacheView,
    MlaProblem,
    mla_plan,
    mla_regions,
)
from ...kernels.native.mla.select import MlaSelection
from ...launch.plan import LaunchPlan
from ...launch.semaphore_workspace import SemaphoreWorkspace
from ...launch.workspace import Workspace
from ..decode_tensors import split_scale
from ..launched_plan import LaunchedPlan
from ..runtime import Runtime
from .tensors import MlaTensors, mla_tensors


class MlaDecodePlan(LaunchedPlan[MlaSelection, MlaProblem]):
    """An MLA decode for one set of shapes, strides and options; made by ``plan_mla_decode``."""

    def __init__(
        self,
        runtime: Runtime,
        tensors: MlaTensors,
        selection: MlaSelection,
        problem: MlaProblem,
        of_torch: bool = False,
    ) -> None:
        super().__init__(runtime, tensors, [selection], problem, [mla_regions(selection, problem)], of_torch)

    @property
    def selection(self) -> MlaSelection:
        """What was chosen for the launch, and why."""
        return self.selections[0]

    def launch_plans(self, k_address: int | None = None, v_address: int | None = None) -> tuple[LaunchPlan, ...]:
        """The one launch as a value: kernel, grid, attributes, every parameter. Needs no GPU.

        The cache is that which the plan was made with, at ``k_address`` where given (``v_address`` is the same).
        """
        rows = self._tensors.k
        pages, tokens = rows.shape[:2]
        # A dimension of size 1 may carry any stride; the descriptor wants a valid one.
        page_stride = rows.strides[0] if pages > 1 else tokens * rows.strides[1]
        cache = LatentCacheView(k_address or rows.pointer, page_stride, rows.strides[1])
        return (mla_plan(self.selection, *self._files[0], self.problem, cache),)

    def run(
        self,
        q: Any,
        kv_cache: Any,
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
        """Run on tensors of the shapes, strides and dtypes that the plan was made for; see ``mla_decode``.

        Arguments and errors otherwise as ``PagedDecodePlan.run``.
        """
        softmax_number, softmax_tensor = split_scale(softmax_scale, "softmax_scale")
        output_number, output_tensor = split_scale(output_scale, "output_scale")
        optional = (lse, q_cu_seq_lens, mask, sinks, softmax_tensor, output_tensor)
        given = (q, kv_cache, kv_cache, page_table, seq_lens, out, *optional)
        self._run(given, softmax_number, output_number, workspace, stream, max_seq_len)

    def _tensors_of(self, given: tuple[Any, ...]) -> MlaTensors:
        return mla_tensors(given)

    def _misaligned(self, addresses: tuple[int, ...]) -> bool:
        q, _, _, page_table, seq_lens, out, lse, cu, mask, sinks, softmax_scale, output_scale = addresses
        together = page_table | seq_lens | lse | cu | mask | sinks | softmax_scale | output_scale
        return bool(together & 3 or (q | out) & 15)
