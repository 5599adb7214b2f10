"""A paged decode planned once for shapes, strides and options, and run many times."""

from __future__ import annotations

import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from ..errors import DeviceError, UsageError
from ..launch.hopper.decode import (
    LOG2_E,
    STEP_FIELDS,
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
from .decode_checks import TENSOR_NAMES, DecodeTensors, check_addresses, decode_tensors
from .runtime import Runtime
from .views import TensorView

_STATUS_WORDS = {
    1: "a length over max_seq_len",
    2: "a negative length",
    4: "a page id outside the pool",
}
_KEPT = 1024  # layers that share one plan, each with caches of its own


class ClampedInputError(DeviceError):
    """A kernel met a length or page id outside its bounds; it was clamped, so that run's output is not attention."""


class PagedDecodePlan:
    """A decode for one set of shapes, strides and options; made by ``plan_paged_decode``.

    It owns no scratch: every ``run`` takes a workspace that belongs to its stream (``prepare``). A run allocates
    nothing, waits for nothing and loads nothing, so it may be captured into a graph, whose replays follow lengths
    and page tables as they change on the device, up to ``max_seq_len``. Safe between threads.
    """

    def __init__(
        self,
        runtime: Runtime,
        tensors: DecodeTensors,
        kv_layout: str,
        selection: DecodeSelection,
        problem: DecodeProblem,
    ) -> None:
        own = runtime.own_release()
        kernel = selection.kernel
        self.kv_layout = kv_layout
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
        self._scratch: OrderedDict[tuple[int, int], tuple[int, ...]] = OrderedDict()
        self._forms: tuple[Any, ...] | None = None
        self._pool: WorkspacePool | None = None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that a run needs."""
        return workspace_size(self._regions)

    def launch_plan(self, k_address: int | None = None, v_address: int | None = None) -> LaunchPlan:
        """The launch as a value: kernel, grid, attributes, every parameter. Needs no GPU.

        The caches are those that the plan was made with, at other addresses where given.
        """
        planned = self._tensors
        k = _cache(planned.k, k_address or planned.k.pointer)
        v = _cache(planned.v, v_address or planned.v.pointer)
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
        return pool.take("decode", stream, self.workspace_bytes)

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
        given = (q, k_cache, v_cache, page_table, seq_lens, out, lse)
        addresses = _addresses_of(given, self._forms)
        if addresses is None:
            tensors = decode_tensors(*given, self.kv_layout)
            addresses = self._addresses_of_views(tensors)
            self._forms = _forms_of(given)
        self._step(addresses, workspace, stream_handle(stream), max_seq_len, softmax_scale)

    def run_views(
        self,
        tensors: DecodeTensors,
        workspace: Workspace,
        stream: int = 0,
        max_seq_len: int | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        """``run`` for callers that hold views and a stream handle already."""
        self._step(self._addresses_of_views(tensors), workspace, stream, max_seq_len, softmax_scale)

    def _addresses_of_views(self, tensors: DecodeTensors) -> tuple[int, ...]:
        if tensors.signature != self.signature:
            raise UsageError(_difference(tensors, self._tensors))
        return tuple(view.pointer if view else 0 for view in tensors.views)

    def _step(
        self,
        addresses: tuple[int, ...],
        workspace: Workspace,
        stream: int,
        max_seq_len: int | None,
        softmax_scale: float | None,
    ) -> None:
        bound = self.problem.max_seq_len if max_seq_len is None else max_seq_len
        if not 0 <= bound <= self.problem.max_seq_len:
            raise UsageError(f"max_seq_len={bound}: expected 0 to {self.problem.max_seq_len}, the plan's bound")
        scale = self.problem.softmax_scale if softmax_scale is None else softmax_scale
        if not math.isfinite(scale):
            raise UsageError(f"softmax_scale={scale}: expected a finite number")
        q, k, v, page_table, seq_lens, out, lse = addresses
        if (q | page_table | seq_lens | lse) % 4 or out % 8 or not (q and page_table and seq_lens and out):
            check_addresses(addresses)
        context = workspace.context
        step = self._prepared.get((context, k, v)) or self._prepare_caches(context, addresses, stream)
        scratch = self._scratch.get((workspace.address, workspace.nbytes)) or self._scratch_of(workspace)
        workspace.claim(stream)
        step(stream, q, out, lse, page_table, seq_lens, *scratch, bound, scale * LOG2_E)

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

    def _prepare_caches(self, context: int, addresses: tuple[int, ...], stream: int) -> Callable[..., None]:
        check_addresses(addresses)
        kernel = self._runtime.load(self.selection.kernel, context, stream)
        plan = self.launch_plan(addresses[1], addresses[2])
        launch = PreparedLaunch(plan, kernel, self._runtime.driver, self._runtime.descriptors)
        step = launch.stepper(*STEP_FIELDS)
        self._keep(self._prepared, (context, addresses[1], addresses[2]), step)
        return step

    def _scratch_of(self, workspace: Workspace) -> tuple[int, ...]:
        regions = workspace.regions(self._regions)
        scratch = tuple(regions[name] for name in WORKSPACE_POINTERS)
        self._keep(self._scratch, (workspace.address, workspace.nbytes), scratch)
        return scratch

    def _keep(self, cache: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
        with self._lock:
            cache[key] = value
            while len(cache) > _KEPT:
                cache.popitem(last=False)


def _cache(view: TensorView, pointer: int) -> CacheView:
    # A dimension of size 1 may carry any stride; the descriptor wants a valid one.
    strides = [s if size > 1 else view.shape[3] for size, s in zip(view.shape[:3], view.strides, strict=False)]
    return CacheView(pointer, strides[0], strides[1], strides[2])


def _forms_of(tensors: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What torch tensors are but for their addresses, kept as they came so that comparing them is cheap."""
    if not all(tensor is None or hasattr(tensor, "get_device") for tensor in tensors):
        return None
    return tuple(None if t is None else (type(t), t.dtype, t.shape, t.stride(), t.get_device()) for t in tensors)


def _addresses_of(tensors: tuple[Any, ...], forms: tuple[Any, ...] | None) -> tuple[int, ...] | None:
    """The addresses of torch tensors of known forms; None where anything differs."""
    if forms is None:
        return None
    addresses = []
    for tensor, form in zip(tensors, forms, strict=True):
        if tensor is None or form is None:
            if tensor is not form:
                return None
            addresses.append(0)
        elif (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()) != form:
            return None
        else:
            addresses.append(tensor.data_ptr())
    return tuple(addresses)


def _difference(came: DecodeTensors, planned: DecodeTensors) -> str:
    for name, a, b in zip(TENSOR_NAMES, came.views, planned.views, strict=True):
        a_key = a and (a.dtype, a.shape, a.strides, a.device)
        b_key = b and (b.dtype, b.shape, b.strides, b.device)
        if a_key != b_key:
            return f"{name}: dtype, shape, strides, device {a_key}, planned for {b_key}"
    raise AssertionError("equal signatures")
