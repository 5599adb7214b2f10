"""A plan with some of its arguments bound once, so that a step checks and writes only those that change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..launch.compiled import compiled
from ..launch.prepared import ELSEWHERE
from ..launch.streams import is_default
from .fast_path import suspendable
from .fast_path.at_once import at_once
from .fast_path.guards import conditions, guarded
from .operator_plan import AnyWorkspace, check_workspace

if TYPE_CHECKING:
    from ..protocols import Stream
    from .step_plan import StepPlan


def bind_step(
    plan: StepPlan, arguments: dict[str, Any], workspace: AnyWorkspace | None, stream: Stream | None
) -> BoundStep:
    """``plan.bind``; the dict is this function's own."""
    names = [arg.name for arg in plan.operator.tensors]
    known = dict.fromkeys((*names, *plan.operator.number_arguments))
    for name in arguments:
        if name not in known:
            raise UsageError(f"{name}: expected one of {', '.join(known)}")
    given = {name: arguments.get(name) for name in plan.operator.number_arguments}
    numbers = plan.numbers_of(given)  # which leaves the scales that are tensors
    tensors = {name: given.get(name, value) for name, value in arguments.items() if name in names}
    addresses = plan.addresses_of(tensors)
    handle = plan.stream_of(stream)
    if workspace is None:
        workspace = plan.new_workspace(handle)
    check_workspace(workspace)
    return BoundStep(plan, arguments, addresses, numbers, workspace, handle, (tensors, stream))


class BoundStep:
    """A step of a plan on one stream, made by ``plan.bind``; it keeps what is bound alive until ``close``.

    ``step`` takes the tensors that are not bound, by position in the order of the plan's ``run`` or by name. It sends
    what ``run`` would, and raises as it does. Any thread may call it; it may be captured, and each graph then has a
    workspace of its own.
    """

    def __init__(
        self,
        plan: StepPlan,
        arguments: Mapping[str, Any],
        addresses: Mapping[str, int],
        numbers: tuple[Any, ...],
        workspace: AnyWorkspace,
        stream: int,
        kept: object,
    ) -> None:
        """``addresses`` are those of the bound tensors by name; ``kept`` is held with them."""
        self._plan: StepPlan | None = plan
        self._bound = dict(arguments)
        self._addresses = addresses
        self._numbers = numbers
        self._workspace: AnyWorkspace | None = workspace
        self._stream = stream
        self._kept = kept
        self._driver = plan.driver
        planned = zip(plan.operator.tensors, plan.specs, strict=True)
        self._free = tuple(arg for arg, spec in planned if spec is not None and arg.name not in arguments)
        self._given = ", ".join(arg.name for arg in self._free)
        self._halts: list[str] = []  # why the function of its own must not be taken
        self._send: Callable[..., None] = self._first
        source = f"def step({self._given}):\n    bound._send({self._given})\n"
        self.step: Callable[..., None] = compiled("step", source, {"bound": self})
        if not self._free and not self._captures():
            self._specialise(())
        suspendable(self)

    def close(self) -> None:
        """Let go of all that is bound; a later step is an error. The work that was sent must not need it any more."""
        self._halts.append("closed")
        self._plan = self._workspace = self._kept = None
        self._bound = {}
        self._send = self.step = self._in_full

    def __enter__(self) -> BoundStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def suspend(self, suspended: bool) -> None:
        """Take the full path from now on, or no longer: calls are recorded."""
        reason = "calls are recorded"
        if suspended and reason not in self._halts:
            self._halts.append(reason)
        elif not suspended and reason in self._halts:
            self._halts.remove(reason)

    def _first(self, *tensors: Any) -> None:
        """The full path, after which tensors of these forms have a function of their own."""
        self._in_full(*tensors)
        if not self._captures():
            self._specialise(tensors)

    def _specialise(self, tensors: Sequence[Any]) -> None:
        plan, workspace, given = self._plan, self._workspace, self._given
        if plan is None or workspace is None:
            return
        found = [guarded(arg.name, tensor) for arg, tensor in zip(self._free, tensors, strict=True)]
        items = [item for item in found if item is not None]
        if len(items) < len(found):
            return
        sending = plan.bound_run(self._addresses, self._numbers, workspace, self._stream)
        scope = sending.scope | {"full": self._in_full, "halts": self._halts}
        in_full = f"return full({given})"
        states = ["not halts"]
        if not is_default(self._stream):
            scope["captures"] = self._driver.capture_query(self._stream)
            states.append("not captures()")
        lines = [f"def send({given}):", f"    if not ({' and '.join(states)}):", f"        {in_full}"]
        numbers = {arg.name: number for number, arg in enumerate(plan.operator.tensors)}
        alike = conditions(items, scope)
        if items:
            values = [f"v{number}" for number in range(len(plan.operator.values))]
            sources = {numbers[item.name]: (item.name, 0) for item in items}
            masks = {arg.name: arg.alignment - 1 for arg in self._free}
            options: dict[str, Any] = {"sources": sources, "masks": masks, "unlike": in_full, "done": "return"}
            lines += [f"    {line}" for line in at_once(sending.senders, items, values, scope, **options)]
            lines += [f"    if not ({' and '.join(alike)}):", f"        {in_full}"]
            lines += [f"    v{numbers[item.name]} = {item.address}" for item in items]
            tests = [f"not v{numbers[name]} or v{numbers[name]} & {mask}" for name, mask in masks.items()]
            lines += [f"    if {' or '.join(tests)}:", f"        {in_full}"]
        lines += [f"    {line.replace(ELSEWHERE, in_full)}" for line in [*sending.lines, ""]]
        self._send = compiled("send", "\n".join(lines), scope)
        if "closed" not in self._halts:
            self.step = self._send  # one that was taken before goes through the first

    def _captures(self) -> bool:
        """Whether a graph is being captured, which takes a workspace of its own."""
        return not is_default(self._stream) and self._driver.is_capturing(self._stream)

    def _in_full(self, *tensors: Any) -> None:
        plan = self._plan
        if plan is None:
            raise UsageError("step: the bound step is closed")
        names = (*(arg.name for arg in plan.operator.tensors), *plan.operator.number_arguments)
        given = zip((arg.name for arg in self._free), tensors, strict=True)
        own = {"workspace": self._workspace, "stream": self._stream}
        plan.run_step({**dict.fromkeys(names), **self._bound, **dict(given), **own})
