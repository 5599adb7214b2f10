"""Paths of calls of any size: one for all numbers of tokens and requests, with a plan for each.

In a server that mixes prompts and decodes, nearly every step has other sizes, so a path for each would hardly be used.
This one tests what the calls have in common, finds the plan by the sizes or makes it, and launches that.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from ...errors import CubinRuntimeError
from ...launch.senders import Senders, senders_of
from ...tensor import TensorView
from .build import PathBuilder, Signature, UnlikeError, keyed_rows, written_values
from .guards import KnownForms
from .notes import Family, Launched, Notes, Resized
from .path import (
    CONSTANT,
    MISS,
    SLOT,
    TENSOR,
    Form,
    Frame,
    Path,
    PathTable,
    PlaceFinder,
    Size,
    accelerated_walk,
    walk_options,
)
from .table import ArgumentTest, CallTable, InScratch, Kind

if TYPE_CHECKING:
    from ...kernels.native.launches import NativeLaunch
    from ...launch.workspace import AnyWorkspace

_MOST_SIZES = 256
_MOST_TABLES = 8


def any_size_path(signature: Signature, arguments: Sequence[Any], result: Any, notes: Notes) -> SizedPath | None:
    """The path of calls like this one of any size; None: there can be none."""
    if notes.single is None:
        return None
    try:
        return _Builder(signature, arguments, notes).sized_path(result)
    except UnlikeError:
        return None


class SizedPath:
    """Sends the calls of one form and any size: each size has a plan, and a path by that.

    The runtime keeps the plans, and with them their workspaces; with a plan that it drops goes the path. Safe between
    threads.
    """

    def __init__(
        self,
        table: CallTable,
        launched: Launched,
        family: Family,
        place: PlaceFinder,
        sizes: Mapping[str, Size],
        bound: int | None,
        arguments: int,
    ) -> None:
        """``launched`` is a call whose values ``table`` has the sources of. ``bound`` is the slot of the bound on the
        keys, ``arguments`` the number of the operator's parameters."""
        self._table, self._form, self._place, self._family = table, Form(table), place, family
        self._names, self._sizes = tuple(sizes), tuple(sizes.values())
        self._bound, self._arguments = bound, arguments
        self._sources = dict(zip(launched.names, table.values, strict=True))
        names = [name for name, value in self._sources.items() if type(value) is not InScratch]
        self._addresses = [self._sources[name] for name in names if name not in launched.numbers]
        self._numbers = [self._sources[name] for name in names if name in launched.numbers]
        self._lock = threading.RLock()
        self._resized = family.resizer()
        self._bases: dict[Hashable, ref[Any]] = {}  # plans whose launches other sizes may have but for their fields
        self._plans: dict[tuple[int, ...], ref[Any]] = {}
        self._owners: dict[tuple[int, ...], ref[Any]] = {}  # the plans that the paths belong to
        self._paths: dict[tuple[int, ...], Path] = {}
        self._walks: dict[tuple[int, ...], Any] = {}
        self._tables: dict[Hashable, tuple[PathTable, Senders]] = {}
        self.walk = accelerated_walk(walk_options(table, arguments, place, (), self._sizes), place, by_size=self._walks)

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """The result of a call with these arguments in order, or ``MISS``."""
        frame = self._form.frame(arguments)
        if frame is None:
            return MISS
        sizes = tuple([size.of(frame) for size in self._sizes])
        path = self._paths.get(sizes)
        result = path.sent(frame) if path is not None and path.takes(frame) else MISS
        return self._launch(frame, sizes) if result is MISS else result

    def _launch(self, frame: Frame, sizes: tuple[int, ...]) -> Any:
        """A call of sizes that have no path: by one that is kept, where the first can have one, else by its plan."""
        first, is_known = frame.tensors[0], sizes in self._plans
        stream, slot = self._place.stream_of(frame.slots, first), self._place.workspace_slot
        workspace = None if slot is None else frame.slots[slot]
        bound = 0 if self._bound is None else frame.slots[self._bound]
        if stream is None:
            return MISS
        resized = self._resized_to(sizes) if not is_known and self._bases else None
        if resized is not None:
            result = self._sent_resized(frame, sizes, resized, workspace, stream, bound)
            if result is not MISS:
                return result
        plan = self._plan_of(sizes, resized)
        if plan is None or bound > plan.bounds[1]:
            return MISS
        unsent = None if is_known else self._family.unsent(plan, workspace, stream)
        if unsent is not None:
            result = self._sent_at_once(frame, sizes, plan, plan.bounds[1], unsent, workspace)
            if result is not MISS:
                return result
        completed = self._form.completed(frame)
        if completed is None:
            return MISS
        addresses, numbers = (
            tuple([completed.value(source, ()) for source in sources]) for sources in (self._addresses, self._numbers)
        )
        launched = self._family.launch(plan, addresses, numbers, workspace, first, stream)
        self._place.record(frame.slots, stream, completed.tensors)
        if is_known:
            self._keep(sizes, self._path_of(plan, plan.bounds[1], launched, workspace), plan)
        return self._form.result(completed)

    def _resized_to(self, sizes: tuple[int, ...]) -> Resized | None:
        """The launches of a call of these sizes; None: the full path refuses it."""
        try:
            return self._resized(dict(zip(self._names, sizes, strict=True)))
        except CubinRuntimeError:
            return None

    def _sent_resized(
        self, frame: Frame, sizes: tuple[int, ...], resized: Resized, workspace: Any, stream: int, bound: int
    ) -> Any:
        """The result of a call that is sent by the plan of other sizes whose launches have the same kernels, or
        ``MISS``."""
        launches, longest = resized
        reference = self._bases.get(_kind(launches))
        plan = reference() if reference else None
        unsent = self._family.unsent(plan, workspace, stream) if plan is not None and bound <= longest else None
        if unsent is None:
            return MISS
        unsent = unsent._replace(prepared=unsent.prepared.resized([launch.plan for launch in launches]))
        return self._sent_at_once(frame, sizes, plan, longest, unsent, workspace)

    def _sent_at_once(
        self,
        frame: Frame,
        sizes: tuple[int, ...],
        plan: Any,
        longest: int,
        unsent: Launched,
        workspace: Any,
    ) -> Any:
        """The result of a call that is sent by its path already, which is then kept, or ``MISS``; ``longest`` is the
        greatest bound on lengths with which a call of these sizes takes the path."""
        path = self._path_of(plan, longest, unsent, workspace)
        result = MISS if path is None else path.sent(frame)
        if result is not MISS:
            self._keep(sizes, path, plan)
        return result

    def _plan_of(self, sizes: tuple[int, ...], resized: Resized | None) -> Any:
        """The plan of calls of these sizes, made if there is none; None: the full path refuses them. Its launches are
        those ``resized``, if there are any."""
        reference = self._plans.get(sizes)
        plan = reference() if reference else None
        if plan is not None:
            return plan
        try:
            plan = self._family.plan_of(dict(zip(self._names, sizes, strict=True)), resized and resized[0])
        except CubinRuntimeError:
            return None
        with self._lock:
            self._make_room(self._plans)
            self._plans[sizes] = ref(plan, partial(_forget, ref(self), sizes))
            if all(launch.portable is None for launch in plan.launches):
                self._bases[_kind(plan.launches)] = ref(plan)
        return plan

    def _path_of(self, plan: Any, longest: int, launched: Launched, workspace: AnyWorkspace | None) -> Path | None:
        """The path of calls like the one launched, with bounds on lengths up to ``longest``, and with the plan's own
        workspaces or those that the calls name, if they name their contexts; None: there is none, as memory of a graph
        and memory that torch lends are neither."""
        scratch, of_torch = launched.scratch, self._place.query is not None
        if scratch is None or (of_torch and any(region.lent for region in plan.regions)):
            return None
        if scratch.held is None and (workspace is None or workspace.context is None):
            return None
        slot = self._place.workspace_slot
        place = PlaceFinder(launched, self._place.query is None, self._place.stream_slot, slot)
        kernels = tuple([launch.function for launch in launched.prepared.launches])
        key = (kernels, launched.names, scratch.names, longest, type(workspace), launched.context)
        if key in self._tables:
            table, senders = self._tables[key]
            return Path(table, launched.prepared, place, senders.resized(launched.prepared))
        calls = self._table_of(longest, launched, scratch.names, workspace)
        senders = senders_of(launched.prepared, written_values(calls, resident=()))
        table = PathTable(calls, place, senders.written, self._arguments)
        self._tables = {**dict(list(self._tables.items())[-_MOST_TABLES:]), key: (table, senders)}
        return Path(table, launched.prepared, place, senders)

    def _table_of(
        self, longest: int, launched: Launched, regions: Sequence[str], workspace: AnyWorkspace | None
    ) -> CallTable:
        """The table of calls like the one launched: tests of what other sizes may have otherwise, and all values."""
        placed = {name: InScratch(number) for number, name in enumerate(regions)}
        values = tuple(placed.get(name) or self._sources[name] for name in launched.names)
        tests, slot = [], self._place.workspace_slot
        if self._bound is not None:
            tests.append(ArgumentTest(Kind.INTEGER, self._bound, None, 0, longest))
        if slot is not None:
            tests.append(ArgumentTest(Kind.WORKSPACE, slot, type(workspace), launched.context))
        # No descriptor is kept for a tensor: the layers of a step have tensors of their own, later steps other sizes.
        rows = keyed_rows(self._table.tensors, values, resident=())
        return replace(self._table, tests=tuple(tests), tensors=rows, forms=KnownForms(()), values=values)

    def _keep(self, sizes: tuple[int, ...], path: Path | None, plan: Any) -> None:
        """Keep the path of calls of these sizes, as long as the plan that it sends is there."""
        with self._lock:
            if path is not None:
                self._make_room(self._paths)
                self._owners[sizes] = ref(plan, partial(_forget, ref(self), sizes))
                self._paths[sizes] = path
                if path.walk is not None:
                    self._walks[sizes] = path.walk

    def _make_room(self, table: Mapping[tuple[int, ...], Any]) -> None:
        """Forget the oldest sizes of a table that one more would have too many."""
        for oldest in list(table)[: 1 - _MOST_SIZES]:
            self._forget(oldest)

    def _forget(self, sizes: tuple[int, ...]) -> None:
        with self._lock:
            for table in (self._plans, self._owners, self._paths, self._walks):
                table.pop(sizes, None)


def _kind(launches: Sequence[NativeLaunch[Any]]) -> Hashable:
    """The kernels of launches, and their parts of a workspace."""
    return tuple([(launch.plan.symbol, launch.regions) for launch in launches])


def _forget(path: ref[SizedPath], sizes: tuple[int, ...], plan: ref[Any]) -> None:
    """Forget what was kept for a plan that is no more, unless there is another."""
    owner = path()
    if owner is not None and (owner._plans.get(sizes) is plan or owner._owners.get(sizes) is plan):
        owner._forget(sizes)


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
        table = self.table(result, self.sizes)
        numbers = {item.name: number for number, (_, item) in reversed(list(enumerate(self.tensors)))}
        if self.new_tensors:
            numbers.setdefault("out", self._number_of(self.notes.new_tensors[0].sources[0]))  # whose size it has
        bound = self.signature.bound
        return SizedPath(
            table,
            self.launched,
            self.family,
            PlaceFinder(self.launched, self.of_views, self.slot_of.get("stream"), self.workspace),
            {name: self._size(name, size, numbers) for name, size in self.sizes.items()},
            self.slot_of[bound] if bound in self.free else None,
            len(self.signature.parameters),
        )

    def _size(self, name: str, size: int, numbers: Mapping[str, int]) -> Size:
        slot = self.slot_of.get(name)
        if slot is not None and type(self.slots[slot]) is int:
            return Size(SLOT, slot)
        return Size(TENSOR, numbers[name]) if name in numbers else Size(CONSTANT, size)

    def _check_made(self) -> None:
        """Check that what is made has the size of what it is made from, for which both are contiguous."""
        for note, item in zip(self.notes.new_tensors, self.new_tensors, strict=True):
            if len(self.new_tensors) > 1 or len(note.sources) != 1 or "out" not in self.sizes:
                raise UnlikeError
            (source,) = (entry for _, entry in self.tensors if entry.tensor is note.sources[0])
            for view in (item.view, source.view):
                if view.strides != TensorView.contiguous(0, view.dtype, view.shape).strides:
                    raise UnlikeError
