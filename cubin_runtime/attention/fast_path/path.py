"""A path: calls of one form, sent by walking its table. This is what the accelerator's ``Walk`` does in C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...errors import CubinRuntimeError, WorkspaceError
from ...launch.accelerator import accelerator
from ...launch.prepared import OtherContextError, PreparedLaunches
from ...launch.senders import Senders
from ...launch.streams import stream_handle
from ...tensor import TensorView
from .notes import Launched, Scratch
from .options import record_use
from .table import Address, CallTable, Constant, Product, Source

if TYPE_CHECKING:
    from ...launch.buffers import EagerClaim


class AnyPath(Protocol):
    """Sends calls of one form, or of one form but for their sizes; ``walk`` does it in C, where that can."""

    walk: Any

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """The result of a call with these arguments in order, or ``MISS``."""
        ...


MISS = object()  # what a path gives for a call that is not of its form, before anything is done


class Place(NamedTuple):
    """Where a call is sent: its stream, what its senders are kept by, and the addresses of the scratch's regions."""

    stream: int
    key: tuple[Hashable, ...]
    regions: Callable[[], Sequence[int]]


class PlaceFinder:
    """Finds the stream and the scratch of calls: those that the arguments name, or torch's and the plan's."""

    def __init__(self, launched: Launched, first: Any, stream: int | None, workspace: int | None) -> None:
        """``first`` is a call's first tensor; ``stream`` and ``workspace`` are the slots of those arguments."""
        self.device, self.scratch = launched.device, launched.scratch
        self.stream_slot, self.workspace_slot = stream, workspace
        self._of_view = type(first) is TensorView
        self._memory = launched.memory
        self.query = None if self._memory is None or self._of_view else self._memory.stream_query()
        self.place_of = (
            None if self.scratch is None or workspace is not None else _finder(self.scratch, launched.context)
        )

    def current(self, first: Any) -> int:
        """The stream of a call that names none."""
        if self.query is not None:
            return self.query(self.device)
        return 0 if self._memory is None else self._memory.current_stream(first)

    def of_stream(self, slots: Sequence[Any], first: Any) -> Place | None:
        """The place of a call but for its scratch; None: the stream is none, which the full path says."""
        stream = None if self.stream_slot is None else slots[self.stream_slot]
        try:
            handle = self.current(first) if stream is None else stream_handle(stream)
        except CubinRuntimeError:  # the full path may refuse another argument first
            return None
        return Place(handle, (handle,), tuple)

    def find(self, slots: Sequence[Any], first: Any) -> Place | None:
        """The place of a call; None: the full path finds it, or says why there is none."""
        there, scratch = self.of_stream(slots, first), self.scratch
        if there is None or scratch is None:
            return there
        handle = there.stream
        if self.workspace_slot is None:
            place = self._own(scratch, handle)
            workspace = None if place is None else scratch.workspace_on(handle)
        else:
            workspace = slots[self.workspace_slot]
            try:
                place = workspace.claim(handle)
            except CubinRuntimeError:
                return None
        if place is None:
            return None
        return Place(handle, (handle, place), lambda: scratch.regions_at(workspace, place))

    def _own(self, scratch: Scratch, handle: int) -> Any:
        """The place in the plan's own workspace of a stream, or None."""
        if handle or scratch.legacy is None:
            return None if self.place_of is None else self.place_of(handle)
        return scratch.legacy.place if scratch.legacy.of_legacy else None

    def record(self, slots: Sequence[Any], first: Any, stream: int, tensors: Sequence[Any]) -> None:
        """Tell torch's allocator of tensors that are used on another stream than the current one."""
        named = self.stream_slot is not None and slots[self.stream_slot] is not None
        if named and self._memory is not None and stream != self.current(first):
            used = [tensor for tensor in tensors if hasattr(tensor, "record_stream")]
            if used:
                record_use(stream, self.device, used)


class BoundPlace:
    """The one stream and place of a bound step, for as long as nothing halts it and the buffer is still its own."""

    stream_slot = workspace_slot = query = scratch = place_of = None

    def __init__(self, stream: int, claim: EagerClaim | None, halts: list[str]) -> None:
        self._place = Place(stream, (), tuple)
        self.claim, self.halts = claim, halts

    @property
    def holds(self) -> bool:
        """Return whether a step may be sent."""
        return not self.halts and (self.claim is None or self.claim.holds())

    def find(self, slots: Sequence[Any], first: Any) -> Place | None:
        """As ``PlaceFinder``."""
        return self._place if self.holds else None

    def record(self, slots: Sequence[Any], first: Any, stream: int, tensors: Sequence[Any]) -> None:
        """As ``PlaceFinder``; who binds a stream keeps the tensors that it uses."""


def _finder(scratch: Scratch, context: int) -> Callable[[int], Any]:
    """A function that gives the place of a stream's scratch as ``Workspace.claim`` does; None: the full path finds it,
    or says why not."""
    workspace_on = scratch.workspace_on

    def place_of(handle: int) -> Any:
        workspace = workspace_on(handle)
        if workspace is None or workspace.context != context:
            return None
        try:
            return workspace.claim(handle)
        except WorkspaceError:
            return None

    return place_of


class Frame(NamedTuple):
    """A call on its way through a table: arguments, tensors (those that are made follow the others), addresses."""

    slots: list[Any]
    tensors: list[Any]
    addresses: list[int]

    def value(self, source: Source, place: Place) -> Any:
        """A value of the launch."""
        if type(source) is Address:
            return self.addresses[source.tensor] + source.offset
        if type(source) is Product:
            first, *others = [self.slots[of] if type(of) is int else of for of in source.factors]
            for other in others:
                first = first * other
            return first
        return source.value if type(source) is Constant else place.regions()[source.region]  # type: ignore[union-attr]


def framed(table: CallTable, arguments: Sequence[Any]) -> Frame | None:
    """The frame of a call, up to the tensors that it makes; None: it is not of the table's form."""
    slots = list(arguments)
    if not all(test.holds(slots) for test in table.tests):
        return None
    tensors = [slots[row.slot] for row in table.tensors]
    if not table.forms.are_of(tensors):
        return None
    addresses = [
        0 if row.address_of is None else row.address_of(of) for row, of in zip(table.tensors, tensors, strict=True)
    ]
    for row, address in zip(table.tensors, addresses, strict=True):
        if row.address_of is not None and (not address or address & row.mask != row.rest):
            return None
    for one, other, equal in table.compared:
        if (table.address(one, addresses) == table.address(other, addresses)) != equal:
            return None
    return Frame(slots, tensors, addresses)


def complete(table: CallTable, frame: Frame) -> Any:
    """Make the tensors that a call makes, once nothing refuses it; the result."""
    for made in table.made:
        tensor = made.make(*(frame.tensors[number] for number in made.tensors))
        frame.tensors.append(tensor)
        frame.addresses.append(0 if made.address_of is None else made.address_of(tensor))
    items = [*frame.slots, *frame.tensors[len(table.tensors) :]]
    if type(table.result) is tuple:
        return tuple(items[slot] for slot in table.result)
    return None if table.result is None else items[table.result]


class Path:
    """Sends the calls of one form."""

    def __init__(
        self,
        table: CallTable,
        prepared: PreparedLaunches,
        place: PlaceFinder | BoundPlace,
        written: frozenset[int],
        arguments: int,
    ) -> None:
        """``written`` are the numbers of the values that differ between calls whose keys are the same, ``arguments`` is
        the number of the operator's parameters."""
        self._table, self._place, self._senders = table, place, prepared.senders(written)
        self._keyed = [number for number, row in enumerate(table.tensors) if row.keyed]
        self.walk = accelerated_walk(table, arguments, prepared, self._senders, place)

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """The result of a call with these arguments in order, or ``MISS``."""
        table = self._table
        frame = framed(table, arguments)
        if frame is None:
            return MISS
        first = frame.tensors[0] if frame.tensors else None
        place = self._place.find(frame.slots, first)
        if place is None:
            return MISS
        result = complete(table, frame)
        key = (*place.key, *(frame.addresses[number] for number in self._keyed))
        try:
            self._senders.send(key, place.stream, lambda number: frame.value(table.values[number], place))
        except OtherContextError:  # whose launches the full path makes
            return MISS
        self._place.record(frame.slots, first, place.stream, frame.tensors)
        return result


def accelerated_walk(
    table: CallTable,
    arguments: int,
    prepared: PreparedLaunches,
    senders: Senders,
    place: PlaceFinder | BoundPlace,
) -> Any:
    """The accelerator's walk of a table; None: it has none, or cannot walk this table."""
    module, forms = accelerator(), table.forms.accelerated
    if module is None or not senders.accelerated or forms is None or not _is_simple(table, place):
        return None
    keyed = sum(row.keyed for row in table.tensors)
    products = (source for source in table.values if type(source) is Product)
    limits = (
        (arguments, module.MOST_SLOTS),
        (len(table.tensors), module.MOST_TENSORS),
        (keyed, module.MOST_KEYED),
        (len(senders.written), module.MOST_LAUNCHES),
        (max((len(source.factors) for source in products), default=0), module.MOST_FACTORS),
    )
    if any(count > most for count, most in limits):
        return None
    bound = None
    if isinstance(place, BoundPlace):
        bound = place.halts, place.claim and (place.claim.buffer, place.claim.owner, place.claim.same_stream)
    return module.Walk(
        slots=arguments,
        tests=tuple((test.kind, test.slot, test.known, test.low, test.high) for test in table.tests),
        forms=forms,
        data_ptr=sys.modules["torch"].Tensor.data_ptr if table.tensors else None,
        tensors=tuple((row.slot, row.address_of is not None, row.keyed, row.mask, row.rest) for row in table.tensors),
        senders=senders.by_key,
        writes=tuple(tuple(_write(table.values[number]) for number in own) for own in senders.written),
        failed=prepared.failed,
        result=table.result,
        stream=(place.query, place.device) if isinstance(place, PlaceFinder) else None,
        scratch=(place.scratch.legacy, place.place_of) if place.scratch is not None else None,
        bound=bound,
        made=(table.made[0].make, table.made[0].tensors, table.made[0].address_of is not None) if table.made else None,
        stream_slot=-1 if place.stream_slot is None else place.stream_slot,
    )


def _is_simple(table: CallTable, place: PlaceFinder | BoundPlace) -> bool:
    """Return whether the accelerator knows all of a table's rows and the ways to its place."""
    if table.compared or len(table.made) > 1 or place.workspace_slot is not None:
        return False
    return isinstance(place, BoundPlace) or place.query is not None


def _write(source: Source) -> tuple[int, int, int, tuple[int | float, ...]]:
    if type(source) is Address:
        return 0, source.tensor, source.offset, ()
    assert type(source) is Product
    return 1, 0, 0, source.factors
