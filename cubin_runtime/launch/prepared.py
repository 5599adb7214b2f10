"""Prepared launches: the parameters of a plan filled once, then patched and sent."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from ..errors import AbiError, UsageError
from . import driver_api as api
from .driver import Driver, DriverCallError, is_default
from .history import LaunchHistory, LaunchRecord
from .modules import LoadedKernel
from .plan import LaunchPlan, launch_config
from .structs import SCALARS, PlacedField, StructLayout
from .tensormap import MovedDescriptors, TensorMapCache, TensorMapSpec

# Errors of the driver if another context is current than a default stream is meant in, or none.
_ELSEWHERE = (api.INVALID_CONTEXT, api.INVALID_HANDLE)
ItemT = TypeVar("ItemT")
_NOT_WRITTEN = (IndexError, struct.error, TypeError, OverflowError)  # no spare block, or a value does not fit


class OtherContextError(Exception):
    """The stream is of another context of the kernel's device, as default streams of the current one are."""


class PreparedLaunches:
    """The launches of one plan in one context, in order; safe between threads without a lock.

    A launch takes the values called ``names``, in that order: a plan's ``inputs`` say which field takes which value.
    For descriptors that is an address. No launch allocates device memory, waits or loads anything, so all of them may
    be captured.

    ``run`` writes all values of the run; ``runs`` counts its calls, but for some of threads that call at once.
    Descriptors are encoded again where a tensor has moved; ``Senders`` keep those of ``resident`` values. Each call has
    a block of parameters for itself: blocks wait in a plain list, whose ``pop`` and ``append`` are atomic, and a thread
    that finds none makes one.
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
        launches = list(zip(plans, kernels, strict=True))
        for plan, kernel in launches:
            _check_fits(plan, kernel)
        self.launches = tuple([PreparedLaunch(plan, kernel, names) for plan, kernel in launches])
        self._device, self._context = kernels[0].device, kernels[0].context
        self.driver = driver
        self.names = tuple(names)
        # Not `or`: an empty cache is false.
        self._descriptors = TensorMapCache(driver) if descriptors is None else descriptors
        self.call: Any = driver.function("cuLaunchKernelEx")
        self.history, self.profiler = driver.history(self._context), driver.profiler
        self._lock = threading.RLock()
        self.runs = 0
        self._spare: list[list[ParameterBlock]] = []
        maps = {item.value for launch in self.launches for item in launch.inputs if not item.code}
        self.resident = frozenset(maps & {self.names.index(name) for name in resident if name in names})

    @cached_property
    def descriptor(self) -> MovedDescriptors:
        """The descriptors of tensors that have moved since the first run."""
        return MovedDescriptors(self._descriptors, self.driver, self._context)

    def resized(self, plans: Sequence[LaunchPlan]) -> PreparedLaunches:
        """Launches of the same kernels, with the same inputs, by plans with other grids and other values."""
        other = plain_copy(self)
        other.launches = tuple([launch.resized(plan) for launch, plan in zip(self.launches, plans, strict=True)])
        other.runs, other._spare = 0, []
        return other

    def run(self, stream: int, *values: Any, maps: Mapping[int, bytes] | None = None) -> None:
        """Send the launches on a stream (an int handle).

        ``maps`` are descriptors for this run alone, by the numbers of the values that the plan's would be made for.

        Raises:
            OtherContextError: the stream is of another context of the device.
            UsageError: a value does not fit its field, or the stream is of another device.
            DriverError: the driver refuses; for a fault of earlier work the error names the context's last launches.
        """
        self.runs += 1
        if None in values:  # which a pointer may be, but not that of a run
            raise self.unfit(TypeError("None"), values)
        try:
            blocks = self._spare.pop()
            for block in blocks:
                block.write(values, self.descriptor, maps)
        except _NOT_WRITTEN:
            blocks = self._new_blocks(values, maps)
        history, profiler = self.history, self.profiler
        for number, block in enumerate(blocks):
            config, function, arguments = block.config_on(stream), block.function, block.arguments
            history.record((block.launch, block.view.tobytes(), stream))
            begin = profiler.enter(block.launch.plan.kernel) if profiler else 0.0
            code = self.call(config, function, arguments, None)
            if profiler:
                profiler.leave(begin)
            if code and self._again(code, stream, config, function, arguments):
                raise self.failed(code) if number else OtherContextError
        self._spare.append(blocks)

    def _new_blocks(self, values: tuple[Any, ...], maps: Mapping[int, bytes] | None) -> list[ParameterBlock]:
        blocks = []
        for launch, contents in zip(self.launches, self.contents(values, written=frozenset(), maps=maps), strict=True):
            try:
                blocks.append(ParameterBlock(launch, contents, launch.inputs, values if maps is None else None))
            except UsageError as error:
                # If the plan's own values are at fault, that is the error.
                launch.plan.layout.pack(contents | {item.field.name: 0 for item in launch.inputs if item.code})
                raise self.unfit(error, values) from error
        return blocks

    def repeated(
        self, stream: int, values: Sequence[Any], moving: Collection[int], maps: Mapping[int, bytes]
    ) -> RepeatedLaunches | None:
        """The launches on one stream, sent again and again by one thread at a time with other values of the numbers
        ``moving`` and other descriptors; None: each launch is profiled.

        Raises:
            UsageError: a value does not fit its field.
        """
        if self.profiler is not None:
            return None
        blocks = self._new_blocks(tuple(values), maps)
        return RepeatedLaunches(blocks, stream, moving, self.call, self.history, self.failed)

    def unfit(self, error: Exception, values: Sequence[Any]) -> UsageError:
        """The error for a value that does not fit its field."""
        named = ", ".join(f"{name}={value!r}" for name, value in zip(self.names, values, strict=True))
        kernels = " and ".join(launch.plan.kernel for launch in self.launches)
        return UsageError(f"launch of {kernels} with {named}: {error}")

    def failed(self, code: int) -> DriverCallError:
        """The error for what the driver answered to a launch."""
        return self.driver.error("cuLaunchKernelEx", code, self._context)

    def contents(
        self, run_values: Sequence[Any], *, written: frozenset[int], maps: Mapping[int, bytes] | None = None
    ) -> list[dict[str, object]]:
        """The fields of each launch: as given where they are not written at each call, else those of the plan.

        A descriptor that is written is at any address that its tensor once had.
        """
        contents = []
        for launch in self.launches:
            fields: Any = launch.plan.values  # a proxy: its copy takes a sixth of the time of a dict made of it
            values, specs = fields.copy(), dict(launch.specs)
            for field, number, code in launch.inputs:
                name = field.name
                if code:
                    if number not in written:
                        values[name] = run_values[number]
                elif maps is not None:
                    values[name] = maps[number]
                    del specs[name]
                elif number in written and name in launch.templates:
                    values[name] = launch.templates[name]
                    del specs[name]
                else:
                    specs[name] = specs[name]._replace(address=run_values[number])
            if specs:
                with self.driver.using(self._context):
                    encoded = {name: self._descriptors.encode(spec) for name, spec in specs.items()}
                launch.templates.update(encoded)
                values |= encoded
            contents.append(values)
        return contents

    def _again(self, code: int, stream: int, config: Any, function: Any, arguments: Any) -> bool:
        """Launch again with the kernel's context current, which the default streams are meant in; else raise the error.

        True: the stream is of another context of the device, and nothing was launched.
        """
        driver, context, ordinal = self.driver, self._context, self._device.ordinal
        driver.check_process()
        if code in _ELSEWHERE and (is_default(stream) or not driver.is_capturing(stream)):
            stream_context = driver.context_on(ordinal) if is_default(stream) else driver.stream_context(stream)
            there = driver.context_device(stream_context)
            if there != ordinal:
                raise UsageError(
                    f"stream {stream:#x}: belongs to device {there}, the kernel is loaded on device {ordinal}"
                )
            if stream_context != context:
                return True
            with driver.using(context):
                code = self.call(config, function, arguments, None)
        if code:
            raise self.failed(code)
        return False


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
        self.templates: dict[str, bytes] = {}  # descriptors that were encoded last
        for item in self.inputs:
            if not item.code and item.field.name not in self.specs:
                raise _unfit(plan.layout, item.field)

    def resized(self, plan: LaunchPlan) -> PreparedLaunch:
        """A launch of the same kernel, with the same inputs, by a plan with another grid and other values."""
        other = plain_copy(self)
        other.plan = plan
        other.specs = {name: spec for name in self.specs if isinstance(spec := plan.values[name], TensorMapSpec)}
        other.templates = {
            name: self.templates[name] for name in self.templates if other.specs[name] == self.specs[name]
        }
        return other

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


def plain_copy(value: ItemT) -> ItemT:
    """A copy with the same attributes, in a fifth of the time of ``copy.copy``."""
    other = object.__new__(type(value))
    vars(other).update(vars(value))
    return other


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


class ParameterBlock:
    """Parameters and configuration of a launch; one thread uses it at a time.

    ``function`` and ``arguments`` are what the driver takes, ``view`` is the memory of the parameters.
    """

    __slots__ = (
        "_by_reference",
        "_config",
        "_kept",
        "_maps",
        "_rows",
        "_scalars",
        "arguments",
        "function",
        "launch",
        "view",
    )

    def __init__(
        self,
        launch: PreparedLaunch,
        contents: Mapping[str, object],
        inputs: Sequence[Input],
        values: Sequence[Any] | None = None,
    ) -> None:
        """``contents`` are those of all fields, ``inputs`` the fields that ``write`` fills; ``values`` are those of the
        run whose descriptors they have, None if they have a run's own."""
        self.launch = launch
        layout = launch.plan.layout
        memory = ctypes.create_string_buffer(layout.size + layout.alignment)
        begin = -ctypes.addressof(memory) % layout.alignment
        self.view = memoryview(memory).cast("B")[begin : begin + layout.size]
        self.view[:] = layout.pack(contents)
        self.function = ctypes.c_void_p(launch.function)
        self._config = launch.config_on(0)
        self._by_reference = ctypes.byref(self._config)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(memory) + begin)
        self.arguments = ctypes.byref(arguments)
        self._kept = memory, arguments
        self._scalars = tuple([(code, field.offset, number) for field, number, code in inputs if code])
        self._rows = _rows(self._scalars)
        self._maps: list[list[Any]] = [
            [
                field.offset,
                field.offset + field.size,
                number,
                launch.specs[field.name],
                values and values[number],
            ]
            for field, number, code in inputs
            if not code
        ]

    def write(
        self,
        values: Sequence[Any],
        descriptor: Callable[[TensorMapSpec, int], bytes],
        maps: Mapping[int, bytes] | None = None,
    ) -> None:
        """Write the values of another run; ``descriptor`` encodes the map of a tensor that has moved.

        ``maps`` are the run's own descriptors instead, by the number of their value.

        Raises:
            struct.error, TypeError, OverflowError: a value does not fit its field.
        """
        view = self.view
        for put, offset, of in self._rows:
            put(view, offset, *of(values))
        for moving in self._maps:
            begin, end, number, spec, address = moving
            if maps is not None:
                view[begin:end] = maps[number]
                moving[4] = None
            elif values[number] != address:
                view[begin:end] = descriptor(spec, values[number])
                moving[4] = values[number]

    def writing(self, moving: Collection[int]) -> Callable[[Sequence[Any], Mapping[int, bytes]], None]:
        """``write`` for the values of these numbers and the run's own descriptors, all else as it was."""
        view = self.view
        rows = _rows(tuple([scalar for scalar in self._scalars if scalar[2] in moving]))
        places = [(slice(begin, end), number) for begin, end, number, _, _ in self._maps]

        def write(values: Sequence[Any], maps: Mapping[int, bytes]) -> None:
            for put, offset, of in rows:
                put(view, offset, *of(values))
            for place, number in places:
                view[place] = maps[number]

        return write

    def config_on(self, stream: int) -> Any:
        """The configuration with that stream, as the driver takes it."""
        self._config.stream = stream
        return self._by_reference


_Row = tuple[Callable[..., None], int, Callable[[Sequence[Any]], Sequence[Any]]]


@lru_cache(maxsize=256)  # the plans of a kernel have them in common
def _rows(scalars: tuple[tuple[str, int, int], ...]) -> tuple[_Row, ...]:
    """The rows that write fields without a gap between them at once: function, offset, and the values among all."""
    runs: list[tuple[str, int, list[int]]] = []
    for code, offset, number in sorted(scalars, key=itemgetter(1)):
        if runs and runs[-1][1] + struct.calcsize(f"<{runs[-1][0]}") == offset:
            codes, begin, numbers = runs.pop()
            runs.append((codes + code, begin, [*numbers, number]))
        else:
            runs.append((code, offset, [number]))
    rows: list[_Row] = []
    for codes, offset, numbers in runs:
        of = itemgetter(*numbers) if len(numbers) > 1 else itemgetter(slice(numbers[0], numbers[0] + 1))
        rows.append((struct.Struct(f"<{codes}").pack_into, offset, of))
    return tuple(rows)


class RepeatedLaunches:
    """Parameter blocks of launches in order, written as a whole by ``renew`` and in part by ``send``."""

    def __init__(
        self,
        blocks: Sequence[ParameterBlock],
        stream: int,
        moving: Collection[int],
        call: Callable[..., int],
        history: LaunchHistory,
        failed: Callable[[int], Exception],
    ) -> None:
        """``moving`` are the numbers of the values that ``send`` writes; ``call`` is the driver's function."""
        self._blocks = [(block, block.writing(moving), block.config_on(stream)) for block in blocks]
        self._stream, self._call, self._failed = stream, call, failed
        self._record = history.record

    def renew(self, values: Sequence[Any], maps: Mapping[int, bytes]) -> None:
        """Write all values of the next launches.

        Raises:
            struct.error, TypeError, OverflowError: a value does not fit its field.
        """
        for block, _, _ in self._blocks:
            block.write(values, _none, maps)

    def send(self, values: Sequence[Any], maps: Mapping[int, bytes]) -> bool:
        """Send the launches with other descriptors and moving values; False: the driver refused the first.

        Raises:
            DriverError: the driver refuses one behind others.
        """
        sent = False
        for block, write, config in self._blocks:
            write(values, maps)
            self._record((block.launch, block.view.tobytes(), self._stream))
            code = self._call(config, block.function, block.arguments, None)
            if code:
                if sent:
                    raise self._failed(code)
                return False
            sent = True
        return True


def _none(spec: object, address: int) -> bytes:
    raise AssertionError("every descriptor comes with the call")


def _check_fits(plan: LaunchPlan, kernel: LoadedKernel) -> None:
    """Raise ``AbiError`` if a plan asks for more than its kernel was gated for."""
    planned, loaded = (plan.symbol, plan.sha256, plan.layout), (kernel.symbol, kernel.sha256, kernel.layout)
    if planned != loaded:
        raise AbiError(f"plan for {_identity(*planned)}; the kernel given is {_identity(*loaded)}")
    if plan.threads > kernel.max_threads:
        raise AbiError(f"plan of {plan.threads} threads per block; {kernel.symbol!r} takes {kernel.max_threads}")
    if plan.shared_bytes > kernel.shared_bytes:
        raise AbiError(
            f"plan of {plan.shared_bytes} bytes of dynamic shared memory; "
            f"{kernel.symbol!r} was loaded for {kernel.shared_bytes}"
        )
    if plan.attributes.nonportable_cluster and not kernel.nonportable_cluster:
        raise AbiError(f"plan with a non-portable cluster; {kernel.symbol!r} was loaded for portable ones")


def _identity(symbol: str, sha256: str, layout: StructLayout) -> str:
    return f"{symbol!r} (sha256 {sha256[:12]}, struct {layout.name} {layout.fingerprint[:16]})"
