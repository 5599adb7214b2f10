"""Plans whose run is one step; with some arguments bound once, a step checks and writes only those that change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from ..errors import UsageError, WorkspaceError
from ..launch.workspace import AnyWorkspace, EagerClaim, Workspace, check_workspace
from .checks import graph_count
from .fast_path.guards import KnownForms, guarded
from .fast_path.notes import note_launch
from .fast_path.operator_function import Binding, new_paths, suspendable
from .fast_path.path import BoundPlace, Path
from .fast_path.table import Address, CallTable, Constant, TensorRow
from .former_names import renamed_options
from .operator_plan import OperatorPlan

if TYPE_CHECKING:
    from ..protocols import Stream


class StepPlan(OperatorPlan):
    """A plan of an operator with a ``run`` by ``run_step``."""

    def numbers_of(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """The numbers of a run by its arguments, in the order of the operator's ``numbers``, the plan's for those left
        out.

        Of arguments that are tensors or numbers, only tensors are left in ``arguments``.

        Raises:
            UsageError: a number is invalid, or the plan was made without it.
        """
        scales = self.operator.split_scales(arguments)
        for name, number in scales.items():
            planned = getattr(self.options, name)
            if number is not None and planned is None:
                raise UsageError("planned with None", argument=name, value=number)
            scales[name] = planned if number is None else number
        return self.operator.launch_numbers(self.options, scales, arguments.get("max_seq_len"))

    def run_step(
        self,
        tensors: Mapping[str, Any],
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
        **numbers: int | None,
    ) -> None:
        """A run by the tensors and ``numbers`` of ``run``, by name, and its workspace and stream."""
        arguments = {**tensors, **numbers}
        values = self.numbers_of(arguments)
        addresses = self.addresses(arguments)
        launched = self.launch(addresses, values, workspace, self.stream_of(stream))
        note_launch(launched if self.of_torch else launched._replace(memory=None))

    def bind(
        self,
        *,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
        graphs: int = 0,
        **arguments: Any,
    ) -> BoundStep:
        """Bind some of ``run``'s arguments for one stream: a step then takes the other tensors.

        What is bound is checked here and kept alive until ``close``; it must stay where it is and as it is. A layer of
        a model binds its caches, a loop over fixed buffers everything::

            layer = plan.bind(k_cache=k, v_cache=v, stream=stream)
            layer.step(q, page_table, seq_lens, out)

        Args:
            workspace: as for ``run``; None: memory of its own, cleared on ``stream``.
            stream: as for ``run``; None: the stream that a run without one would take now.
            graphs: number of later captures to reserve memory for, as in ``prepare``.
            arguments: tensors, scales and ``max_seq_len`` by the names of ``run``; numbers that are left out are the
                plan's.

        Raises:
            UsageError: a name is not one of ``run``'s, or a value not what was planned.
            WorkspaceError, DeviceError: as ``run``.
        """
        arguments = renamed_options("bind", self.operator.former, arguments)
        graphs, names = graph_count(graphs), [arg.name for arg in self.operator.tensors]
        parameters = dict.fromkeys((*names, *self.operator.number_arguments))
        for name in arguments:
            if name not in parameters:
                raise UsageError(f"expected one of {', '.join(parameters)}", argument=name)
        scales = {name: arguments.get(name) for name in self.operator.number_arguments}
        numbers = self.numbers_of(scales)  # which leaves the scales that are tensors
        tensors = {name: scales.get(name, value) for name, value in arguments.items() if name in names}
        addresses = self.addresses_of(tensors)
        handle = self.stream_of(stream)
        if workspace is None:
            workspace = self.new_workspace(handle)
        check_workspace(workspace, self.device)
        if graphs:
            if not isinstance(workspace, Workspace):
                raise WorkspaceError(f"graphs={graphs}: a SemaphoreWorkspace has no memory to reserve, expected 0")
            workspace.reserve(graphs, handle)
        full = _FullStep(self, arguments, workspace, handle, (tensors, stream))
        return BoundStep(full, addresses, numbers)


class _FullStep:
    """A step by the full path, and what is bound; the path of a bound step refers to this and not to its owner,
    with which they would be a reference cycle."""

    def __init__(
        self, plan: StepPlan, arguments: Mapping[str, Any], workspace: AnyWorkspace, stream: int, kept: object
    ) -> None:
        """``kept`` is held with the arguments."""
        self.plan: StepPlan | None = plan
        self.workspace: AnyWorkspace | None = workspace
        self.stream = stream
        planned = zip(plan.operator.tensors, plan.specs, strict=True)
        self.free = tuple(arg for arg, spec in planned if spec is not None and arg.name not in arguments)
        self._binding = Binding([arg.name for arg in self.free], {}, len(self.free))
        self._bound, self._former = dict(arguments), plan.operator.former
        self._kept = kept

    def in_order(self, tensors: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """A step's tensors in the order of ``free``.

        Raises:
            TypeError: they are not those.
        """
        ordered = self._binding.in_order(tensors, named)
        if ordered is None and not self._former.keys().isdisjoint(named):
            ordered = self._binding.in_order(tensors, renamed_options("step", self._former, named))
        if ordered is None:
            names = ", ".join(arg.name for arg in self.free)
            arguments = ", ".join([f"{len(tensors)} by position", *named])
            raise TypeError(f"step() takes ({names}), got {arguments}")
        return ordered

    def send(self, *tensors: Any) -> None:
        """The step with the tensors that are not bound."""
        plan = self.plan
        if plan is None:
            raise UsageError("the bound step is closed", argument="step")
        names = (*(arg.name for arg in plan.operator.tensors), *plan.operator.number_arguments)
        ordered = zip((arg.name for arg in self.free), tensors, strict=True)
        plan.run_step({**dict.fromkeys(names), **self._bound, **dict(ordered)}, self.workspace, self.stream)

    def close(self) -> None:
        """Let go of all that is bound."""
        self.plan = self.workspace = self._kept = None
        self._bound = {}


class BoundStep:
    """A step of a plan on one stream, made by ``plan.bind``; it keeps what is bound alive until ``close``.

    ``step`` takes the tensors that are not bound, by position in the order of the plan's ``run`` or by name. It sends
    what ``run`` would, and raises as it does. Any thread may call it (of the default stream that each thread has, one).
    It may be captured, and each graph then has memory of its own: that of ``bind(graphs=n)``, or what eager steps had,
    which get other memory.
    """

    def __init__(self, full: _FullStep, addresses: Mapping[str, int], numbers: tuple[Any, ...]) -> None:
        """``addresses`` are those of the bound tensors by name."""
        self._full = full
        self._addresses = addresses
        self._numbers = numbers
        self._halts: list[str] = []  # why the path of its own must not be taken
        self._send: Callable[..., None] | None = None  # that path
        self._claim: EagerClaim | None = None  # of the buffer that it knows
        if not full.free:
            self._specialise(())
        suspendable(self)

    def step(self, *tensors: Any, **named: Any) -> None:
        """Send a step; it takes the tensors that are not bound.

        Raises:
            UsageError: a tensor is not what was planned, or this is closed.
            WorkspaceError: the workspace is closed, belongs to another stream, or has nothing for a capture.
            DeviceError: the kernel cannot be loaded or launched.
        """
        (self._send or self._first)(*self._full.in_order(tensors, named))

    def close(self) -> None:
        """Let go of all that is bound; a later step is an error. The work that was sent must not need it any more."""
        self._halts.append("closed")
        self._full.close()
        self._send = None
        vars(self).pop("step", None)

    def __enter__(self) -> BoundStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def suspend(self, suspended: bool) -> None:
        """Leave the fast path from now on, or take it again: calls are recorded."""
        reason = "calls are recorded"
        if suspended and reason not in self._halts:
            self._halts.append(reason)
        elif not suspended and reason in self._halts:
            self._halts.remove(reason)

    def _first(self, *tensors: Any) -> None:
        """The full path, after which tensors of these forms have a path of their own."""
        self._full.send(*tensors)
        self._specialise(tensors)

    def _again(self, *tensors: Any) -> None:
        """A step of a path whose buffer is another's now, or that must not be taken."""
        if self._halts:
            self._full.send(*tensors)
        elif self._send is not None and self._claim is not None and self._claim.holds():
            self._send(*tensors)  # a later path, which knows another buffer
        else:
            self._first(*tensors)

    def _specialise(self, tensors: Sequence[Any]) -> None:
        full = self._full
        plan, workspace = full.plan, full.workspace
        if plan is None or workspace is None:
            return
        names = [arg.name for arg in full.free]
        items = [item for item in map(guarded, names, tensors) if item is not None]
        if len(items) < len(names):
            return
        claim = workspace.claim_eager(full.stream)
        if claim is None:  # a capture, whose graph gets a buffer of its own
            return
        prepared, fixed = plan.bound_run(self._addresses, self._numbers, workspace, claim.place, full.stream)
        rows = [
            TensorRow(slot, item.address_of, arg.alignment - 1)
            for slot, (arg, item) in enumerate(zip(full.free, items, strict=True))
        ]
        numbers = {arg.value or arg.name: number for number, arg in enumerate(full.free)}
        values = [Constant(fixed[name]) if name in fixed else Address(numbers[name], 0) for name in prepared.names]
        table = CallTable(
            tests=(),
            tensors=tuple(rows),
            forms=KnownForms(items),
            compared=(),
            values=tuple(values),
            makes=(),
            result=None,
        )
        written = frozenset(number for number, value in enumerate(values) if type(value) is Address)
        bound = BoundPlace(full.stream, claim, self._halts)
        paths = new_paths(Binding(names, {}, len(names)), partial(_again, ref(self), full, bound))
        paths.entries = (Path.of(table, prepared, bound, written, len(names)),)
        if "closed" not in self._halts:
            self._send, self._claim = paths.send, claim
            vars(self)["step"] = paths.send  # which spares the way over the method of that name


def _again(bound: ref[BoundStep], full: _FullStep, place: BoundPlace, *tensors: Any, **named: Any) -> None:
    """A step that the path of ``place`` did not send."""
    owner = bound()
    ordered = full.in_order(tensors, named)
    if owner is None or place.holds:  # tensors of other forms
        full.send(*ordered)
    else:
        owner._again(*ordered)
