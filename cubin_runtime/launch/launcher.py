"""Launching: a plan as a value, then a prepared launch that a step only patches."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import AbiError, UsageError
from . import driver_api as api
from .driver import Driver
from .history import LaunchRecord
from .modules import LoadedKernel
from .plan import LaunchAttributes, LaunchPlan
from .streams import is_default, stream_handle
from .struct_types import SCALARS
from .structs import FieldRow, StructLayout
from .tensormap import TensorMapCache, TensorMapSpec

# What the driver answers where another context is current than a default stream is meant in, or none.
_ELSEWHERE = (api.INVALID_CONTEXT, api.INVALID_HANDLE)

__all__ = ["LaunchAttributes", "LaunchPlan", "PreparedLaunch", "launch_config"]


def launch_config(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, attributes: LaunchAttributes
) -> api.LaunchConfig:
    """A CUlaunchConfig with its attributes, on stream 0; it keeps the attribute array alive."""
    entries = attributes.entries()
    array = api.attribute_array(entries)
    config = api.LaunchConfig(*grid, *block, shared_bytes, 0, ctypes.addressof(array), len(entries))
    config.keep = array
    return config


class PreparedLaunch:
    """A launch filled once and run many times; a step patches what moved and calls the driver.

    One cheap lock covers patch and call, so threads may share it: each launch carries exactly the values that
    were given with it. Values set by ``patch`` stay until they are set again. No launch allocates device
    memory, waits or loads, so launches may be captured; a graph keeps the values of its capture.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        kernel: LoadedKernel,
        driver: Driver,
        descriptors: TensorMapCache | None = None,
    ) -> None:
        """Encode the descriptors and fill the parameter buffer.

        Raises:
            AbiError: the plan asks for more than the kernel was gated for.
            TensorMapError: a descriptor breaks a rule.
            UsageError: a value does not fit its field.
        """
        _check_fits(plan, kernel)
        self.plan = plan
        self.kernel = kernel
        self._driver = driver
        # Not `or`: an empty cache is false.
        self._descriptors = TensorMapCache(driver) if descriptors is None else descriptors
        self._lock = threading.Lock()
        layout = plan.layout
        self._memory = ctypes.create_string_buffer(layout.size + layout.alignment)
        start = -ctypes.addressof(self._memory) % layout.alignment
        self._view = memoryview(self._memory).cast("B")[start : start + layout.size]
        with driver.using(kernel.context):
            self._view[:] = layout.pack({name: self._plain(value) for name, value in plan.values.items()})
        self._config = launch_config(plan.grid, plan.block, plan.shared_bytes, plan.attributes)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory) + start)
        self._call = driver.function("cuLaunchKernelEx")
        self._record = driver.history(kernel.context).record
        self._config_at = ctypes.addressof(self._config)
        self._arguments_at = ctypes.addressof(self._arguments)
        self._fast = {
            m.name: (slice(m.offset, m.offset + m.size), SCALARS[m.type].pack)
            for m in layout.fields
            if m.type in SCALARS and m.type != "bool"  # a packed "?" takes anything as true
        }

    @property
    def parameters(self) -> bytes:
        """The parameter struct as the next launch would send it."""
        with self._lock:
            return self._view.tobytes()

    def describe(self) -> tuple[FieldRow, ...]:
        """The parameter struct field by field, as the next launch would send it."""
        return self.plan.layout.describe(self.parameters)

    def patch(self, name: str, value: Any) -> None:
        """Set one field for the next launches; a ``TensorMapSpec`` for descriptors.

        Raises:
            UsageError: there is no such field, or the value does not fit it.
        """
        where, data = self._encoded(name, value)
        with self._lock:
            self._view[where] = data

    def launch(self, stream: Any = 0, values: Mapping[str, Any] | None = None) -> None:
        """Launch on ``stream``, first setting the fields named in ``values``, all or none of them.

        Raises:
            UsageError: a value does not fit, or ``stream`` is no stream.
            DriverError: the driver refuses; for a fault of earlier work the error names the last launches.
        """
        handle = stream if type(stream) is int else stream_handle(stream)
        changes = [self._encoded(name, value) for name, value in values.items()] if values else ()
        with self._lock:
            for where, data in changes:
                self._view[where] = data
            self._config.stream = handle
            self._record((self, self._view.tobytes(), handle))
            code = self._call(self._config_at, self.kernel.function, self._arguments_at, None)
            if code in _ELSEWHERE:
                code = self._call_in_context(handle)
        if code:
            raise self._driver.error("cuLaunchKernelEx", code, self.kernel.context)

    def stepper(self, *names: str) -> Callable[..., None]:
        """A function ``step(stream, *values)`` that sets the scalar fields ``names`` and launches.

        The fast way for a serving loop: names are looked up once, ``stream`` must be an int handle, a null
        pointer is 0. After a ``UsageError`` the fields hold what was set before the bad one.
        """
        slots = tuple(self._slot(name) for name in names)
        # The loop's cost is Python's own, so everything it touches is a local of the closure.
        lock, config, record, call = self._lock, self._config, self._record, self._call
        config_at, function, arguments_at = self._config_at, self.kernel.function, self._arguments_at
        snapshot, count = self._view.tobytes, len(slots)

        def step(stream: int, *values: int | float) -> None:
            try:
                with lock:
                    if len(values) != count:
                        raise ValueError(f"got {len(values)} values")
                    for (items, index), value in zip(slots, values):  # noqa: B905  (strict costs 0.2 us)
                        items[index] = value
                    config.stream = stream
                    record((self, snapshot(), stream))
                    code = call(config_at, function, arguments_at, None)
                    if code in _ELSEWHERE:
                        code = self._call_in_context(stream)
            except (TypeError, ValueError, OverflowError) as error:
                raise UsageError(f"step({stream}, {values}): expected {', '.join(names)} ({error})") from error
            if code:
                raise self._driver.error("cuLaunchKernelEx", code, self.kernel.context)

        return step

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

    def _call_in_context(self, stream: int) -> int:
        """Once more with the kernel's context current, which the default streams are meant in."""
        driver, context = self._driver, self.kernel.context
        with driver.using(context):
            if not is_default(stream) and driver.stream_context(stream) != context:
                there, here = driver.context_device(driver.stream_context(stream)), self.kernel.device.ordinal
                raise UsageError(f"stream {stream:#x}: of device {there}, the kernel is loaded on device {here}")
            return self._call(self._config_at, self.kernel.function, self._arguments_at, None)

    def _plain(self, value: object) -> object:
        return self._descriptors.encode(value) if isinstance(value, TensorMapSpec) else value

    def _encoded(self, name: str, value: Any) -> tuple[slice, bytes]:
        fast = self._fast.get(name)
        if fast is not None:
            try:
                return fast[0], fast[1](value)
            except (struct.error, OverflowError):
                pass  # None for a pointer, or a value that does not fit: the slow way tells which
        member = self.plan.layout.field(name)
        return slice(member.offset, member.offset + member.size), member.encode(self._plain(value))

    def _slot(self, name: str) -> tuple[Any, int]:
        member = self.plan.layout.field(name)
        if member.type not in SCALARS:
            raise UsageError(f"stepper field {name!r} is {member.type}: expected one of {', '.join(SCALARS)}")
        # Item assignment through a cast view is the cheapest way to write one scalar.
        return self._view.cast(SCALARS[member.type].format[1:]), member.offset // member.size  # type: ignore[call-overload]


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
