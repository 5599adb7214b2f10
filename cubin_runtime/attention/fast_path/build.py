"""Builds the path of a form of calls from the notes that the full path took of one."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ...dtypes import ITEM_BYTES
from ...launch.workspace import SemaphoreWorkspace, Workspace
from ...provenance import ArgumentAddress, ArgumentNumber
from ...tensor import TensorView
from ...values import dataclass
from ..runtime import Runtime
from ..torch_ops import TorchScratch
from .guards import GuardedTensor, KnownForms, guarded
from .notes import Notes
from .path import Path, PlaceFinder
from .table import (
    Address,
    ArgumentTest,
    CallTable,
    Compared,
    Constant,
    InScratch,
    Kind,
    Made,
    Product,
    Source,
    TensorRow,
)

if TYPE_CHECKING:
    from ...launch.workspace import AnyWorkspace

_ALIGNED, _PLACED = 15, 255  # bits of an address that count: of a tensor, of memory that regions are placed in
_MOST = (1 << 63) - 1
_PLAIN = (bool, str, int, float)
_WORKSPACES = (Workspace, SemaphoreWorkspace)


class UnlikeError(Exception):
    """The call cannot be told from others that need another launch."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The meaning of an operator's arguments, beyond tensors and fixed options.

    ``scales`` are the arguments that numbers among the launch's values are products of, ``bound`` is the one that
    bounds the lengths, ``memory`` those in which regions are placed, ``contents`` those that the full path may read.
    """

    parameters: tuple[str, ...]
    scales: tuple[str, ...] = ()
    bound: str = "max_seq_len"
    memory: frozenset[str] = frozenset()
    contents: tuple[str, ...] = ()


def new_path(signature: Signature, arguments: Sequence[Any], result: Any, notes: Notes) -> Path | None:
    """The path of calls like this one; None: there can be none."""
    if notes.single is None:
        return None
    try:
        return PathBuilder(signature, arguments, notes).path(result)
    except UnlikeError:
        return None


class PathBuilder:
    """Collects the rows of the table of a call that was noted."""

    def __init__(self, signature: Signature, arguments: Sequence[Any], notes: Notes) -> None:
        """Raises ``UnlikeError`` for an argument that cannot be tested."""
        (launched,) = notes.launched
        scratch = launched.scratch
        if scratch is not None and scratch.held is None and not any(map(_is_workspace, arguments)):
            launched = launched._replace(scratch=None)  # made of tensors among the arguments
        self.signature, self.launched, self.notes = signature, launched, notes
        self.tests: list[ArgumentTest] = []
        self.slots: list[Any] = list(arguments)
        self.slot_of = {name: slot for slot, name in enumerate(signature.parameters)}
        self.tensors: list[tuple[int, GuardedTensor]] = []  # with their slots
        self.free: dict[str, Any] = {}  # the numbers that the launch may follow
        self.followed: set[str] = set()
        self.used: set[int] = set()  # the tensors whose addresses count
        self.workspace: int | None = None
        for name, value in zip(signature.parameters, arguments, strict=True):
            self.add(name, value)
        if not self.tensors:
            raise UnlikeError
        self.new_tensors = [_guarded(f"made {number}", item.tensor) for number, item in enumerate(notes.new_tensors)]

    def add(self, name: str, value: Any) -> None:
        """Add what must hold for an argument, or note that the launch varies with it."""
        signature, slot = self.signature, self.slot_of[name]
        if name in ("self", "stream"):
            return
        if name in signature.contents and value is not None:
            raise UnlikeError
        if _is_workspace(value):
            if self.launched.scratch is None:
                raise UnlikeError
            self.workspace = slot
            self.tests.append(ArgumentTest(Kind.WORKSPACE, slot, type(value), self.context_of(value)))
        elif (name == signature.bound and type(value) is int) or (
            name in signature.scales and type(value) is float and value
        ):
            self.free[name] = value
        elif type(value) in (tuple, list):
            self.tests.append(ArgumentTest(Kind.SEQUENCE, slot, type(value), len(value)))
            first = len(self.slots)
            self.slots.extend(value)
            for place, element in enumerate(value):
                self._single(first + place, name, element)
        else:
            self._single(slot, name, value)

    def context_of(self, workspace: AnyWorkspace) -> int | None:
        """The context that a workspace of such calls must be in; one that names none is in that of the call."""
        if workspace.context is None:
            raise UnlikeError
        return self.launched.context

    def path(self, result: Any) -> Path:
        """The path of the call, which gave ``result``."""
        table = self.table(result)
        written = written_values(table, self.launched.prepared.resident)
        place = PlaceFinder(self.launched, self.of_views, self.slot_of.get("stream"), self.workspace)
        return Path.of(table, self.launched.prepared, place, written, len(self.signature.parameters))

    def table(self, result: Any, sized: Collection[str] = ()) -> CallTable:
        """The table; the first dimension of tensors called ``sized`` may be any."""
        launched = self.launched
        noted = zip(launched.names, launched.values, strict=True)
        values = tuple(self.source(name, value) for name, value in noted)
        compared = tuple(
            Compared(self._address(one), self._address(other), one == other) for one, other in self.notes.compared
        )
        self._settle()
        return CallTable(
            tests=tuple(self.tests),
            tensors=self._rows(values),
            forms=KnownForms([item for _, item in self.tensors], sized),
            compared=compared,
            values=values,
            makes=tuple(self._made_row(number) for number in range(len(self.new_tensors))),
            result=self._result(result),
        )

    def source(self, name: str, value: Any) -> Source:
        """The source of one of the launch's values."""
        launched, scratch = self.launched, self.launched.scratch
        if scratch is not None and name in scratch.names:
            return InScratch(scratch.names.index(name))
        if name in launched.numbers:
            return self._number(name, value)
        return self._address(value) if value else Constant(0)

    @property
    def of_views(self) -> bool:
        """Return whether the first tensor is a view, of which torch knows nothing."""
        return type(self.tensors[0][1].tensor) is TensorView

    def _single(self, slot: int, name: str, value: Any) -> None:
        if value is None or type(value) in _PLAIN or is_immutable(value):
            self.tests.append(ArgumentTest(Kind.EQUAL, slot, value))
        elif isinstance(value, Runtime):
            # It is the one that keeps the path, which would be a reference cycle with it.
            self.tests.append(ArgumentTest(Kind.OF_TYPE, slot, type(value)))
        else:
            self.tensors.append((slot, _guarded(name, value)))

    def _address(self, value: int) -> Address:
        """The tensor that an address was computed from, and the bytes between them."""
        if type(value) is ArgumentAddress and value.call == self.notes.call:
            for number, item in enumerate([*(item for _, item in self.tensors), *self.new_tensors]):
                if id(item.tensor) == value.tensor:
                    self.used.add(number)
                    return Address(number, value - item.view.pointer)
        raise UnlikeError

    def _number(self, name: str, value: Any) -> Source:
        """The arguments that a number follows, or the number."""
        bound = self.signature.bound
        if name == "max_seq_len" and bound in self.free:
            least, most = self.launched.bounds
            if value > self.free[bound]:
                raise UnlikeError
            self.followed.add(bound)
            slot = self.slot_of[bound]
            if value == self.free[bound]:
                self.tests.append(ArgumentTest(Kind.INTEGER, slot, None, least, most))
                return Product((slot,))
            # The bound was cut to the room of the page table, so any larger one is the same.
            self.tests.append(ArgumentTest(Kind.INTEGER, slot, None, value, _MOST))
        elif type(value) is ArgumentNumber and value.call == self.notes.call:
            arguments = {factor for factor in value.factors if isinstance(factor, str)}
            if self.free.keys() >= arguments:
                self.followed |= arguments
                return Product(tuple(self.slot_of[f] if isinstance(f, str) else f for f in value.factors))
        return Constant(value)

    def _settle(self) -> None:
        """Add the tests of the free numbers: what no value follows is as it was, and a bound chooses the same plan."""
        for name in self.free:
            slot = self.slot_of[name]
            if name == self.signature.bound:
                if name not in self.followed:
                    self.tests.append(ArgumentTest(Kind.INTEGER, slot, None, *self.launched.bounds))
            elif name in self.followed:
                self.tests.append(ArgumentTest(Kind.SCALE, slot))
            else:
                self.tests.append(ArgumentTest(Kind.EQUAL, slot, self.free[name]))

    def _rows(self, values: Sequence[Source]) -> tuple[TensorRow, ...]:
        rows, memory = [], set[int]()
        for number, (slot, item) in enumerate(self.tensors):
            if number not in self.used:
                rows.append(TensorRow(slot))
                continue
            is_memory = item.name in self.signature.memory
            mask = _PLACED if is_memory else _address_mask(item.view.dtype)
            rows.append(TensorRow(slot, item.address_of, mask, item.view.pointer & mask))
            memory |= {number} if is_memory else set()
        return keyed_rows(rows, values, self.launched.prepared.resident, memory)

    def _made_row(self, number: int) -> Made:
        note, item = self.notes.new_tensors[number], self.new_tensors[number]
        counts = len(self.tensors) + number in self.used
        return Made(
            note.make, tuple(self._number_of(source) for source in note.sources), item.address_of if counts else None
        )

    def _number_of(self, tensor: Any) -> int:
        for number, (_, item) in enumerate(self.tensors):
            if item.tensor is tensor:
                return number
        raise UnlikeError

    def _result(self, result: Any) -> Any:
        """The slots of what the call returned."""
        if result is None:
            return None
        if type(result) is tuple:
            return tuple(self._result_slot(part) for part in result)
        return self._result_slot(result)

    def _result_slot(self, result: Any) -> int:
        for number, item in enumerate(self.notes.new_tensors):
            if item.tensor is result:
                return len(self.slots) + number
        for slot, value in enumerate(self.slots[: len(self.signature.parameters)]):
            if value is result:
                return slot
        raise UnlikeError


def _address_mask(dtype: str) -> int:
    """The bits of a tensor's address that count: of lengths and page ids, which engines slice, those in an element."""
    return ITEM_BYTES[dtype] - 1 if dtype in ("int32", "int64") else _ALIGNED


def keyed_rows(
    rows: Sequence[TensorRow], values: Sequence[Source], resident: Collection[int], memory: Collection[int] = ()
) -> tuple[TensorRow, ...]:
    """The rows, with those marked that tell senders apart: what the ``resident`` values are made of, and ``memory``."""
    sources = {number: value.tensor for number, value in enumerate(values) if type(value) is Address}
    held = {sources[number] for number in resident if number in sources}
    return tuple(row._replace(keyed=number in held or number in memory) for number, row in enumerate(rows))


def written_values(table: CallTable, resident: Collection[int]) -> frozenset[int]:
    """The numbers of the values that are written at each call: what is the same wherever the key is, is not."""
    placed = {number for number, row in enumerate(table.tensors) if row.mask == _PLACED}
    varying = [
        number
        for number, value in enumerate(table.values)
        if type(value) is Product or (type(value) is Address and value.tensor not in placed)
    ]
    return frozenset(varying).difference(resident)


def _is_workspace(value: Any) -> bool:
    return isinstance(value, _WORKSPACES)


def _guarded(name: str, tensor: Any) -> GuardedTensor:
    item = guarded(name, tensor)
    if item is None:
        raise UnlikeError
    return item


def is_immutable(value: Any) -> bool:
    """Return whether an option is a value that stays as it is: a dtype of torch's, a mark."""
    torch = sys.modules.get("torch")
    return isinstance(value, TorchScratch) or (torch is not None and isinstance(value, torch.dtype))
