"""A path: calls of one form, sent by walking its table. This is what the accelerator's ``Walk`` does in C."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from ...errors import CubinRuntimeError
from ...launch.accelerator import MAX_FACTORS, NAMES, ROW, SIZE, SOURCE, TEST, accelerator, packed
from ...launch.prepared import OtherContextError, PreparedLaunches
from ...launch.senders import NOT_WRITTEN, Senders, senders_of
from ...launch.streams import stream_handle
from ..checks import MAX_SCALE
from .notes import Launched
from .table import (
    Address,
    ArgumentTest,
    CallTable,
    Constant,
    Kind,
    Made,
    Product,
    Source,
    address_reader,
    all_hold,
    product,
    value_reader,
)

if TYPE_CHECKING:
    from ...launch.workspace import EagerClaim


class AnyPath(Protocol):
    """Sends calls of one form, or of one form but for their sizes; ``walk`` does it in C, where that can."""

    walk: Any

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """The result of a call with these arguments in order, or ``MISS``."""
        ...


SLOT, TENSOR, CONSTANT = range(3)
MISS = object()  # the result of a path, before any effect, for a call that is not of its form


class Place(NamedTuple):
    """The stream that a call is sent on, and its scratch's workspace and place there, if it has any."""

    stream: int
    workspace: Any = None
    place: Hashable = None


class PlaceFinder:
    """Finds the stream and the scratch of calls: those that the arguments name, or torch's and the plan's."""

    def __init__(self, launched: Launched, of_views: bool, stream: int | None, workspace: int | None) -> None:
        """``of_views``: the first tensor is a view; ``stream`` and ``workspace`` are the slots of those arguments."""
        self.device, self.scratch = launched.device, launched.scratch
        self.stream_slot, self.workspace_slot = stream, workspace
        self._memory, self.context = launched.memory, launched.context
        self._claim: EagerClaim | None = None  # the last in the plan's own workspaces
        self.query = None if self._memory is None or of_views else self._memory.stream_query

    def current(self, first: Any) -> int:
        """The stream of a call that names none."""
        if self.query is not None:
            return self.query(self.device)
        return 0 if self._memory is None else self._memory.current_stream(first)

    def stream_of(self, slots: Sequence[Any], first: Any) -> int | None:
        """The stream of a call; None: it names none that is one, which the full path says."""
        stream = None if self.stream_slot is None else slots[self.stream_slot]
        if stream is None:
            return self.current(first)
        try:
            return stream_handle(stream)
        except CubinRuntimeError:  # the full path may refuse another argument first
            return None

    def find(self, slots: Sequence[Any], first: Any) -> Place | None:
        """The place of a call; None: the full path finds it, or says why there is none."""
        handle, scratch = self.stream_of(slots, first), self.scratch
        if handle is None:
            return None
        if scratch is None:
            return Place(handle)
        if self.workspace_slot is not None:
            workspace = slots[self.workspace_slot]
            place = _claimed(workspace, handle)
            return None if place is None else Place(handle, workspace, place)
        claim = self._claim
        if claim is not None and claim.stream == handle and claim.holds():
            return Place(handle, None, claim.place)
        workspace = scratch.workspace_on(handle)
        if workspace is None or workspace.context != self.context:
            return None
        place, self._claim = _claimed(workspace, handle), workspace.claimed
        return None if place is None else Place(handle, None, place)

    def regions(self, place: Place) -> Sequence[int]:
        """The addresses of the scratch's regions."""
        scratch = self.scratch
        if scratch is None:
            return ()
        workspace = scratch.workspace_on(place.stream) if self.workspace_slot is None else place.workspace
        return scratch.regions_at(workspace, place.place)

    def record(self, slots: Sequence[Any], stream: int, tensors: Sequence[Any]) -> None:
        """Tell torch's allocator of tensors that are used on another stream than the current one."""
        if self.stream_slot is None or slots[self.stream_slot] is None or self._memory is None:
            return
        if stream != self.current(tensors[0]):
            used = [tensor for tensor in tensors if hasattr(tensor, "record_stream")]
            if used:
                record_use(stream, self.device, used)


def _claimed(workspace: Any, handle: int) -> Hashable:
    """The place that a stream claims in a workspace; None: it gets none, and the full path says why."""
    try:
        place: Hashable = workspace.claim(handle)
    except CubinRuntimeError:
        return None
    return place


class BoundPlace:
    """The one stream and place of a bound step, for as long as nothing halts it and the buffer is still its own."""

    stream_slot = workspace_slot = query = scratch = None

    def __init__(self, stream: int, claim: EagerClaim, halts: list[str]) -> None:
        self._place = Place(stream)
        self.claim, self.halts = claim, halts

    @property
    def holds(self) -> bool:
        """Return whether a step may be sent."""
        return not self.halts and self.claim.holds()

    def find(self, slots: Sequence[Any], first: Any) -> Place | None:
        """As ``PlaceFinder``."""
        return self._place if self.holds else None

    def regions(self, place: Place) -> Sequence[int]:
        """As ``PlaceFinder``; the regions stay where they are."""
        return ()

    def record(self, slots: Sequence[Any], stream: int, tensors: Sequence[Any]) -> None:
        """As ``PlaceFinder``; who binds a stream keeps the tensors that it uses."""


class Frame(NamedTuple):
    """A call on its way through a table: arguments, tensors and addresses; what is made follows the others."""

    slots: list[Any]
    tensors: list[Any]
    addresses: list[int]

    def value(self, source: Source, regions: Sequence[int]) -> Any:
        """A value of the launch, with the addresses of the scratch's regions."""
        if type(source) is Address:
            return self.addresses[source.tensor] + source.offset
        if type(source) is Product:
            return product(source.factors, self.slots)
        return source.value if type(source) is Constant else regions[source.region]  # type: ignore[union-attr]


class Size(NamedTuple):
    """The source of a size of a call: the ``SLOT`` of an argument, a ``TENSOR``'s first dimension, or neither."""

    kind: int
    number: int

    def of(self, frame: Frame) -> int:
        """The size of a call."""
        if self.kind == TENSOR:
            return int(frame.tensors[self.number].shape[0])
        return int(frame.slots[self.number]) if self.kind == SLOT else self.number


def _may_be_too_large(source: Source) -> TypeGuard[Product]:
    """Return whether a product may be twice as large as its arguments may be, which float32 cannot hold."""
    if type(source) is not Product:
        return False
    return prod([MAX_SCALE if type(factor) is int else abs(factor) for factor in source.factors]) >= 2 * MAX_SCALE


class Form:
    """The calls of a table's form: what they make, and their results."""

    def __init__(self, table: CallTable) -> None:
        self.takes, self._addresses = all_hold(table.tests), address_reader(table.tensors)
        self._slots = [row.slot for row in table.tensors]
        self._products = [source.factors for source in table.values if _may_be_too_large(source)]
        self._forms, self._compared, self._makes, self._result = table.forms, table.compared, table.makes, table.result

    def frame(self, arguments: Sequence[Any]) -> Frame | None:
        """The frame of a call, without what it makes; None: it is not of this form."""
        slots = list(arguments)
        if not self.takes(slots) or (self._products and not self._fit(slots)):
            return None
        tensors = [slots[slot] for slot in self._slots]
        if not self._forms.are_of(tensors):
            return None
        try:
            addresses = self._addresses(tensors)
        except RuntimeError:  # of torch: a tensor of a function transform, as vmap's, has no storage
            return None
        if addresses is None or (self._compared and not self._are_related(addresses)):
            return None
        return Frame(slots, tensors, addresses)

    def _fit(self, slots: Sequence[Any]) -> bool:
        return all(-MAX_SCALE <= product(factors, slots) <= MAX_SCALE for factors in self._products)

    def _are_related(self, addresses: Sequence[int]) -> bool:
        return all(
            (addresses[one] + offset == addresses[other] + beyond) == equal
            for (one, offset), (other, beyond), equal in self._compared
        )

    def completed(self, frame: Frame) -> Frame | None:
        """The frame of a call that nothing refuses, with what it makes; the one given may be completed again.

        None: what it makes has no memory, as in a function transform of torch; the full path says so.
        """
        if not self._makes:
            return frame
        outputs = [row.make(*[frame.tensors[number] for number in row.tensors]) for row in self._makes]
        addresses = []
        for row, tensor in zip(self._makes, outputs, strict=True):
            try:
                address = 0 if row.address_of is None else row.address_of(tensor)
            except RuntimeError:
                return None
            if not address and row.address_of is not None:
                return None
            addresses.append(address)
        return Frame([*frame.slots, *outputs], [*frame.tensors, *outputs], [*frame.addresses, *addresses])

    def result(self, completed: Frame) -> Any:
        """The result of a call."""
        slots = completed.slots
        if type(self._result) is tuple:
            return tuple([slots[slot] for slot in self._result])
        return None if self._result is None else slots[self._result]


class PathTable:
    """A table as a path reads it; paths whose launches take the same values share it."""

    def __init__(
        self,
        table: CallTable,
        place: PlaceFinder | BoundPlace,
        written: Sequence[Sequence[int]],
        arguments: int,
    ) -> None:
        """``written`` are the numbers of the values that each launch takes from a call, ``arguments`` is the number of
        the operator's parameters."""
        self.form, self.values, self.written = Form(table), table.values, written
        self.keyed = [number for number, row in enumerate(table.tensors) if row.keyed]
        self.read = [value_reader([table.values[number] for number in places]) for places in written]
        self.walk = walk_options(table, arguments, place, written)


class Path:
    """Sends the calls of one form."""

    def __init__(
        self, table: PathTable, prepared: PreparedLaunches, place: PlaceFinder | BoundPlace, senders: Senders
    ) -> None:
        """``senders`` are those of ``prepared``, which write what the table says."""
        self._form, self._place, self._senders = table.form, place, senders
        self._values, self._keyed, self._written = table.values, table.keyed, table.read
        self._by_place = isinstance(place, PlaceFinder)
        self.walk = accelerated_walk(table.walk, place, (prepared, senders))

    @classmethod
    def of(
        cls,
        table: CallTable,
        prepared: PreparedLaunches,
        place: PlaceFinder | BoundPlace,
        written: frozenset[int],
        arguments: int,
    ) -> Path:
        """The path of a table; ``written`` are the numbers of the values that differ between calls whose keys are the
        same, ``arguments`` is as in ``PathTable``."""
        senders = senders_of(prepared, written)
        return cls(PathTable(table, place, senders.written, arguments), prepared, place, senders)

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """The result of a call with these arguments in order, or ``MISS``."""
        frame = self._form.frame(arguments)
        return MISS if frame is None else self.sent(frame)

    def takes(self, frame: Frame) -> bool:
        """Return whether the tests of the table hold for a call's arguments."""
        return self._form.takes(frame.slots)

    def sent(self, frame: Frame) -> Any:
        """The result of a call that is of this form, as its frame says, or ``MISS``."""
        place = self._place.find(frame.slots, frame.tensors[0] if frame.tensors else None)
        if place is None:
            return MISS
        completed = self._form.completed(frame)
        if completed is None:
            return MISS
        slots, tensors, addresses = completed
        key = self._key(place, addresses)
        try:
            written = [read(slots, addresses) for read in self._written]
            self._senders.send(key, place.stream, written, lambda: self._everything(completed, place))
        except OtherContextError:  # whose launches the full path makes
            return MISS
        self._place.record(slots, place.stream, tensors)
        return self._form.result(completed)

    def _key(self, place: Place, addresses: Sequence[int]) -> tuple[Hashable, ...]:
        """The key that the senders are kept by."""
        keyed = [addresses[number] for number in self._keyed]
        if not self._by_place:
            return tuple(keyed)
        return (place.stream, *keyed) if place.place is None else (place.stream, place.place, *keyed)

    def _everything(self, frame: Frame, place: Place) -> tuple[Any, ...]:
        regions = self._place.regions(place)
        return tuple([frame.value(source, regions) for source in self._values])


def accelerated_walk(
    options: Mapping[str, Any] | None,
    place: PlaceFinder | BoundPlace,
    launches: tuple[PreparedLaunches, Senders] | None = None,
    by_size: dict[tuple[int, ...], Any] | None = None,
) -> Any:
    """The accelerator's walk with the options of a table; None: it has none, or cannot send the launches.

    It sends ``launches``, or goes on with the walk that a call's sizes have in ``by_size``.
    """
    prepared, senders = launches or (None, None)
    module = accelerator()
    if module is None or options is None or (senders is not None and not senders.accelerated):
        return None
    return module.Walk(
        failed=None if prepared is None else prepared.failed,
        senders={} if senders is None else senders.by_key,
        **options,
        **_place_options(place),
        **({} if by_size is None else {"by_size": by_size}),
    )


def walk_options(
    table: CallTable,
    arguments: int,
    place: PlaceFinder | BoundPlace,
    writes: Sequence[Sequence[int]],
    sizes: Sequence[Size] | None = None,
) -> dict[str, Any] | None:
    """The options of the accelerator's walk of a table, but for those of a place and of launches; None: there is no
    accelerator, or it cannot walk this table.

    ``place`` is one of those, all of which have their stream and workspace in the same slots.
    """
    module, forms = accelerator(), table.forms.accelerated
    if module is None or forms is None or not _is_simple(table, place) or (table.makes and forms[0] is None):
        return None
    keyed = sum(row.keyed for row in table.tensors)
    products = (source for source in table.values if type(source) is Product)
    slots = arguments + sum([test.low for test in table.tests if test.kind == Kind.SEQUENCE]) + len(table.makes)
    tensor_count = len(table.tensors) + len(table.makes)
    limits = (
        (slots, module.MOST_SLOTS),
        (tensor_count, module.MOST_TENSORS),
        (keyed, module.MOST_KEYED),
        (len(writes), module.MOST_LAUNCHES),
        (len(sizes or ()), module.MOST_TENSORS),
        (max((len(source.factors) for source in products), default=0), MAX_FACTORS),
    )
    if any(count > most for count, most in limits):
        return None
    _check_numbers(table, place, sizes or (), slots, tensor_count)
    tensors = [(row.slot, row.address_of is not None, row.keyed, row.mask, row.rest) for row in table.tensors]
    return {
        "slots": arguments,
        "names": NAMES,
        "known": tuple(test.expected for test in table.tests),
        "tests": packed(TEST, map(_test, table.tests)),
        "tensors": packed(ROW, tensors),
        "writes": tuple(packed(SOURCE, [_write(table.values[number]) for number in places]) for places in writes),
        "forms": forms,
        "unfit": NOT_WRITTEN,
        "result": table.result,
        "stream_slot": -1 if place.stream_slot is None else place.stream_slot,
        "workspace_slot": -1 if place.workspace_slot is None else place.workspace_slot,
        **{name: value for row in table.makes for name, value in _made(row).items()},
        **({} if sizes is None else {"sizes": packed(SIZE, sizes)}),
    }


def _place_options(place: PlaceFinder | BoundPlace) -> dict[str, Any]:
    """The options that say where the walk finds the stream and the scratch, or what it asks before a bound step."""
    if isinstance(place, BoundPlace):
        return {"halts": place.halts, "claim": place.claim}
    stream, scratch = {"current": place.query, "device": place.device}, place.scratch
    if scratch is None:
        return stream
    if place.workspace_slot is not None:
        return {**stream, "in": place.context}
    return {**stream, "held": scratch.held, "own": scratch.default, "in": place.context}


def _is_simple(table: CallTable, place: PlaceFinder | BoundPlace) -> bool:
    """Return whether the accelerator knows all of a table's rows and the ways to its place."""
    if table.compared or len(table.makes) > 1:
        return False
    return isinstance(place, BoundPlace) or place.query is not None


def _check_numbers(
    table: CallTable, place: PlaceFinder | BoundPlace, sizes: Sequence[Size], slots: int, tensors: int
) -> None:
    """Check that a table and the sizes of its calls name slots and tensors that there are: the accelerator reads them
    unchecked.

    Raises:
        ValueError: it names others.
    """
    result = table.result if type(table.result) is tuple else (table.result,)
    named = [test.slot for test in table.tests] + [row.slot for row in table.tensors]
    named += [slot for slot in (*result, place.stream_slot, place.workspace_slot) if slot is not None]
    named += [size.number for size in sizes if size.kind == SLOT]
    read = [number for row in table.makes for number in row.tensors]
    read += [size.number for size in sizes if size.kind == TENSOR]
    for source in table.values:
        if type(source) is Address:
            read.append(source.tensor)
        elif type(source) is Product:
            named += [factor for factor in source.factors if type(factor) is int]
    for what, numbers, count in (("slot", named, slots), ("tensor", read, tensors)):
        for number in numbers:
            if not 0 <= number < count:
                raise ValueError(f"a table of calls names {what} {number} of {count}")


def _test(test: ArgumentTest) -> tuple[int, ...]:
    """The row of a test; the walk holds what arguments are compared with, whose address it has.

    It finds the context of a workspace in what was claimed of it.
    """
    if test.kind == Kind.WORKSPACE:
        return Kind.OF_TYPE, test.slot, id(test.expected), 0, 0
    return test.kind, test.slot, id(test.expected), test.low, test.high


def _made(row: Made) -> dict[str, Any]:
    return {"make": row.make, "made_of": row.tensors, "made_counts": row.address_of is not None}


def _write(source: Source) -> tuple[int | float, ...]:
    factors = source.factors if type(source) is Product else ()
    pairs = [(factor, 0.0) if type(factor) is int else (-1, factor) for factor in factors]
    pairs += [(-1, 0.0)] * (MAX_FACTORS - len(pairs))
    tensor, offset = source if type(source) is Address else (0, 0)
    return int(type(source) is Product), tensor, len(factors), offset, *chain.from_iterable(pairs)


def record_use(stream: int, device: int, tensors: Sequence[Any]) -> None:
    """Tell torch's allocator that ``stream`` uses tensors that the current stream may free."""
    import torch

    cuda: Any = torch.cuda  # its streams have no types
    used_on = cuda.ExternalStream(stream, device=device)
    for tensor in tensors:
        tensor.record_stream(used_on)
