"""Paths of calls of any size: one for all numbers of tokens and requests, with a plan for each.

In a server that mixes prompts and decodes, nearly every step has other sizes, so a path for each would hardly be used.
This one tests what the calls have in common, finds the plan by the sizes or makes it, and launches that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from ...errors import CubinRuntimeError
from ...tensor import TensorView
from .build import PathBuilder, UnlikeError
from .notes import Family, Notes
from .options import Signature
from .path import MISS, Form, Frame, PlaceFinder
from .table import ArgumentTest, CallTable, InScratch, Kind

if TYPE_CHECKING:
    from ...launch.semaphore_workspace import AnyWorkspace

OFTEN = 256  # calls of sizes that are this frequent get a fast path of their own
_MOST_SIZES = 256
_MOST_FAMILIES = 64


def any_size_path(signature: Signature, arguments: Sequence[Any], result: Any, notes: Notes) -> SizedPath | None:
    """The path of calls like this one of any size; None: there can be none."""
    if not notes.repeatable or len(notes.launched) != 1:
        return None
    try:
        return _Builder(signature, arguments, notes).sized_path(result)
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


class SizedPath:
    """Sends the calls of one form and any size."""

    walk = None

    def __init__(
        self,
        table: CallTable,
        place: PlaceFinder,
        plans: PlansBySize,
        launch: Callable[..., object],
        sizes: Sequence[Callable[[Frame], int]],
        numbers: Collection[int],
        bound: int | None,
    ) -> None:
        """``sizes`` read the sizes of a call, ``numbers`` are the values that are no addresses, ``bound`` is the slot
        of the bound on the keys."""
        self._form, self._place, self._plans, self._launch = Form(table), place, plans, launch
        self._sizes, self._bound = sizes, bound
        self._numbers = [value for number, value in enumerate(table.values) if number in numbers]
        own = (value for number, value in enumerate(table.values) if number not in numbers)
        self._addresses = [value for value in own if type(value) is not InScratch]

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """The result of a call with these arguments in order, or ``MISS``."""
        frame = self._form.frame(arguments)
        stream = None if frame is None else self._place.stream_of(frame.slots, frame.tensors[0])
        if frame is None or stream is None:
            return MISS
        result = self._form.complete(frame)
        bound = 0 if self._bound is None else frame.slots[self._bound]
        plan = self._plans.of(tuple([size(frame) for size in self._sizes]), bound)
        if plan is None:
            return MISS
        addresses, numbers = (
            tuple([frame.value(source, ()) for source in sources]) for sources in (self._addresses, self._numbers)
        )
        slot, first = self._place.workspace_slot, frame.tensors[0]
        workspace = None if slot is None else frame.slots[slot]
        self._launch(plan, addresses, numbers, workspace, first, stream)
        self._place.record(frame.slots, stream, frame.tensors)
        return result


class _Builder(PathBuilder):
    def __init__(self, signature: Signature, arguments: Sequence[Any], notes: Notes) -> None:
        family = notes.launched[0].family
        self.sizes: Mapping[str, int] = {} if family is None else family.sizes
        super().__init__(signature, arguments, notes)
        if family is None or notes.compared or self.launched.scratch is None:
            raise UnlikeError
        self.family = family

    def add(self, name: str, value: Any) -> None:
        """As ``PathBuilder``; what is a size may be any."""
        if name in self.sizes and type(value) is int:
            self.tests.append(ArgumentTest(Kind.OF_TYPE, self.slot_of[name], int))
        else:
            super().add(name, value)

    def context_of(self, workspace: AnyWorkspace) -> None:
        """As ``PathBuilder``; the launch finds the context of each call."""

    def sized_path(self, result: Any) -> SizedPath:
        """The path of the call, which gave ``result``."""
        self._check_made()
        table, launched = self.table(result, self.sizes), self.launched
        first = {item.name: number for number, (_, item) in reversed(list(enumerate(self.tensors)))}
        if self.made:
            first.setdefault("out", len(self.tensors))
        bound = self.signature.bound
        return SizedPath(
            table,
            PlaceFinder(launched, self.tensors[0][1].tensor, self.slot_of.get("stream"), self.workspace),
            PlansBySize(self.family, tuple(self.sizes)),
            self.family.launch,
            [self._size(name, size, first) for name, size in self.sizes.items()],
            [number for number, name in enumerate(launched.names) if name in launched.numbers],
            self.slot_of[bound] if bound in self.free else None,
        )

    def _size(self, name: str, size: int, numbers: Mapping[str, int]) -> Callable[[Frame], int]:
        slot = self.slot_of.get(name)
        if slot is not None and type(self.slots[slot]) is int:
            return lambda frame: frame.slots[slot]
        if name not in numbers:
            return lambda _: size
        number = numbers[name]
        return lambda frame: frame.tensors[number].shape[0]

    def _check_made(self) -> None:
        """Check that what is made has the size of what it is made from, for which both are contiguous."""
        for made, item in zip(self.notes.made, self.made, strict=True):
            if len(self.made) > 1 or len(made.sources) != 1 or "out" not in self.sizes:
                raise UnlikeError
            (source,) = (known for _, known in self.tensors if known.tensor is made.sources[0])
            for view in (item.view, source.view):
                if view.strides != TensorView.contiguous(0, view.dtype, view.shape).strides:
                    raise UnlikeError
