"""Senders of the launches of a plan, again and again, with most of their parameters kept from call to call."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from ..errors import CubinRuntimeError
from .accelerator import FIELD, MAP, MAX_FIELDS, accelerator, packed
from .prepared import ParameterBlock, PreparedLaunch, PreparedLaunches, plain_copy

Sends = tuple[Callable[..., int], ...]  # of the launches in order: the written values to the driver's answer
NOT_WRITTEN = (TypeError, ValueError, OverflowError, struct.error)  # a value does not fit its field
_MAX_KEYS = 1024  # sets of resident addresses, such as the layers of a model
_MAX_BYTES = 4096  # of parameters, which the accelerator copies to its stack
_REPLACE = "cuTensorMapReplaceAddress"


class Maker(Protocol):
    """Makes the function that sends one launch on a stream with these ``contents`` of its fields."""

    def __call__(self, launch: PreparedLaunch, stream: int, contents: Mapping[str, object]) -> Callable[..., int]:
        """The function of the values that are written."""
        ...


class Senders:
    """Sends the launches of a plan by functions that are kept for the key of what stays; safe between threads.

    ``written`` are for each launch the numbers of the values that its function takes, in order; ``by_key`` are the
    functions that there are, in C if they are ``accelerated``. The oldest key makes room for a new one.
    """

    def __init__(self, prepared: PreparedLaunches, written: frozenset[int], make: Maker, *, accelerated: bool) -> None:
        """``written`` are the numbers of the values that come at each call."""
        self.written = tuple(
            tuple(item.value for item in launch.inputs if item.value in written) for launch in prepared.launches
        )
        self.by_key: dict[Hashable, Sends] = {}
        self.accelerated = accelerated
        self._prepared, self._numbers, self._make = prepared, written, make
        self._lock = threading.RLock()

    def resized(self, prepared: PreparedLaunches) -> Senders:
        """Senders of the same launches with other sizes, which are made in the same way."""
        other = plain_copy(self)
        other._prepared, other.by_key, other._lock = prepared, {}, threading.RLock()
        return other

    def send(
        self,
        key: Hashable,
        stream: int,
        written: Sequence[Sequence[Any]],
        everything: Callable[[], Sequence[Any]],
    ) -> None:
        """Send the launches on a stream, which belongs to the key, with the values that are written for each.

        ``everything`` gives all values.

        Raises:
            as ``PreparedLaunches.run``.
        """
        prepared = self._prepared
        sends = self.by_key.get(key) or self._new(key, stream, everything())
        for number, values in enumerate(written):
            try:
                code = sends[number](*values)
            except CubinRuntimeError:
                raise
            except NOT_WRITTEN as error:
                raise prepared.unfit(error, everything()) from error
            if code and number:
                raise prepared.failed(code)
            if code:  # again, by what finds out why, or sends them where they belong
                prepared.run(stream, *everything())
                return

    def _new(self, key: Hashable, stream: int, values: Sequence[Any]) -> Sends:
        """The functions for a key that had none, with these values where they are not written."""
        prepared = self._prepared
        contents = prepared.contents(values, written=self._numbers)
        sends = tuple(
            self._make(launch, stream, content) for launch, content in zip(prepared.launches, contents, strict=True)
        )
        with self._lock:
            while len(self.by_key) >= _MAX_KEYS and key not in self.by_key:
                self.by_key.pop(next(iter(self.by_key)))
            return self.by_key.setdefault(key, sends)


def senders_of(prepared: PreparedLaunches, written: Collection[int]) -> Senders:
    """Senders of launches with the values of the numbers ``written``; others are the same for all of a key."""
    numbers, module = frozenset(written), accelerator()
    accelerated = module is not None and prepared.profiler is None and _can_accelerate(prepared, numbers)
    make = in_c(module, prepared, numbers) if accelerated else by_ctypes(prepared, numbers)
    return Senders(prepared, numbers, make, accelerated=accelerated)


def _can_accelerate(prepared: PreparedLaunches, written: frozenset[int]) -> bool:
    """Return whether the accelerator can write what is written at each call; descriptors, if the driver can."""
    inputs = [[item for item in launch.inputs if item.value in written] for launch in prepared.launches]
    sizes = (launch.plan.layout.size for launch in prepared.launches)
    return (
        (all(item.code for items in inputs for item in items) or prepared.driver.has(_REPLACE))
        and max(sizes) <= _MAX_BYTES
        and max(map(len, inputs)) <= MAX_FIELDS
    )


def in_c(module: Any, prepared: PreparedLaunches, written: frozenset[int]) -> Maker:
    """Senders of the accelerator, which need no lock and no memory for each call."""
    driver, history = prepared.driver, prepared.history
    functions: tuple[Any, Any] = prepared.call, driver.function(_REPLACE) if driver.has(_REPLACE) else None
    call, replace = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)

    def fields_of(launch: PreparedLaunch) -> bytes:
        items = [item for item in launch.inputs if item.value in written]
        return packed(FIELD, [(item.field.offset, item.code.encode() or MAP) for item in items])

    fields = {id(launch.inputs): fields_of(launch) for launch in prepared.launches}  # those of other sizes share them

    def make(launch: PreparedLaunch, stream: int, contents: Mapping[str, object]) -> Callable[..., int]:
        config, parameters = launch.config_on(stream), launch.plan.layout.pack(contents)
        sender = module.Sender(
            call=call,
            replace=replace,
            config=ctypes.addressof(config),
            function=launch.function,
            parameters=parameters,
            fields=fields[id(launch.inputs)],
            launch=launch,
            stream=stream,
            ring=history.ring,
            kept=config,
        )
        return sender.send  # type: ignore[no-any-return]

    return make


def by_ctypes(prepared: PreparedLaunches, written: frozenset[int]) -> Maker:
    """Senders in Python; descriptors of tensors that have moved are encoded again.

    A call has a block of parameters for itself: blocks wait in a list, whose ``pop`` and ``append`` are atomic, and a
    thread that finds none makes one.
    """
    call, descriptor, profiler = prepared.call, prepared.descriptor, prepared.profiler
    record = prepared.history.record

    def make(launch: PreparedLaunch, stream: int, contents: Mapping[str, object]) -> Callable[..., int]:
        changing = [item for item in launch.inputs if item.value in written]
        inputs = [item._replace(value=place) for place, item in enumerate(changing)]
        spare: list[tuple[ParameterBlock, Any]] = []  # with their configurations

        def new_block() -> tuple[ParameterBlock, Any]:
            block = ParameterBlock(launch, contents, inputs)
            return block, block.config_on(stream)

        def send(*values: Any) -> int:
            try:
                block, config = buffer = spare.pop()
            except IndexError:
                block, config = buffer = new_block()
            if values:
                block.write(values, descriptor)
            record((launch, block.view.tobytes(), stream))
            begin = profiler.enter(launch.plan.kernel) if profiler else 0.0
            code = call(config, block.function, block.arguments, None)
            if profiler:
                profiler.leave(begin)
            spare.append(buffer)
            return int(code)

        return send

    return make
