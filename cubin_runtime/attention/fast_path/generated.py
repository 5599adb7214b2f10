"""Generates the function that tests whether a call is like an earlier one, and launches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import CubinRuntimeError
from ...launch.accelerator import Senders
from ...launch.run_source import Expressions
from ...launch.streams import stream_handle
from ...provenance import ArgumentAddress, ArgumentNumber
from ...tensor import TensorView
from .arguments import ArgumentTests, UnlikeError, guarded_or_unlike, is_workspace
from .at_once import at_once, place_finder
from .guards import GuardedTensor, address_conditions, conditions
from .notes import Launched, Notes
from .options import Form, Signature, record_use

MISS = object()  # what a fast path gives for a call that is not alike
_CONSTANT = ("n_", "regions_at(")  # values that are the same for all calls of one key


def fast_path(
    signature: Signature, arguments: Sequence[Any], result: Any, notes: Notes, form: Form
) -> tuple[str, dict[str, Any]] | None:
    """The source of a function of this form that sends calls like this one, and what it refers to.

    None: none can be written. A call that is not alike comes to ``form.unlike`` before anything is done.
    """
    if not notes.repeatable or len(notes.launched) != 1:
        return None
    try:
        return PathWriter(signature, arguments, notes.launched[0], notes, form).write(result)
    except UnlikeError:
        return None


class PathWriter(ArgumentTests):
    """Collects the lines of one function and what they refer to."""

    def __init__(
        self, signature: Signature, arguments: Sequence[Any], launched: Launched, notes: Notes, form: Form
    ) -> None:
        scratch = launched.scratch
        if scratch is not None and scratch.held is None and not any(map(is_workspace, arguments)):
            launched = launched._replace(scratch=None)  # made of tensors among the arguments
        super().__init__(signature, launched, form)
        self.notes = notes
        given = zip(signature.parameters, arguments, strict=True)
        self.given = {name: value for name, value in given if name not in form.unset}
        self.scope["MISS"] = MISS
        self.followed: set[str] = set()
        self.used: set[str] = set()  # tensors among whose addresses the launch's values are
        self.sources: dict[int, tuple[str, int]] = {}  # the tensor and the offset of a value that is an address

    def write(self, result: Any) -> tuple[str, dict[str, Any]]:
        """The source of the function and what it refers to."""
        signature, launched, given = self.signature, self.launched, self.given
        for name, value in given.items():
            self.add(name, value)
        made = [guarded_or_unlike(f"made{number}", item.tensor) for number, item in enumerate(self.notes.made)]
        known = [*self.tensors, *made]
        noted = zip(launched.names, launched.values, strict=True)
        values = [self._value(name, value, known) for name, value in noted]
        related = [self._compared(one, other, known) for one, other in self.notes.compared]
        self._leftovers()
        used = [item for item in self.tensors if item.name in self.used]
        reads = [f"    a_{item.name} = {item.address}" for item in used]
        keyed, written = self._moving(values)
        moving = [item for item in used if item.name not in keyed]
        alike = conditions(self.tensors, self.scope)
        streaming = [*self._stream("stream" in given), *self._regions()]
        resident = address_conditions([item for item in used if item not in moving], signature.memory, self.scope)
        place = ["place"] if launched.scratch is not None else []
        expressions = Expressions(
            values=values,
            written=written,
            key=f"({', '.join(['handle', *(f'a_{name}' for name in keyed), *place])},)",
            stream="handle",
            elsewhere=self.form.unlike,
            refusal=[line[4:] for line in self.refusal(resident)],
            late=self._made(made),
        )
        sending = launched.prepared.sending(expressions)
        self.scope |= sending.scope
        lines = [f"def {self.form.name}({self.form.head}):"]
        lines += self.refusal(self.tests)
        lines += self.unpacked
        if not related:
            lines += self._at_once(sending.senders, values, keyed, f"return {self._result(result)}")
        lines += self.refusal(alike)
        lines += reads + self.refusal([*address_conditions(moving, signature.memory, self.scope), *related])
        lines += streaming
        lines += [f"    {line}" for line in sending.lines]
        if "stream" in given:
            lines += self._recorded(made)
        return "\n".join([*lines, f"    return {self._result(result)}", ""]), self.scope

    def _at_once(self, senders: Senders | None, values: Sequence[str], keyed: Sequence[str], done: str) -> list[str]:
        """Ahead of the lines that do it in Python: for the current stream, the whole call by the accelerator."""
        launched, made = self.launched, self.notes.made
        if "current" not in self.scope or self.workspace or len(made) > 1:
            return []
        lines = at_once(
            senders,
            self.tensors,
            values,
            self.scope,
            sources=self.sources,
            unlike=self.form.unlike,
            done=done,
            keyed=keyed,
            made=("made0", made[0].make, [self._source(source) for source in made[0].sources]) if made else None,
            stream=(self.scope["current"], launched.device),
            scratch=(launched.scratch.legacy, self.scope["place_of"]) if launched.scratch else None,
        )
        if "stream" in self.given and lines:
            return ["    if stream is None:", *(f"        {line}" for line in lines)]
        return [f"    {line}" for line in lines]

    def _value(self, name: str, value: Any, known: Sequence[GuardedTensor]) -> str:
        """The expression of one of the launch's values."""
        launched, scratch = self.launched, self.launched.scratch
        if scratch is not None and name in scratch.names:
            return f"regions_at({self.workspace or 'held.get(handle or DEFAULT)'}, place)[{scratch.names.index(name)}]"
        if name in launched.numbers:
            return self._number(name, value)
        if not value:
            return "0"
        source, offset = self._place(value, known)
        number = launched.names.index(name)
        self.sources[number] = source, offset
        if not offset:
            return f"a_{source}"
        at = f"o{number}"
        self.scope[at] = offset
        return f"a_{source} + {at}"

    def _place(self, address: int, known: Sequence[GuardedTensor]) -> tuple[str, int]:
        """The name of the tensor that an address was computed from, and the bytes between them."""
        if type(address) is ArgumentAddress and address.call == self.notes.call:
            for item in known:
                if id(item.tensor) == address.tensor:
                    self.used.add(item.name)
                    return item.name, address - item.view.pointer
        raise UnlikeError

    def _compared(self, one: int, other: int, known: Sequence[GuardedTensor]) -> str:
        """The test that two addresses are equal, or that they are not, as in the call."""
        (first, offset), (second, beyond) = self._place(one, known), self._place(other, known)
        return f"a_{first} + {offset} {'==' if one == other else '!='} a_{second} + {beyond}"

    def _number(self, name: str, value: Any) -> str:
        """The expression of a number: of the argument that it follows, or as it was."""
        bound = self.signature.bound
        if name == "max_seq_len" and bound in self.free:
            self.followed.add(bound)
            if value == self.free[bound]:
                self.tests.append(f"LOW <= {bound} <= HIGH")
                return bound
            if value > self.free[bound]:
                raise UnlikeError
            self.scope["CAPACITY"] = value  # what the page table holds, however much more is asked for
            self.tests.append(f"{bound} >= CAPACITY")
        elif type(value) is ArgumentNumber and value.call == self.notes.call:
            arguments = [factor for factor in value.factors if type(factor) is str]
            if self.free.keys() >= set(arguments):
                self.followed.update(arguments)
                return self._product(name, value.factors)
        self.scope[f"n_{name}"] = value
        return f"n_{name}"

    def _product(self, name: str, factors: Sequence[str | float]) -> str:
        """The expression of a product, multiplied as the full path does it."""
        terms = []
        for place, factor in enumerate(factors):
            if type(factor) is not str:
                self.scope[f"f{place}_{name}"] = factor
            terms.append(factor if type(factor) is str else f"f{place}_{name}")
        return " * ".join(terms)

    def _leftovers(self) -> None:
        """What no value follows is as it was, and a bound chooses the same plan."""
        for name, value in self.free.items():
            if name in self.followed:
                continue
            if name == self.signature.bound:
                self.tests.append(f"LOW <= {name} <= HIGH")
            else:
                self.scope[f"k_{name}"] = value
                self.tests.append(f"{name} == k_{name}")

    def _stream(self, given: bool) -> list[str]:
        memory, first = self.launched.memory, self.tensors[0]
        self.scope |= {"DEVICE": self.launched.device, "stream_handle": stream_handle}
        if memory is None:
            own = "0"
        elif type(first.tensor) is TensorView:
            own, self.scope["current"] = f"current({first.name})", memory.current_stream
        else:
            own, self.scope["current"] = "current(DEVICE)", memory.stream_query()
        if not given:
            return [f"    handle = {own}"]
        return self._tried(f"handle = {own} if stream is None else stream_handle(stream)")

    def _regions(self) -> list[str]:
        scratch = self.launched.scratch
        if scratch is None:
            return []
        self.scope |= {"held": scratch.held, "DEFAULT": scratch.default, "regions_at": scratch.regions_at}
        if self.workspace:
            return self._tried(f"place = {self.workspace}.claim(handle)")
        self.scope |= {"legacy": scratch.legacy, "place_of": place_finder(scratch, self.launched.context)}
        lines = ["    place = place_of(handle)", *self.refusal(["place"])]
        if scratch.legacy is None:
            return lines
        short = ["    if not handle:", *(f"    {line}" for line in self.refusal(["legacy.of_legacy"]))]
        return [*short, "        place = legacy.place", "    else:", *(f"    {line}" for line in lines)]

    def _tried(self, statement: str) -> list[str]:
        """The full path is the only source of errors, and may refuse another argument first."""
        self.scope["CubinRuntimeError"] = CubinRuntimeError
        return [f"    try: {statement}", f"    except CubinRuntimeError: {self.form.unlike}"]

    def _made(self, made: Sequence[GuardedTensor]) -> list[str]:
        """The tensors that the full path made, once nothing refuses the call."""
        lines = []
        for number, (item, tensor) in enumerate(zip(self.notes.made, made, strict=True)):
            sources = ", ".join(self._source(source) for source in item.sources)
            self.scope[f"make{number}"] = item.make
            lines.append(f"made{number} = make{number}({sources})")
            if tensor.name in self.used:
                lines.append(f"a_{tensor.name} = {tensor.address}")
        return lines

    def _moving(self, values: Sequence[str]) -> tuple[list[str], set[int]]:
        """The tensors whose addresses tell senders apart, with the stream and the scratch, and the numbers of the
        values that are written at each call: what is the same wherever the key is stays with the senders."""
        resident, memory = self.launched.prepared.resident, self.signature.memory & self.used
        moving = {number for number, value in enumerate(values) if value != "0" and not value.startswith(_CONSTANT)}
        held = {self.sources[number][0] for number in resident & moving} | memory
        placed = {number for number in moving if number in self.sources and self.sources[number][0] in memory}
        return [item.name for item in self.tensors if item.name in held], moving - resident - placed

    def _recorded(self, made: Sequence[GuardedTensor]) -> list[str]:
        """torch's allocator must know of a use on another stream than the current one."""
        names = [item.name for item in (*self.tensors, *made) if hasattr(item.tensor, "record_stream")]
        if not names or self.launched.memory is None:
            return []
        self.scope["record_use"] = record_use
        return [
            "    if stream is not None and handle != current(DEVICE):",
            f"        record_use(handle, DEVICE, ({', '.join(names)},))",
        ]

    def _source(self, tensor: Any) -> str:
        for item in self.tensors:
            if item.tensor is tensor:
                return item.name
        raise UnlikeError

    def _result(self, result: Any) -> str:
        if result is None:
            return "None"
        if type(result) is tuple:
            return f"({', '.join(self._result(part) for part in result)},)"
        for number, item in enumerate(self.notes.made):
            if item.tensor is result:
                return f"made{number}"
        for name, value in self.given.items():
            if value is result:
                return name
        raise UnlikeError
