"""One launch of a plan: what all its parameter blocks have in common, and which of its fields a run fills."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import UsageError
from .history import LaunchRecord
from .modules import LoadedKernel
from .plan import LaunchPlan, launch_config
from .struct_types import SCALARS
from .structs import PlacedField, StructLayout
from .tensormap import TensorMapSpec


class Input(NamedTuple):
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
        """The record of one launch for the history."""
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


@lru_cache(maxsize=256)  # the plans of a kernel have them in common
def _inputs(layout: StructLayout, inputs: tuple[tuple[str, str], ...], names: tuple[str, ...]) -> tuple[Input, ...]:
    items = []
    for name, value in inputs:
        member = layout.field(name)
        if member.type != "CUtensorMap" and (member.type not in SCALARS or member.type == "bool"):
            raise _unfit(layout, member)  # a packed bool takes anything as true
        code = "" if member.type == "CUtensorMap" else SCALARS[member.type].format[1:]
        items.append(Input(member, names.index(value), code))
    return tuple(items)


def _unfit(layout: StructLayout, member: PlacedField) -> UsageError:
    return UsageError(f"input {member.name!r} of struct {layout.name} is {member.type}: expected a number or pointer")
