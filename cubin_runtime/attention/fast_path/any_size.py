"""Fast paths for calls of any size: one function for all numbers of tokens and requests, with a plan for each.

In a server that mixes prompts and decodes, nearly every step has other sizes, so a function for each would hardly be
used. This one tests what the calls have in common, finds the plan by the sizes or makes it, and launches that.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from ...errors import CubinRuntimeError
from ...tensor import TensorView
from .arguments import UnlikeError, guarded_or_unlike
from .generated import PathWriter
from .guards import GuardedTensor, address_conditions, conditions
from .notes import Family, Launched, Notes
from .options import Form, Signature

if TYPE_CHECKING:
    from ...launch.semaphore_workspace import AnyWorkspace

OFTEN = 256  # calls of sizes that are this frequent get a fast path of their own
_MOST_SIZES = 256
_MOST_FAMILIES = 64


def any_size_path(
    signature: Signature, arguments: Sequence[Any], result: Any, notes: Notes, form: Form
) -> tuple[str, dict[str, Any]] | None:
    """The source of a function that launches calls like this one of any size, and what it refers to; None: it cannot
    be written."""
    if not notes.repeatable or len(notes.launched) != 1:
        return None
    try:
        return _Writer(signature, arguments, notes.launched[0], notes, form).write(result)
    except UnlikeError:
        return None


def is_second(known: dict[Hashable, None], notes: Notes) -> bool:
    """Whether this is the second call that needed a new plan in its family, of those ``known``."""
    if len(notes.launched) != 1 or not notes.repeatable:
        return False
    (launched,) = notes.launched
    if launched.family is None or launched.prepared.runs != 1:
        return False
    key = launched.family.key
    if key in known:
        known.pop(key, None)
        return True
    known[key] = None
    for oldest in list(known)[:-_MOST_FAMILIES]:
        known.pop(oldest, None)
    return False


class PlansBySize:
    """The plans of a family's calls by their sizes, in the order ``names``; safe between threads.

    The runtime keeps the plans, and with them their workspaces; one that it dropped is made again.
    """

    def __init__(self, family: Family, names: Sequence[str]) -> None:
        self._family, self._names = family, tuple(names)
        self._lock = threading.RLock()
        self._known: dict[tuple[int, ...], list[Any]] = {}  # a reference to the plan, and how often it was asked for

    def of(self, sizes: tuple[int, ...], bound: int) -> Any:
        """The plan, made if these sizes are new; None: the full path refuses the call, or such calls are frequent and
        get a fast path of their own there. ``bound`` is that on the keys of a request, 0 if there is none."""
        known = self._known.get(sizes)
        plan: Any = known[0]() if known else None
        if known is None or plan is None:
            try:
                plan = self._family.plan_of(dict(zip(self._names, sizes, strict=True)))
            except CubinRuntimeError:
                return None
            known = [ref(plan), 0]
            with self._lock:
                for oldest in list(self._known)[: 1 - _MOST_SIZES]:
                    del self._known[oldest]
                self._known[sizes] = known
        known[1] += 1
        if known[1] >= OFTEN:
            known[1] = 0
            return None
        return plan if bound <= plan.bounds[1] else None


class _Writer(PathWriter):
    def __init__(
        self, signature: Signature, arguments: Sequence[Any], launched: Launched, notes: Notes, form: Form
    ) -> None:
        super().__init__(signature, arguments, launched, notes, form)
        if launched.family is None or notes.compared or self.launched.scratch is None:
            raise UnlikeError
        self.family = launched.family
        self.sizes: Mapping[str, int] = self.family.sizes
        self.expressions: dict[str, str] = {}  # of the sizes

    def add(self, name: str, value: Any) -> None:
        """As ``ArgumentTests``; what is a size may be any."""
        if name in self.sizes and type(value) is int:
            self.tests.append(f"type({name}) is int")
            self.expressions[name] = name
        else:
            super().add(name, value)

    def add_context(self, name: str, workspace: AnyWorkspace) -> None:
        """As ``ArgumentTests``; the launch finds the context of each call."""

    def write(self, result: Any) -> tuple[str, dict[str, Any]]:
        signature, launched, scratch = self.signature, self.launched, self.launched.scratch
        assert scratch is not None
        for name, value in self.given.items():
            self.add(name, value)
        made = [self._like_source(number) for number in range(len(self.notes.made))]
        known = [*self.tensors, *made]
        values = {
            name: self._value(name, value, known)
            for name, value in zip(launched.names, launched.values, strict=True)
            if name not in scratch.names
        }
        self._leftovers()
        used = [item for item in self.tensors if item.name in self.used]
        alike = conditions(self.tensors, self.scope, self.sizes)
        for item in known:
            self.expressions.setdefault("out" if item in made else item.name, _first_dimension(item))
        self.scope |= {"plans": PlansBySize(self.family, tuple(self.sizes)), "launch": self.family.launch}
        sizes = [self.expressions.get(name, str(size)) for name, size in self.sizes.items()]
        numbers = [value for name, value in values.items() if name in launched.numbers]
        addresses = [value for name, value in values.items() if name not in launched.numbers]
        like = self.tensors[0].name
        lines = [f"def {self.form.name}({self.form.head}):", *self.refusal(self.tests), *self.unpacked]
        lines += self.refusal(alike)
        lines += [f"    a_{item.name} = {item.address}" for item in used]
        lines += self.refusal(address_conditions(used, signature.memory, self.scope))
        lines += self._stream("stream" in self.given)
        lines += [f"    {line}" for line in self._made(made)]
        bound = signature.bound if signature.bound in self.free else "0"
        lines += [f"    plan = plans.of(({''.join(f'{size}, ' for size in sizes)}), {bound})"]
        lines += self.refusal(["plan"])
        taken = f"({''.join(f'{value}, ' for value in addresses)}), ({''.join(f'{value}, ' for value in numbers)})"
        lines.append(f"    launch(plan, {taken}, {self.workspace or None}, {like}, handle)")
        if "stream" in self.given:
            lines += self._recorded(made)
        return "\n".join([*lines, f"    return {self._result(result)}", ""]), self.scope

    def _like_source(self, number: int) -> GuardedTensor:
        """A made tensor, whose size follows from that of the one that it was made from: both are contiguous."""
        made = self.notes.made[number]
        item = guarded_or_unlike(f"made{number}", made.tensor)
        if len(self.notes.made) > 1 or len(made.sources) != 1 or "out" not in self.sizes:
            raise UnlikeError
        for view in (item.view, guarded_or_unlike("source", made.sources[0]).view):
            if view.strides != TensorView.contiguous(0, view.dtype, view.shape).strides:
                raise UnlikeError
        return item


def _first_dimension(item: GuardedTensor) -> str:
    return f"{item.name}.shape[0]" if type(item.tensor) is TensorView else f"{item.name}.size(0)"
