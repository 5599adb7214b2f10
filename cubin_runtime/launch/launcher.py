"""Launching: a plan as a value, then a prepared launch that a step only patches."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import AbiError, UsageError
from . import driver_api as api
from .driver import Driver
from .history import LaunchRecord
from .modules import LoadedKernel
from .plan import LaunchAttributes, LaunchPlan
from .streams import stream_handle
from .struct_types import SCALARS
from .structs import FieldRow, PlacedField
from .tensormap import TensorMapCache, TensorMapSpec

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
    were given with it. Values set by ``patch`` stay until they are set again. No launch allocates device memory,
    waits or loads, so launches may be captured into a graph; a graph keeps the values of its capture.
    """

    def __init__(
        self, plan: LaunchPlan, kernel: LoadedKernel, driver: Driver, descriptors: TensorMapCache | None = None
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
        self._record = driver.history.record
        self._addresses = (
            ctypes.addressof(self._config),
            kernel.function,
            ctypes.addressof(self._arguments),
            None,
        )

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
        member, data = self._encoded(name, value)
        with self._lock:
            self._view[member.offset : member.offset + member.size] = data

    def launch(self, stream: Any = 0, values: Mapping[str, Any] | None = None) -> None:
        """Launch on ``stream``, first setting the fields named in ``values``, all or none of them.

        Raises:
            UsageError: a value does not fit, or ``stream`` is no stream.
            DriverError: the driver refuses; for a fault of earlier work the error names the last launches.
        """
        handle = stream if type(stream) is int else stream_handle(stream)
        changes = [self._encoded(name, value) for name, value in values.items()] if values else ()
        with self._lock:
            for member, data in changes:
                self._view[member.offset : member.offset + member.size] = data
            code = self._launch_locked(handle)
        if code:
            raise self._driver.error("cuLaunchKernelEx", code)

    def stepper(self, *names: str) -> Callable[..., None]:
        """A function ``step(stream, *values)`` that sets the scalar fields ``names`` and launches.

        The fast way for a serving loop: names are looked up once, ``stream`` must be an int handle, a null
        pointer is 0. After a ``UsageError`` the fields hold what was set before the bad one.
        """
        writers = tuple(self._writer(name) for name in names)
        lock, launch = self._lock, self._launch_locked

        def step(stream: int, *values: int | float) -> None:
            try:
                with lock:
                    for write, value in zip(writers, values, strict=True):
                        write(value)
                    code = launch(stream)
            except (struct.error, ValueError, OverflowError) as error:
                raise UsageError(f"step({stream}, {values}): expected {', '.join(names)} ({error})") from error
            if code:
                raise self._driver.error("cuLaunchKernelEx", code)

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

    def _launch_locked(self, stream: int) -> int:
        self._config.stream = stream
        self._record((self, self._view.tobytes(), stream))
        code = self._call(*self._addresses)
        # A thread that never used CUDA has no context; the kernel's own is the only one that can be meant.
        if code == api.INVALID_CONTEXT and self._driver.current_context() is None:
            with self._driver.using(self.kernel.context):
                return self._call(*self._addresses)
        return code

    def _plain(self, value: object) -> object:
        return self._descriptors.encode(value) if isinstance(value, TensorMapSpec) else value

    def _encoded(self, name: str, value: object) -> tuple[PlacedField, bytes]:
        member = self.plan.layout.field(name)
        return member, member.encode(self._plain(value))

    def _writer(self, name: str) -> Callable[[Any], None]:
        member = self.plan.layout.field(name)
        if member.type not in SCALARS:
            raise UsageError(f"stepper field {name!r} is {member.type}: expected one of {', '.join(SCALARS)}")
        return partial(SCALARS[member.type].pack_into, self._view, member.offset)


def _check_fits(plan: LaunchPlan, kernel: LoadedKernel) -> None:
    gated = (kernel.sha256, kernel.symbol, kernel.layout.fingerprint)
    if (plan.sha256, plan.symbol, plan.layout.fingerprint) != gated:
        raise AbiError(
            f"plan for {plan.symbol!r} (sha256 {plan.sha256[:12]}, struct {plan.layout.name} "
            f"{plan.layout.fingerprint[:16]}); the kernel given is {kernel.symbol!r} (sha256 {kernel.sha256[:12]}, "
            f"struct {kernel.layout.name} {kernel.layout.fingerprint[:16]})"
        )
    if plan.threads > kernel.max_threads:
        raise AbiError(f"plan of {plan.threads} threads a block; {kernel.symbol!r} takes {kernel.max_threads}")
    if plan.shared_bytes > kernel.shared_bytes:
        raise AbiError(
            f"plan of {plan.shared_bytes} bytes of dynamic shared memory; "
            f"{kernel.symbol!r} was loaded for {kernel.shared_bytes}"
        )
    if plan.attributes.nonportable_cluster and not kernel.nonportable_cluster:
        raise AbiError(f"plan with a non-portable cluster; {kernel.symbol!r} was loaded for portable ones")
