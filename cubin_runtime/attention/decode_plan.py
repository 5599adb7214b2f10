"""A paged decode planned once for shapes, strides and options, and run many times."""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..errors import DeviceError, UsageError
from ..launch.hopper.decode import (
    LOG2_E,
    STEP_FIELDS,
    TENSOR_POINTERS,
    WORKSPACE_POINTERS,
    CacheView,
    DecodeProblem,
    decode_plan,
    decode_regions,
)
from ..launch.hopper.select import DecodeSelection
from ..launch.launcher import LaunchPlan, PreparedLaunch
from ..launch.streams import stream_handle
from ..launch.structs import FieldRow
from ..launch.workspace import Workspace, WorkspacePool, workspace_size
from .decode_checks import DecodeTensors, decode_tensors
from .runtime import Runtime
from .views import TensorView

_STATUS_WORDS = {
    1: "a length over max_seq_len",
    2: "a negative length",
    4: "a page id outside the pool",
}
_CACHES_KEPT = 1024  # layers that share one plan, each with caches of its own


class ClampedInputError(DeviceError):
    """A kernel met a length or page id outside its bounds; it was clamped, so that run's output is not attention."""


class PagedDecodePlan:
    """A decode for one set of shapes, strides and options; made by ``plan_paged_decode``.

    It owns no scratch: every ``run`` takes a workspace that belongs to its stream (``prepare``). A run allocates
    nothing, waits for nothing and loads nothing, so it may be captured into a graph, whose replays follow lengths
    and page tables as they change on the device, up to ``max_seq_len``. Safe between threads.
    """

    def __init__(
        self, runtime: Runtime, tensors: DecodeTensors, selection: DecodeSelection, problem: DecodeProblem
    ) -> None:
        own = runtime.own_release()
        kernel = selection.kernel
        self.selection = selection
        self.problem = problem
        self.signature = tensors.signature
        self._runtime = runtime
        self._path = own.path_of(kernel)
        self._sha256 = runtime.digest_of(self._path)
        self._layout = own.layouts[kernel.struct]
        self._regions = decode_regions(selection.ctas, int(kernel.traits["rows"]), problem.head_dim)
        self._tensors = tensors
        self._device = tensors.q.device
        self._lock = threading.Lock()
        self._prepared: OrderedDict[tuple[int, int, int], Callable[..., None]] = OrderedDict()
        self._pool: WorkspacePool | None = None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that a run needs."""
        return workspace_size(self._regions)

    def launch_plan(self, tensors: DecodeTensors | None = None) -> LaunchPlan:
        """The launch as a value: kernel, grid, attributes, every parameter. Needs no GPU."""
        given = tensors or self._tensors
        k, v = _cache(given.k), _cache(given.v)
        return decode_plan(self.selection, self._path, self._sha256, self._layout, self.problem, k, v)

    def describe(self) -> tuple[FieldRow, ...]:
        """The parameter struct field by field; pointers that come with a step are null."""
        return self.launch_plan().describe()

    def preload(self) -> None:
        """Fetch, load and gate the kernel now, so that the first run does not."""
        context = self._runtime.driver.ensure_context(self._device)
        self._runtime.load(self.selection.kernel, context)

    def prepare(self, stream: Any = None) -> Workspace:
        """The workspace of this plan on ``stream``, made and cleared on first use, kept by the plan.

        Raises:
            WorkspaceError: ``stream`` is capturing and has none yet.
        """
        driver = self._runtime.driver
        context = driver.ensure_context(self._device)
        with self._lock:
            if self._pool is None:
                self._pool = WorkspacePool(driver, context)
            pool = self._pool
        return pool.take(self, stream, self.workspace_bytes)

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
        workspace: Workspace,
        stream: Any = None,
        kv_layout: str = "NHD",
        max_seq_len: int | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        """Run on tensors of the shapes, strides and dtypes that the plan was made for; see ``paged_decode``.

        Args:
            workspace: from ``prepare(stream)``, or the caller's own of ``workspace_bytes``.
            stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None (legacy default).
            max_seq_len: bound on the lengths of this step; None: the plan's. It never exceeds the plan's.
            softmax_scale: of this step; None: the plan's.

        Raises:
            UsageError: a tensor differs from what was planned.
            WorkspaceError: the workspace is too small or belongs to another stream.
            DeviceError: the kernel cannot be loaded or launched.
        """
        tensors = decode_tensors(q, k_cache, v_cache, page_table, seq_lens, out, lse, kv_layout)
        self.run_views(tensors, workspace, stream_handle(stream), max_seq_len, softmax_scale)

    def run_views(
        self,
        tensors: DecodeTensors,
        workspace: Workspace,
        stream: int = 0,
        max_seq_len: int | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        """``run`` for callers that hold views and a stream handle already."""
        if tensors.signature != self.signature:
            raise UsageError(_difference(tensors, self._tensors))
        bound = self.problem.max_seq_len if max_seq_len is None else max_seq_len
        if not 0 <= bound <= self.problem.max_seq_len:
            raise UsageError(f"max_seq_len={bound}: expected 0 to {self.problem.max_seq_len}, the plan's bound")
        scale = self.problem.softmax_scale if softmax_scale is None else softmax_scale
        context = self._runtime.driver.ensure_context(self._device)
        step = self._prepared.get((context, tensors.k.pointer, tensors.v.pointer))
        if step is None:
            step = self._prepare_caches(context, tensors, stream)
        scratch = workspace.regions(self._regions)
        workspace.claim(stream)
        step(
            stream,
            tensors.q.pointer,
            tensors.out.pointer,
            tensors.lse.pointer if tensors.lse else 0,
            tensors.page_table.pointer,
            tensors.seq_lens.pointer,
            *(scratch[name] for name in WORKSPACE_POINTERS),
            bound,
            scale * LOG2_E,
        )

    def check(self, workspace: Workspace, stream: Any = None) -> None:
        """Wait for ``stream``, which the workspace belongs to, then read and clear the workspace's status word.

        Raises:
            ClampedInputError: a run since the last check met a length or a page id outside its bounds.
        """
        driver, handle = self._runtime.driver, stream_handle(stream)
        with driver.using(workspace.context):
            driver.synchronize(handle)
            address = workspace.regions(self._regions)["status"]
            (status,) = struct.unpack("<I", driver.read(address, 4))
            if status:
                driver.fill_words(address, 0, 1, handle)
        met = [words for bit, words in _STATUS_WORDS.items() if status & bit]
        if met:
            raise ClampedInputError(f"decode by {self.selection.kernel.name} met {' and '.join(met)}")

    def _prepare_caches(self, context: int, tensors: DecodeTensors, stream: int) -> Callable[..., None]:
        kernel = self._runtime.load(self.selection.kernel, context, stream)
        plan = self.launch_plan(tensors)
        launch = PreparedLaunch(plan, kernel, self._runtime.driver, self._runtime.descriptors)
        step = launch.stepper(*STEP_FIELDS)
        with self._lock:
            self._prepared[(context, tensors.k.pointer, tensors.v.pointer)] = step
            while len(self._prepared) > _CACHES_KEPT:
                self._prepared.popitem(last=False)
        return step


def _cache(view: TensorView) -> CacheView:
    # A dimension of size 1 may carry any stride; the descriptor wants a valid one.
    strides = [s if size > 1 else view.shape[3] for size, s in zip(view.shape[:3], view.strides, strict=False)]
    return CacheView(view.pointer, strides[0], strides[1], strides[2])


def _difference(came: DecodeTensors, planned: DecodeTensors) -> str:
    for name in (*TENSOR_POINTERS, "k", "v"):
        a, b = getattr(came, name), getattr(planned, name)
        a_key = a and (a.dtype, a.shape, a.strides, a.device)
        b_key = b and (b.dtype, b.shape, b.strides, b.device)
        if a_key != b_key:
            return f"{name}: dtype, shape, strides, device {a_key}, planned for {b_key}"
    raise AssertionError("equal signatures")
