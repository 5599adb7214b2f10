"""Prepared launches: the parameters of a plan filled once, then patched and sent by a function made for that plan."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..errors import AbiError, UsageError
from . import driver_api as api
from .accelerator import Senders, accelerator
from .driver import Driver, DriverCallError
from .modules import LoadedKernel
from .parameter_block import ParameterBlock, filled
from .plan import LaunchPlan
from .repeated import RepeatedLaunches
from .run_source import (
    Expressions,
    PreparedLaunch,
    accelerated_lines,
    block_parts,
    can_accelerate,
    fixed_lines,
    fixed_sends,
    send_lines,
)
from .streams import is_default
from .structs import StructLayout
from .tensormap import MovedDescriptors, TensorMapCache

# What the driver answers where another context is current than a default stream is meant in, or none.
_ELSEWHERE = (api.INVALID_CONTEXT, api.INVALID_HANDLE)
_NOT_WRITTEN = (IndexError, struct.error, TypeError, OverflowError)  # no spare block, or a value does not fit
_MAX_POOLS = 1024  # sets of resident addresses, such as the layers of a model
_Block = tuple[Any, ...]
_KeptT = TypeVar("_KeptT")
ELSEWHERE = "return elsewhere()"  # in the lines of ``bind``: where the stream is of another context of the device


class OtherContextError(Exception):
    """The stream is of another context of the kernel's device, as default streams of the current one are."""


class Sending(NamedTuple):
    """Lines that send launches, what they refer to, and the senders that they call; None: they call the driver."""

    lines: list[str]
    scope: dict[str, Any]
    senders: Senders | None = None


class PreparedLaunches:
    """The launches of one plan in one context, in order; safe between threads without a lock.

    A launch takes the values called ``names``, in that order: a plan's ``inputs`` say which field takes which value.
    For descriptors that is an address. No launch allocates device memory, waits or loads anything, so all of them may
    be captured.

    ``run`` writes all values of the run; ``runs`` counts its calls, but for some of threads that call at once.
    ``sending`` and ``bind`` give lines for a function that is generated for many calls, since straight code costs a
    third of a loop over the fields. Descriptors of ``resident`` names are then encoded once for each combination of
    addresses, others when they move. Each call has a block of parameters for itself: blocks wait in plain lists, whose
    ``pop`` and ``append`` are atomic, and a thread that finds none makes one.
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
        self._launches = tuple([PreparedLaunch(plan, kernel, names) for plan, kernel in launches])
        self._device, self._context = kernels[0].device, kernels[0].context
        self._driver = driver
        self.names = tuple(names)
        # Not `or`: an empty cache is false.
        self._descriptors = TensorMapCache(driver) if descriptors is None else descriptors
        self._descriptor = MovedDescriptors(self._descriptors, driver, self._context)
        self._call = driver.function("cuLaunchKernelEx")
        self._lock = threading.RLock()
        self.runs = 0
        self._spare: list[list[ParameterBlock]] = []
        maps = {item.value for launch in self._launches for item in launch.inputs if not item.code}
        self.resident = frozenset(maps & {self.names.index(name) for name in resident if name in names})

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
            raise self._unfit(TypeError("None"), values)
        try:
            blocks = self._spare.pop()
            for block in blocks:
                block.write(values, self._descriptor, maps)
        except _NOT_WRITTEN:
            blocks = self._new_blocks(values, maps)
        history, profiler = self._driver.history(self._context), self._driver.profiler
        for number, block in enumerate(blocks):
            config, function, arguments = block.config_on(stream), block.function, block.arguments
            history.record((block.launch, block.view.tobytes(), stream))
            history.tick()
            begin = profiler.enter(block.launch.plan.kernel) if profiler else 0.0
            code = self._call(config, function, arguments, None)
            if profiler:
                profiler.leave(begin)
            if code and self._again(code, stream, config, function, arguments):
                raise self._failed(code) if number else OtherContextError
        self._spare.append(blocks)

    def _new_blocks(self, values: tuple[Any, ...], maps: Mapping[int, bytes] | None) -> list[ParameterBlock]:
        blocks = []
        for launch, contents in zip(
            self._launches, self._contents(values, written=frozenset(), maps=maps), strict=True
        ):
            try:
                blocks.append(ParameterBlock(launch, contents, values))
                blocks[-1].write(values, self._descriptor, maps)  # which notes whose descriptors they are
            except UsageError as error:
                # If the plan's own values are at fault, that is the error.
                launch.plan.layout.pack(contents | {item.field.name: 0 for item in launch.inputs if item.code})
                raise self._unfit(error, values) from error
        return blocks

    def repeated(
        self, stream: int, values: Sequence[Any], moving: Collection[int], maps: Mapping[int, bytes]
    ) -> RepeatedLaunches | None:
        """The launches on one stream, sent again and again by one thread at a time with other values of the numbers
        ``moving`` and other descriptors; None: each launch is profiled.

        Raises:
            UsageError: a value does not fit its field.
        """
        if self._driver.profiler is not None:
            return None
        blocks = self._new_blocks(tuple(values), maps)
        history = self._driver.history(self._context)
        return RepeatedLaunches(blocks, stream, moving, self._call, history, self._failed)

    def sending(self, expressions: Expressions) -> Sending:
        """Lines that send the launches, for a function written elsewhere.

        What they keep for a key is the function's own, so nothing evicts what it needs
        but its own keys. Names that begin with an underscore are taken, and those of the scope.
        """
        senders = self._senders(expressions.written)
        if senders is None:
            return self._by_ctypes(expressions)
        lines = accelerated_lines(self._launches, expressions)
        return Sending(lines, {"pools": senders.made, "senders_of": senders.of, **self._explaining()}, senders)

    def _senders(self, written: Collection[int]) -> Senders | None:
        """What sends the launches by the accelerator, if that can."""
        module = accelerator()
        if module is None or self._driver.profiler is not None or not can_accelerate(self._launches, written):
            return None
        fixed = frozenset(written)
        contents, history = partial(self._contents, written=fixed), self._driver.history(self._context)
        return Senders(module, self._launches, self._call, contents, history, self._keep, fixed, self._failed)

    def _explaining(self) -> dict[str, Any]:
        return {"unfit": self._unfit, "again": self._in_full, "failed": self._failed}

    def _by_ctypes(self, expressions: Expressions) -> Sending:
        written = expressions.written
        pools: dict[Hashable, list[_Block]] = {}
        scope: dict[str, Any] = {
            "pools": pools,
            "pool_of": lambda key: self._keep(pools, key, []),
            "new_block": partial(self._new_block, frozenset(written)),
            "unfit": self._unfit,
            "descriptor": self._descriptor,
            **self._calling(),
        }
        for number, launch in enumerate(self._launches):
            moving = (item for item in enumerate(launch.inputs) if not item[1].code and item[1].value in written)
            scope |= {f"spec{number}_{index}": launch.specs[item.field.name] for index, item in moving}
        lines = send_lines(self._launches, expressions, profiled=self._driver.profiler is not None)
        return Sending(lines, scope)

    def bind(self, fixed: Mapping[str, Any], stream: int) -> Sending:
        """``sending`` on one stream with some values fixed, by name; the others are called ``v`` and their number."""
        scope: dict[str, Any] = {"stream": stream}
        values = []
        for number, name in enumerate(self.names):
            values.append(f"fixed{number}" if name in fixed else f"v{number}")
            scope |= {f"fixed{number}": fixed[name]} if name in fixed else {}
        free = {number for number, name in enumerate(self.names) if name not in fixed}
        if free:
            sending = self.sending(
                Expressions(values=values, written=free, key="()", stream="stream", elsewhere=ELSEWHERE)
            )
            return sending._replace(scope=scope | sending.scope)
        given = tuple(fixed[name] for name in self.names)
        senders = self._senders(())
        if senders is not None:
            sends = senders.of((), stream, given)
            scope |= {f"send{number}": send for number, send in enumerate(sends)} | {"given": given}
            return Sending(fixed_sends(len(sends), ELSEWHERE), scope | self._explaining())
        *_, made = self._new_block(frozenset(), stream, given)
        for number, launch in enumerate(self._launches):
            made[f"entry{number}"] = (launch, made[f"bytes{number}"](), stream)
        lines = fixed_lines(self._launches, "stream", ELSEWHERE, profiled=self._driver.profiler is not None)
        return Sending(lines, scope | self._calling() | made)

    def _calling(self) -> dict[str, Any]:
        """What the lines refer to that call the driver."""
        history, profiler = self._driver.history(self._context), self._driver.profiler
        scope: dict[str, Any] = {"record": history.record, "tick": history.tick}
        scope |= {"call": self._call, "again": self._again, "failed": self._failed}
        if profiler is not None:
            scope |= {"enter": profiler.enter, "leave": profiler.leave}
        for number, launch in enumerate(self._launches):
            scope |= {f"launch{number}": launch, f"function{number}": ctypes.c_void_p(launch.function)}
        return scope

    def _in_full(self, stream: int, *values: Any) -> bool:
        """``run`` for launches that the driver refused: it finds out why. True: the stream is of another context."""
        try:
            self.run(stream, *values)
        except OtherContextError:
            return True
        return False

    def _keep(self, pools: dict[Hashable, _KeptT], key: Hashable, made: _KeptT) -> _KeptT:
        """What is kept for a key: ``made``, unless another thread was first. The oldest make room."""
        with self._lock:
            while len(pools) >= _MAX_POOLS and key not in pools:
                pools.pop(next(iter(pools)))
            return pools.setdefault(key, made)

    def _new_block(self, written: frozenset[int], stream: int, given: tuple[Any, ...]) -> _Block:
        """A block for calls with these values, of which those that are ``written`` do not count."""
        made: dict[str, Any] = {}
        contents = self._contents(given, written=written)
        for number, launch in enumerate(self._launches):
            view, start, memory = filled(launch.plan.layout, contents[number])
            arguments = (ctypes.c_void_p * 1)(start)
            for item in launch.inputs:
                if item.code:
                    made[f"{item.code}{number}"] = view.cast(item.code)  # type: ignore[call-overload]
            made |= {
                f"view{number}": view,
                f"moved{number}": [None] * len(launch.inputs),
                f"bytes{number}": view.tobytes,
                f"config{number}": ctypes.byref(launch.config_on(stream)),  # which keeps what it refers to alive
                f"arguments{number}": ctypes.byref(arguments),
                f"memory{number}": memory,
            }
        return (*(made[part] for part in block_parts(self._launches, written)), made)

    def _contents(
        self, given: Sequence[Any], *, written: frozenset[int], maps: Mapping[int, bytes] | None = None
    ) -> list[dict[str, object]]:
        """The fields of each launch: as given where they are not written at each call, else those of the plan."""
        found = []
        for launch in self._launches:
            values, specs = dict(launch.plan.values), dict(launch.specs)
            for field, number, code in launch.inputs:
                if number in written:
                    continue
                if code:
                    values[field.name] = given[number]
                elif maps is not None:
                    values[field.name] = maps[number]
                    del specs[field.name]
                else:
                    specs[field.name] = specs[field.name].moved(given[number])
            if specs:
                with self._driver.using(self._context):
                    values |= {name: self._descriptors.encode(spec) for name, spec in specs.items()}
            found.append(values)
        return found

    def _unfit(self, error: Exception, values: tuple[Any, ...]) -> UsageError:
        given = ", ".join(f"{name}={value!r}" for name, value in zip(self.names, values, strict=True))
        kernels = " and ".join(launch.plan.kernel for launch in self._launches)
        return UsageError(f"launch of {kernels} with {given}: {error}")

    def _failed(self, code: int) -> DriverCallError:
        return self._driver.error("cuLaunchKernelEx", code, self._context)

    def _again(self, code: int, stream: int, config: Any, function: Any, arguments: Any) -> bool:
        """Once more with the kernel's context current, which the default streams are meant in; else the error.

        True: the stream is of another context of the device, and nothing was launched.
        """
        driver, context, ordinal = self._driver, self._context, self._device.ordinal
        driver.check_process()
        if code in _ELSEWHERE and (is_default(stream) or not driver.is_capturing(stream)):
            its = driver.context_on(ordinal) if is_default(stream) else driver.stream_context(stream)
            there = driver.context_device(its)
            if there != ordinal:
                raise UsageError(
                    f"stream {stream:#x}: belongs to device {there}, the kernel is loaded on device {ordinal}"
                )
            if its != context:
                return True
            with driver.using(context):
                code = self._call(config, function, arguments, None)
        if code:
            raise self._failed(code)
        return False


def _check_fits(plan: LaunchPlan, kernel: LoadedKernel) -> None:
    """Raise ``AbiError`` if a plan asks for more than its kernel was gated for."""
    wanted, given = (plan.symbol, plan.sha256, plan.layout), (kernel.symbol, kernel.sha256, kernel.layout)
    if wanted != given:
        raise AbiError(f"plan for {_identity(*wanted)}; the kernel given is {_identity(*given)}")
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
