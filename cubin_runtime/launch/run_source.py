"""The source of the function that sends prepared launches: which words of the parameters it writes, and the calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import UsageError
from ..values import dataclass
from .history import LaunchRecord
from .modules import LoadedKernel
from .plan import LaunchPlan, launch_config
from .struct_types import SCALARS
from .structs import PlacedField, StructLayout
from .tensormap import TensorMapSpec

_ACCELERATED_BYTES = 4096  # of parameters, which the accelerator copies to its stack


class _Input(NamedTuple):
    """A field that takes a value at each run: the index of the value, and the format character, if it is a scalar."""

    field: PlacedField
    value: int
    code: str


class PreparedLaunch:
    """One launch of the plan: what is the same in all its parameter blocks."""

    def __init__(self, plan: LaunchPlan, kernel: LoadedKernel, names: Sequence[str]) -> None:
        self.plan = plan
        self.function = kernel.function
        self.inputs = _inputs(plan.layout, tuple(plan.inputs.items()), tuple(names))
        descriptors = [(name, plan.values[name]) for name in plan.layout.descriptors]
        self.specs = {name: spec for name, spec in descriptors if isinstance(spec, TensorMapSpec)}
        for item in self.inputs:
            if not item.code and item.field.name not in self.specs:
                raise _unfit(plan.layout, item.field)

    def config_on(self, stream: int) -> Any:
        """A CUlaunchConfig on a stream; it keeps what it refers to alive."""
        plan = self.plan
        config = launch_config(plan.grid, plan.block, plan.shared_bytes, plan.attributes)
        config.stream = stream
        return config

    def record_of(self, parameters: bytes, stream: int) -> LaunchRecord:
        """What the history keeps of one launch."""
        plan = self.plan
        return LaunchRecord(
            kernel=plan.kernel,
            symbol=plan.symbol,
            sha256=plan.sha256,
            grid=plan.grid,
            block=plan.block,
            shared_bytes=plan.shared_bytes,
            attributes=str(plan.attributes),
            stream=stream,
            layout=plan.layout,
            parameters=parameters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressions:
    """What lines that send launches are written with.

    Attributes:
        values: expressions of all values; a launch takes those of its inputs' numbers.
        written: numbers of those that are written at each call; the others are the same for all calls of one key.
        key: expression of what tells pools of parameter blocks apart; it decides the stream too.
        stream: expression of its handle.
        elsewhere: the statement where the stream is of another context of the device.
        refusal: lines that refuse values which the key holds; they run where no block of the key waits.
        late: lines behind those, for values that are written.
    """

    values: Sequence[str]
    written: Collection[int]
    key: str
    stream: str
    elsewhere: str
    refusal: Sequence[str] = ()
    late: Sequence[str] = ()

    @property
    def unwritten(self) -> str:
        """The values that are not written, None for the others."""
        values = enumerate(self.values)
        return "".join(f"{'None' if number in self.written else value}, " for number, value in values)


def send_lines(launches: Sequence[PreparedLaunch], of: Expressions, *, profiled: bool) -> list[str]:
    """The lines that send the launches; ``profiled``: with ``enter`` and ``leave`` of a profiler around each."""
    values, written, stream = of.values, of.written, of.stream
    parts = block_parts(launches, written)
    lines = [
        f"_key = {of.key}",
        "try:",
        "    _pool = pools[_key]",
        "    _block = _pool.pop()",
        "except LookupError:",
        *(f"    {line}" for line in of.refusal),
        "    _pool = pool_of(_key)",
        f"    _block = new_block({stream}, ({of.unwritten}))",
        f"{''.join(f'{part}, ' for part in parts)}_kept = _block",
        *of.late,
    ]
    scalars = []
    for number, launch in enumerate(launches):
        for index, item in enumerate(launch.inputs):
            if item.value not in written:
                continue
            if item.code:
                where = item.field.offset // item.field.size
                scalars.append(f"    {item.code}{number}[{where}] = {values[item.value]}")
            else:
                lines += _moving(number, index, item, values[item.value])
    if scalars:
        given = ", ".join(values)
        lines += ["try:", *scalars, "except (TypeError, ValueError, OverflowError) as error:"]
        lines += [f"    raise unfit(error, ({given},)) from error"]
    for number in range(len(launches)):
        lines.append(f"record((launch{number}, bytes{number}(), {stream}))")
        lines += _call(number, stream, of.elsewhere, profiled=profiled)
    return [*lines, "_pool.append(_block)"]


def can_accelerate(launches: Sequence[PreparedLaunch], written: Collection[int]) -> bool:
    """Whether the accelerator can write what is written at each call, which descriptors are not."""
    moving = (item for launch in launches for item in launch.inputs if item.value in written)
    sizes = (launch.plan.layout.size for launch in launches)
    return all(item.code for item in moving) and max(sizes) <= _ACCELERATED_BYTES


def accelerated_lines(launches: Sequence[PreparedLaunch], of: Expressions) -> list[str]:
    """The lines of ``send_lines`` with the accelerator, whose senders need no lock and no block for each call."""
    given, sends = ", ".join(of.values), list[str]()
    for number, launch in enumerate(launches):
        moving = (of.values[item.value] for item in launch.inputs if item.value in of.written)
        sends.append(f"_send{number}({', '.join(moving)})")
    return [
        f"_key = {of.key}",
        "_senders = pools.get(_key)",
        "if _senders is None:",
        *(f"    {line}" for line in of.refusal),
        f"    _senders = senders_of(_key, {of.stream}, ({of.unwritten}))",
        f"{''.join(f'_send{number}, ' for number in range(len(launches)))}= _senders",
        *of.late,
        "try:",
        *(f"    {line}" for line in _codes(sends)),
        "except (TypeError, ValueError, OverflowError) as error:",
        f"    raise unfit(error, ({given},)) from error",
        *_explained(sends, f"{of.stream}, {given}", of.elsewhere),
    ]


def _codes(sends: Sequence[str]) -> list[str]:
    """The lines that send launches in order until one is refused."""
    first, *later = sends
    return [f"_code = {first}", *([f"_later = 0 if _code else {' or '.join(later)}"] if later else [])]


def _explained(sends: Sequence[str], given: str, elsewhere: str) -> list[str]:
    """The lines for a launch that was refused: behind the first, nothing is sent again."""
    lines = [f"if _code and again({given}):", f"    {elsewhere}"]
    return [*lines, "if _later:", "    raise failed(_later)"] if len(sends) > 1 else lines


def fixed_lines(launches: Sequence[PreparedLaunch], stream: str, elsewhere: str, *, profiled: bool) -> list[str]:
    """The lines that send launches all of whose values are fixed: threads share the one block, which nobody writes."""
    return [
        line
        for number in range(len(launches))
        for line in (f"record(entry{number})", *_call(number, stream, elsewhere, profiled=profiled))
    ]


def fixed_sends(launches: int, elsewhere: str) -> list[str]:
    """The lines of ``fixed_lines`` with the accelerator."""
    sends = [f"send{number}()" for number in range(launches)]
    return [*_codes(sends), *_explained(sends, "stream, *given", elsewhere)]


def _call(number: int, stream: str, elsewhere: str, *, profiled: bool) -> list[str]:
    arguments = f"config{number}, function{number}, arguments{number}"
    return [
        "tick()",
        *([f"_begin = enter(launch{number}.plan.kernel)"] if profiled else []),
        f"_code = call({arguments}, None)",
        *(["leave(_begin)"] if profiled else []),
        f"if _code and again(_code, {stream}, {arguments}):",
        f"    {'raise failed(_code)' if number else elsewhere}",
    ]


def block_parts(launches: Sequence[PreparedLaunch], written: Collection[int]) -> list[str]:
    """The names of what a block holds for its function, in order; ``_kept`` follows, which keeps the rest alive."""
    parts = []
    for number, launch in enumerate(launches):
        codes = {item.code for item in launch.inputs if item.code and item.value in written}
        parts += [f"{code}{number}" for code in sorted(codes)]
        if any(not item.code and item.value in written for item in launch.inputs):
            parts += [f"view{number}", f"moved{number}"]
        parts += [f"bytes{number}", f"config{number}", f"arguments{number}"]
    return parts


def _moving(number: int, index: int, item: _Input, value: str) -> list[str]:
    """The lines that encode a descriptor again where its tensor has moved."""
    begin, end = item.field.offset, item.field.offset + item.field.size
    return [
        f"if moved{number}[{index}] != {value}:",
        f"    view{number}[{begin}:{end}] = descriptor(spec{number}_{index}, {value})",
        f"    moved{number}[{index}] = {value}",
    ]


@lru_cache(maxsize=256)  # the plans of a kernel have them in common
def _inputs(layout: StructLayout, inputs: tuple[tuple[str, str], ...], names: tuple[str, ...]) -> tuple[_Input, ...]:
    found = []
    for name, value in inputs:
        member = layout.field(name)
        if member.type != "CUtensorMap" and (member.type not in SCALARS or member.type == "bool"):
            raise _unfit(layout, member)  # a packed bool takes anything as true
        code = "" if member.type == "CUtensorMap" else SCALARS[member.type].format[1:]
        found.append(_Input(member, names.index(value), code))
    return tuple(found)


def _unfit(layout: StructLayout, member: PlacedField) -> UsageError:
    return UsageError(f"input {member.name!r} of struct {layout.name} is {member.type}: expected a number or pointer")
