"""Prepared launches: the parameters of a plan filled once, then patched and sent by a function made for that plan."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import AbiError, UsageError
from . import driver_api as api
from .compiled import compiled
from .driver import Driver
from .history import LaunchRecord
from .modules import LoadedKernel
from .plan import LaunchPlan, launch_config
from .streams import is_default
from .struct_types import SCALARS
from .structs import PlacedField, StructLayout
from .tensormap import TensorMapCache, TensorMapSpec

# What the driver answers where another context is current than a default stream is meant in, or none.
_ELSEWHERE = (api.INVALID_CONTEXT, api.INVALID_HANDLE)
_MAX_POOLS = 1024  # sets of resident addresses, such as the layers of a model
_Block = tuple[Any, ...]


class OtherContextError(Exception):
    """A launch on a default stream, while another context of the kernel's device is current; nothing was launched."""


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


class _Launch:
    """One launch of the plan: what is the same in all its parameter blocks."""

    def __init__(self, plan: LaunchPlan, kernel: LoadedKernel, names: Sequence[str]) -> None:
        _check_fits(plan, kernel)
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


class PreparedLaunches:
    """The launches of one plan in one context, in order; safe between threads without a lock.

    ``run(stream, *values)`` takes an int handle and the values called ``names``, in that order: a plan's ``inputs`` say
    which field takes which value. For descriptors that is an address; those of ``resident`` names are encoded once for
    each combination of addresses, others when they move. A run allocates no device memory, waits for nothing and loads
    nothing, so it may be captured.

    Each run has a block of parameters for itself: blocks wait in plain lists, whose ``pop`` and ``append`` are atomic,
    and a thread that finds none makes one. The function is generated, since one straight line of code costs a third of
    a loop over the fields; ``source`` has it.

    Raises (``run``):
        OtherContextError: the stream is a default one, and another context of the device is current.
        UsageError: a value does not fit its field, or the stream is of another device.
        DriverError: the driver refuses; for a fault of earlier work the error names the last launches of the context.
    """

    def __init__(
        self,
        plans: Sequence[LaunchPlan],
        kernels: Sequence[LoadedKernel],
        driver: Driver,
        names: Sequence[str] = (),
        *,
        resident: Sequence[str] = (),
        descriptors: TensorMapCache | None = None,
    ) -> None:
        """Check that the plans fit their kernels, which are loaded in one context.

        Raises:
            AbiError: a plan asks for more than its kernel was gated for.
            UsageError: an input names no value, or a field that takes none.
        """
        self._launches = tuple(_Launch(plan, kernel, names) for plan, kernel in zip(plans, kernels, strict=True))
        self._device, self._context = kernels[0].device, kernels[0].context
        self._driver = driver
        self._names = tuple(names)
        # Not `or`: an empty cache is false.
        self._descriptors = TensorMapCache(driver) if descriptors is None else descriptors
        self._call = driver.function("cuLaunchKernelEx")
        self._lock = threading.Lock()
        self._pools: dict[Hashable, list[_Block]] = {}
        maps = {item.value for launch in self._launches for item in launch.inputs if item.spec is not None}
        self._resident = tuple(sorted(maps & {self._names.index(name) for name in resident if name in names}))
        self.source = self._write()
        self.run: Callable[..., None] = self._compile()

    def _write(self) -> str:
        """The source of ``run``; ``v3`` is the value of that number, ``words1`` a view of the second launch's block."""
        key = "".join(f"v{value}, " for value in self._resident)
        lines = [
            f"def run(stream{''.join(f', v{number}' for number in range(len(self._names)))}):",
            f"    key = ({key})",
            "    pool = pools.get(key)",
            "    if pool is None:",
            "        pool = new_pool(key)",
            "    try:",
            "        block = pool.pop()",
            "    except IndexError:",
            "        block = new_block(key)",
            f"    {''.join(f'{part}, ' for part in self._parts())}= block",
        ]
        scalars = ["        pass"]
        for number, launch in enumerate(self._launches):
            for index, item in enumerate(launch.inputs):
                if item.spec is None:
                    where = item.field.offset // item.field.size
                    scalars.append(f"        {item.code}{number}[{where}] = v{item.value}")
                elif item.value not in self._resident:
                    lines += _moving(number, index, item)
        lines += [
            "    try:",
            *scalars,
            "    except (TypeError, ValueError, OverflowError) as error:",
            f"        raise unfit(error{''.join(f', v{number}' for number in range(len(self._names)))}) from error",
        ]
        for number in range(len(self._launches)):
            lines += [
                f"    config{number}.stream = stream",
                f"    record((launch{number}, bytes{number}(), stream))",
                f"    code = call(config_at{number}, function{number}, arguments_at{number}, None)",
                "    if code:",
                f"        again(code, stream, config_at{number}, function{number}, arguments_at{number})",
            ]
        return "\n".join([*lines, "    pool.append(block)", ""])

    def _parts(self) -> list[str]:
        """The names of what a block holds, in order."""
        parts = []
        for number, launch in enumerate(self._launches):
            common = ("view", "moved", "bytes", "config", "config_at", "arguments_at", "keep")
            parts += [f"{part}{number}" for part in (*_codes(launch), *common)]
        return parts

    def _compile(self) -> Callable[..., None]:
        scope: dict[str, Any] = {
            "pools": self._pools,
            "new_pool": self._new_pool,
            "new_block": self._new_block,
            "unfit": self._unfit,
            "record": self._driver.history(self._context).record,
            "call": self._call,
            "again": self._again,
            "descriptor": self._descriptor,
        }
        for number, launch in enumerate(self._launches):
            scope |= {f"launch{number}": launch, f"function{number}": launch.function}
            moving = (item for item in enumerate(launch.inputs) if item[1].spec and item[1].value not in self._resident)
            scope |= {f"spec{number}_{index}": item.spec for index, item in moving}
        return compiled("run", self.source, scope)

    def _new_pool(self, key: Hashable) -> list[_Block]:
        with self._lock:
            while len(self._pools) >= _MAX_POOLS:
                self._pools.pop(next(iter(self._pools)))
            return self._pools.setdefault(key, [])

    def _new_block(self, key: tuple[int, ...]) -> _Block:
        """A block for the resident addresses ``key``; its other inputs are still those of the plan."""
        addresses = dict(zip(self._resident, key, strict=True))
        parts: list[Any] = []
        with self._driver.using(self._context):
            for launch in self._launches:
                plan = launch.plan
                values = {
                    **plan.values,
                    **{
                        item.field.name: item.spec.moved(addresses[item.value])
                        for item in launch.inputs
                        if item.spec is not None and item.value in addresses
                    },
                }
                view, start, memory = _filled(plan.layout, {name: self._plain(value) for name, value in values.items()})
                config = launch_config(plan.grid, plan.block, plan.shared_bytes, plan.attributes)
                arguments = (ctypes.c_void_p * 1)(start)
                parts += [view.cast(code) for code in _codes(launch)]  # type: ignore[call-overload]
                parts += [view, [None] * len(launch.inputs), view.tobytes, config, ctypes.addressof(config)]
                parts += [ctypes.addressof(arguments), (memory, arguments)]
        return tuple(parts)

    def _plain(self, value: object) -> object:
        return self._descriptors.encode(value) if isinstance(value, TensorMapSpec) else value

    def _descriptor(self, spec: TensorMapSpec, address: int) -> bytes:
        with self._driver.using(self._context):
            return self._descriptors.encode(spec.moved(address))

    def _unfit(self, error: Exception, *values: object) -> UsageError:
        given = ", ".join(f"{name}={value!r}" for name, value in zip(self._names, values, strict=True))
        kernels = " and ".join(launch.plan.kernel for launch in self._launches)
        return UsageError(f"launch of {kernels} with {given}: {error}")

    def _again(self, code: int, stream: int, config_at: int, function: int, arguments_at: int) -> None:
        """Once more with the kernel's context current, which the default streams are meant in; else the error."""
        driver, context = self._driver, self._context
        if code in _ELSEWHERE:
            current = driver.current_context() if is_default(stream) else None
            if current not in (None, context) and driver.context_device() == self._device.ordinal:
                raise OtherContextError
            with driver.using(context):
                if not is_default(stream) and driver.stream_context(stream) != context:
                    there = driver.context_device(driver.stream_context(stream))
                    raise UsageError(
                        f"stream {stream:#x}: of device {there}, the kernel is loaded on device {self._device.ordinal}"
                    )
                code = self._call(config_at, function, arguments_at, None)
        if code:
            raise driver.error("cuLaunchKernelEx", code, context)


def _moving(number: int, index: int, item: _Input) -> list[str]:
    """The lines that encode a descriptor again where its tensor has moved."""
    begin, end = item.field.offset, item.field.offset + item.field.size
    return [
        f"    if moved{number}[{index}] != v{item.value}:",
        f"        view{number}[{begin}:{end}] = descriptor(spec{number}_{index}, v{item.value})",
        f"        moved{number}[{index}] = v{item.value}",
    ]


def _codes(launch: _Launch) -> list[str]:
    return sorted({item.code for item in launch.inputs if item.spec is None})


def _filled(layout: StructLayout, values: dict[str, object]) -> tuple[memoryview, int, Any]:
    """Memory with the struct's bytes, aligned as the struct: a view, its address, and what keeps it alive."""
    memory = ctypes.create_string_buffer(layout.size + layout.alignment)
    offset = -ctypes.addressof(memory) % layout.alignment
    view = memoryview(memory).cast("B")[offset : offset + layout.size]
    view[:] = layout.pack(values)
    return view, ctypes.addressof(memory) + offset, memory


def _input(plan: LaunchPlan, name: str, value: int) -> _Input:
    member, planned = plan.layout.field(name), plan.values[name]
    if member.type == "CUtensorMap" and isinstance(planned, TensorMapSpec):
        return _Input(member, value, planned)
    if member.type not in SCALARS or member.type == "bool":  # a packed bool takes anything as true
        raise UsageError(f"input {name!r} of struct {plan.layout.name} is {member.type}: expected a number or pointer")
    return _Input(member, value, None)


def _check_fits(plan: LaunchPlan, kernel: LoadedKernel) -> None:
    wanted = _identity(plan.symbol, plan.sha256, plan.layout)
    given = _identity(kernel.symbol, kernel.sha256, kernel.layout)
    if (plan.sha256, wanted) != (kernel.sha256, given):
        raise AbiError(f"plan for {wanted}; the kernel given is {given}")
    if plan.threads > kernel.max_threads:
        raise AbiError(f"plan of {plan.threads} threads a block; {kernel.symbol!r} takes {kernel.max_threads}")
    if plan.shared_bytes > kernel.shared_bytes:
        raise AbiError(
            f"plan of {plan.shared_bytes} bytes of dynamic shared memory; "
            f"{kernel.symbol!r} was loaded for {kernel.shared_bytes}"
        )
    if plan.attributes.nonportable_cluster and not kernel.nonportable_cluster:
        raise AbiError(f"plan with a non-portable cluster; {kernel.symbol!r} was loaded for portable ones")


def _identity(symbol: str, sha256: str, layout: StructLayout) -> str:
    return f"{symbol!r} (sha256 {sha256[:12]}, struct {layout.name} {layout.fingerprint[:16]})"
