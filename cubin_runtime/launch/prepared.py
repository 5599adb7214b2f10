"""Prepared launches: the parameters of a plan filled once, then patched and sent."""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import AbiError, UsageError
from . import driver_api as api
from .driver import Driver, DriverCallError
from .history import LaunchHistory
from .modules import LoadedKernel
from .parameter_block import ParameterBlock
from .plan import LaunchPlan
from .prepared_launch import PreparedLaunch
from .profiler import Profiler
from .repeated import RepeatedLaunches
from .streams import is_default
from .structs import StructLayout
from .tensormap import MovedDescriptors, TensorMapCache

# Errors of the driver if another context is current than a default stream is meant in, or none.
_ELSEWHERE = (api.INVALID_CONTEXT, api.INVALID_HANDLE)
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
        self._driver = driver
        self.names = tuple(names)
        # Not `or`: an empty cache is false.
        self._descriptors = TensorMapCache(driver) if descriptors is None else descriptors
        self.descriptor = MovedDescriptors(self._descriptors, driver, self._context)
        self.call: Any = driver.function("cuLaunchKernelEx")
        self._lock = threading.RLock()
        self.runs = 0
        self._spare: list[list[ParameterBlock]] = []
        maps = {item.value for launch in self.launches for item in launch.inputs if not item.code}
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
            history.tick()
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
                blocks.append(ParameterBlock(launch, contents, launch.inputs, values))
                blocks[-1].write(values, self.descriptor, maps)  # which notes whose descriptors they are
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

    @property
    def history(self) -> LaunchHistory:
        """The last launches in the context."""
        return self._driver.history(self._context)

    @property
    def profiler(self) -> Profiler | None:
        """The driver's, if it has one."""
        return self._driver.profiler

    def unfit(self, error: Exception, values: Sequence[Any]) -> UsageError:
        """The error for a value that does not fit its field."""
        named = ", ".join(f"{name}={value!r}" for name, value in zip(self.names, values, strict=True))
        kernels = " and ".join(launch.plan.kernel for launch in self.launches)
        return UsageError(f"launch of {kernels} with {named}: {error}")

    def failed(self, code: int) -> DriverCallError:
        """The error for what the driver answered to a launch."""
        return self._driver.error("cuLaunchKernelEx", code, self._context)

    def contents(
        self, run_values: Sequence[Any], *, written: frozenset[int], maps: Mapping[int, bytes] | None = None
    ) -> list[dict[str, object]]:
        """The fields of each launch: as given where they are not written at each call, else those of the plan."""
        contents = []
        for launch in self.launches:
            values, specs = dict(launch.plan.values), dict(launch.specs)
            for field, number, code in launch.inputs:
                if number in written:
                    continue
                if code:
                    values[field.name] = run_values[number]
                elif maps is not None:
                    values[field.name] = maps[number]
                    del specs[field.name]
                else:
                    specs[field.name] = specs[field.name].moved(run_values[number])
            if specs:
                with self._driver.using(self._context):
                    values |= {name: self._descriptors.encode(spec) for name, spec in specs.items()}
            contents.append(values)
        return contents

    def _again(self, code: int, stream: int, config: Any, function: Any, arguments: Any) -> bool:
        """Launch again with the kernel's context current, which the default streams are meant in; else raise the error.

        True: the stream is of another context of the device, and nothing was launched.
        """
        driver, context, ordinal = self._driver, self._context, self._device.ordinal
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
