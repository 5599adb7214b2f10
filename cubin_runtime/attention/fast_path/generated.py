"""Writing the function that tests whether a call is like an earlier one, and sends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import WorkspaceError
from ...kernels.native.problem import LOG2_E
from ...launch.semaphore_workspace import SemaphoreWorkspace
from ...launch.streams import stream_handle
from ...launch.workspace import Workspace
from ...tensor import TensorView
from .guards import GuardedTensor, address_conditions, conditions, guarded
from .notes import Launched, Notes
from .options import Form, Signature, is_immutable, record_use

MISS = object()  # what a fast path gives for a call that is not alike
_CONSTANT = ("n_", "regions_at(")  # values that are the same for all calls of one key
_SCALE_LIMIT, _SMALLEST_SCALE = 2.0**127, 2.0**-127  # of subnormal numbers, different multiples are equal
_FIXED = (str, int, float)
_WORKSPACES = (Workspace, SemaphoreWorkspace)


class _Unlike(Exception):
    """The call cannot be told from others that need another launch."""


def fast_path(
    signature: Signature, arguments: Sequence[Any], result: Any, notes: Notes, form: Form
) -> tuple[str, dict[str, Any]] | None:
    """The source of a function of this form that sends calls like this one, and what it refers to.

    None: none can be written. A call that is not alike comes to ``form.unlike`` before anything is done.
    """
    if not notes.repeatable or len(notes.launched) != 1:
        return None
    try:
        return _Writer(signature, arguments, notes.launched[0], notes, form).write(result)
    except _Unlike:
        return None


class _Writer:
    """Collects the lines of one function and what they refer to."""

    def __init__(
        self, signature: Signature, arguments: Sequence[Any], launched: Launched, notes: Notes, form: Form
    ) -> None:
        scratch = launched.scratch
        if scratch is not None and scratch.held is None and not any(isinstance(x, _WORKSPACES) for x in arguments):
            launched = launched._replace(scratch=None)  # made of tensors among the arguments
        self.signature, self.launched, self.notes = signature, launched, notes
        given = zip(signature.parameters, arguments, strict=True)
        self.given = {name: value for name, value in given if name not in form.unset}
        self.form = form
        self.scope: dict[str, Any] = {"MISS": MISS}
        self.tests = list(form.tests)
        self.unpacked: list[str] = []
        self.tensors: list[GuardedTensor] = []
        self.free: dict[str, Any] = {}
        self.followed: set[str] = set()
        self.used: set[str] = set()  # tensors among whose addresses the launch's values are
        self.workspace = ""

    def write(self, result: Any) -> tuple[str, dict[str, Any]]:
        signature, launched, given = self.signature, self.launched, self.given
        for name, value in given.items():
            self._argument(name, value)
        made = [self._guarded(f"made{number}", item.tensor) for number, item in enumerate(self.notes.made)]
        known = [*self.tensors, *made]
        related: set[str] = set()
        noted = zip(launched.names, launched.values, strict=True)
        values = [self._value(name, value, known, related) for name, value in noted]
        if launched.apart:
            one, other = (launched.names.index(name) for name in launched.apart)
            equal = launched.values[one] == launched.values[other]
            related.add(f"{values[one]} {'==' if equal else '!='} {values[other]}")
        self._leftovers()
        used = [item for item in self.tensors if item.name in self.used]
        reads = [f"    a_{item.name} = {item.address}" for item in used]
        keyed, written = self._moving(values)
        moving = [item for item in used if f"a_{item.name}" not in keyed]
        lines = [f"def {self.form.name}({self.form.head}):"]
        lines += self._refusal(self.tests)
        lines += self.unpacked
        lines += self._refusal(conditions(self.tensors, self.scope))
        lines += reads + self._refusal([*address_conditions(moving, signature.memory, self.scope), *sorted(related)])
        lines += [*self._stream("stream" in given), *self._regions()]
        resident = address_conditions([item for item in used if item not in moving], signature.memory, self.scope)
        sending, scope = launched.prepared.sending(
            values,
            written=written,
            key=f"(handle, {', '.join(keyed)})" if keyed else "handle",
            stream="handle",
            elsewhere=self.form.unlike,
            refusal=[line[4:] for line in self._refusal(resident)],
            late=self._made(made),
        )
        self.scope |= scope
        lines += [f"    {line}" for line in sending]
        if "stream" in given:
            lines += self._recorded(made)
        return "\n".join([*lines, f"    return {self._result(result)}", ""]), self.scope

    def _argument(self, name: str, value: Any) -> None:
        """What must hold for an argument, or what varies with it."""
        signature = self.signature
        if name in ("self", "stream"):
            return
        if name in signature.contents and value is not None:
            raise _Unlike
        if isinstance(value, _WORKSPACES):
            if self.launched.scratch is None:
                raise _Unlike
            self.scope |= {"Kind": type(value), "CONTEXT": self.launched.context}
            self.tests.append(f"type({name}) is Kind and {name}.context == CONTEXT")
            self.workspace = name
        elif name == signature.bound and type(value) is int:
            self.scope |= {"LOW": self.launched.bounds[0], "HIGH": self.launched.bounds[1]}
            self.tests.append(f"type({name}) is int")
            self.free[name] = value
        elif name in signature.scales.values() and type(value) is float and abs(value) > _SMALLEST_SCALE:
            self.scope |= {"LIMIT": _SCALE_LIMIT, f"k_{name}": value}
            self.tests.append(f"({name} is k_{name} or type({name}) is float and -LIMIT <= {name} <= LIMIT and {name})")
            self.free[name] = value
        elif type(value) in (tuple, list):
            self.scope |= {f"kind_{name}": type(value), f"len_{name}": len(value)}
            self.tests.append(f"type({name}) is kind_{name} and len({name}) == len_{name}")
            parts = [f"{name}_{index}" for index in range(len(value))]
            if parts:
                self.unpacked.append(f"    {', '.join(parts)}, = {name}")
            late = len(self.tests)
            for part, element in zip(parts, value, strict=True):
                self._single(part, element)
            self.unpacked += self._refusal(self.tests[late:])
            del self.tests[late:]
        else:
            self._single(name, value)

    def _single(self, name: str, value: Any) -> None:
        if value is None or type(value) is bool:
            self.tests.append(f"{name} is {value}")
        elif type(value) in _FIXED:
            self.scope |= {f"k_{name}": value, f"t_{name}": type(value)}
            signed = f" and str({name}) == '{value}'" if type(value) is float and not value else ""
            self.tests.append(f"({name} is k_{name} or type({name}) is t_{name} and {name} == k_{name}{signed})")
        elif is_immutable(value):
            self.scope[f"k_{name}"] = value
            self.tests.append(f"{name} is k_{name}")
        else:
            self.tensors.append(self._guarded(name, value))

    def _guarded(self, name: str, tensor: Any) -> GuardedTensor:
        item = guarded(name, tensor)
        if item is None:
            raise _Unlike
        return item

    def _value(self, name: str, value: Any, known: Sequence[GuardedTensor], related: set[str]) -> str:
        """The expression of one of the launch's values."""
        launched, scratch = self.launched, self.launched.scratch
        if scratch is not None and name in scratch.names:
            return f"regions_at({self.workspace or 'held.get(handle or DEFAULT)'}, place)[{scratch.names.index(name)}]"
        if name in launched.numbers:
            return self._number(name, value)
        if not value:
            return "0"
        containing = [item for item in known if item.view.pointer <= value < item.end]
        if not containing:
            raise _Unlike
        source, *others = containing
        self.used.update(item.name for item in containing)
        for other in others:  # whichever of them the address was derived from, it is the same
            delta = f"d_{other.name}_{source.name}"
            self.scope[delta] = other.view.pointer - source.view.pointer
            related.add(f"a_{other.name} - a_{source.name} == {delta}")
        if any(item.name.startswith("made") for item in containing) and others:
            raise _Unlike
        offset = value - source.view.pointer
        if not offset:
            return f"a_{source.name}"
        at = f"o{launched.names.index(name)}"
        self.scope[at] = offset
        return f"a_{source.name} + {at}"

    def _number(self, name: str, value: Any) -> str:
        """The expression of a number: of the argument that it follows, or as it was."""
        signature, bound = self.signature, self.signature.bound
        scale = signature.scales.get(name)
        if name == "max_seq_len" and bound in self.free:
            self.followed.add(bound)
            if value == self.free[bound]:
                self.tests.append(f"LOW <= {bound} <= HIGH")
                return bound
            if value > self.free[bound]:
                raise _Unlike
            self.scope["CAPACITY"] = value  # what the page table holds, however much more is asked for
            self.tests.append(f"{bound} >= CAPACITY")
        elif scale in self.free and value:
            factors = [1.0, LOG2_E, *(k for key, k in self.scope.items() if key[:2] == "k_" and type(k) is float)]
            factor = next((factor for factor in factors if self.free[scale] * factor == value), None)
            if factor is not None:
                self.followed.add(scale)
                self.scope[f"f_{name}"] = factor
                return f"{scale} * f_{name}" if factor != 1.0 else scale
        self.scope[f"n_{name}"] = value
        return f"n_{name}"

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
        return [f"    handle = {own} if stream is None else stream_handle(stream)" if given else f"    handle = {own}"]

    def _regions(self) -> list[str]:
        scratch = self.launched.scratch
        if scratch is None:
            return []
        self.scope |= {"held": scratch.held, "DEFAULT": scratch.default, "regions_at": scratch.regions_at}
        if self.workspace:
            return [f"    place = {self.workspace}.claim(handle)"]
        self.scope |= {"CONTEXT": self.launched.context, "legacy": scratch.legacy, "ClaimError": WorkspaceError}
        lines = ["    scratch = held.get(handle or DEFAULT)"]
        lines += self._refusal(["scratch is not None and scratch.context == CONTEXT"])
        lines += ["    try: place = scratch.claim(handle)", f"    except ClaimError: {self.form.unlike}"]
        if scratch.legacy is None:
            return lines
        short = ["    if not handle:", *(f"    {line}" for line in self._refusal(["legacy.of_legacy"]))]
        return [*short, "        place = legacy.place", "    else:", *(f"    {line}" for line in lines)]

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
        """The expressions that tell pools of parameter blocks apart, with the stream, and the numbers of the values
        that are written at each call: what is the same wherever the key is stays in the blocks."""
        prepared, scratch = self.launched.prepared, self.launched.scratch
        memory = [f"a_{item.name}" for item in self.tensors if item.name in self.signature.memory & self.used]
        moving = {number for number, value in enumerate(values) if value != "0" and not value.startswith(_CONSTANT)}
        keyed = [values[number] for number in sorted(prepared.resident & moving)] + memory
        placed = {number for number in moving if values[number].split(" ")[0] in memory}
        return keyed + (["place"] if scratch is not None else []), moving - prepared.resident - placed

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

    def _refusal(self, tests: Sequence[str]) -> list[str]:
        return [f"    if not ({' and '.join(tests)}):", f"        {self.form.unlike}"] if tests else []

    def _source(self, tensor: Any) -> str:
        for item in self.tensors:
            if item.tensor is tensor:
                return item.name
        raise _Unlike

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
        raise _Unlike
