"""The source of the function that sends prepared launches: which words of the parameters it writes, and the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from .history import LaunchRecord
from .modules import LoadedKernel
from .plan import LaunchPlan
from .struct_types import SCALARS
from .structs import PlacedField
from .tensormap import TensorMapSpec


@dataclass(frozen=True, slots=True)
class _Input:
    """A field that takes a value at each run: the index of the value, and the descriptor to move, if it is one."""

    field: PlacedField
    value: int
    spec: TensorMapSpec | None

    @property
    def code(self) -> str:
        """The format character of a scalar."""
        return SCALARS[self.field.type].format[1:]


class PreparedLaunch:
    """One launch of the plan: what is the same in all its parameter blocks."""

    def __init__(self, plan: LaunchPlan, kernel: LoadedKernel, names: Sequence[str]) -> None:
        self.plan = plan
        self.function = kernel.function
        self.inputs = tuple(_input(plan, name, names.index(value)) for name, value in plan.inputs.items())

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

    @property
    def codes(self) -> list[str]:
        """The format characters of its scalars, each of which has a view of the block."""
        return sorted({item.code for item in self.inputs if item.spec is None})


def run_source(launches: Sequence[PreparedLaunch], values: Sequence[int], resident: tuple[int, ...] | None) -> str:
    """The source of ``run``, which takes the values of these numbers.

    ``resident`` are those by which blocks of parameters are kept in pools of their own; None: all values that are not
    taken and the stream are fixed. ``v3`` is the value of that number among all, ``I1`` a view of the second launch's
    block as words of that format.
    """
    given = [f"v{number}" for number in values]
    lines = [f"def run({', '.join(given if resident is None else ['stream', *given])}):"]
    if resident is None:
        key = ""
    else:
        key = "key"
        lines += [
            f"    key = ({''.join(f'v{value}, ' for value in resident)})",
            "    pool = pools.get(key)",
            "    if pool is None:",
            "        pool = new_pool(key)",
        ]
    lines += [
        "    try:",
        f"        block = {'pools' if resident is None else 'pool'}.pop()",
        "    except IndexError:",
        f"        block = new_block({key})",
        f"    {''.join(f'{part}, ' for part in block_parts(launches))}= block",
    ]
    scalars = []
    for number, launch in enumerate(launches):
        for index, item in enumerate(launch.inputs):
            if f"v{item.value}" not in given:
                continue
            if item.spec is None:
                where = item.field.offset // item.field.size
                scalars.append(f"        {item.code}{number}[{where}] = v{item.value}")
            elif item.value not in (resident or ()):
                lines += _moving(number, index, item)
    if scalars:
        lines += [
            "    try:",
            *scalars,
            "    except (TypeError, ValueError, OverflowError) as error:",
            f"        raise unfit(error, {', '.join(f'{value!r}, {value}' for value in given)}) from error",
        ]
    for number in range(len(launches)):
        lines += [f"    config{number}.stream = stream"] if resident is not None else []
        lines += [
            f"    record((launch{number}, bytes{number}(), stream))",
            f"    code = call(config_at{number}, function{number}, arguments_at{number}, None)",
            "    if code:",
            f"        again(code, stream, config_at{number}, function{number}, arguments_at{number})",
        ]
    lines.append(f"    {'pools' if resident is None else 'pool'}.append(block)")
    return "\n".join([*lines, ""])


def block_parts(launches: Sequence[PreparedLaunch]) -> list[str]:
    """The names of what a block holds, in order."""
    parts = []
    for number, launch in enumerate(launches):
        common = ("view", "moved", "bytes", "config", "config_at", "arguments_at", "keep")
        parts += [f"{part}{number}" for part in (*launch.codes, *common)]
    return parts


def _moving(number: int, index: int, item: _Input) -> list[str]:
    """The lines that encode a descriptor again where its tensor has moved."""
    begin, end = item.field.offset, item.field.offset + item.field.size
    return [
        f"    if moved{number}[{index}] != v{item.value}:",
        f"        view{number}[{begin}:{end}] = descriptor(spec{number}_{index}, v{item.value})",
        f"        moved{number}[{index}] = v{item.value}",
    ]


def _input(plan: LaunchPlan, name: str, value: int) -> _Input:
    member, planned = plan.layout.field(name), plan.values[name]
    if member.type == "CUtensorMap" and isinstance(planned, TensorMapSpec):
        return _Input(member, value, planned)
    if member.type not in SCALARS or member.type == "bool":  # a packed bool takes anything as true
        raise UsageError(f"input {name!r} of struct {plan.layout.name} is {member.type}: expected a number or pointer")
    return _Input(member, value, None)
