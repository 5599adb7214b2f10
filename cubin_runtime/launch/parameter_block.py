"""The parameters of one launch in memory of its own, with its configuration, kept from launch to launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

from .prepared_launch import Input, PreparedLaunch
from .structs import StructLayout
from .tensormap import TensorMapSpec


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
        """``contents`` are those of all fields, ``inputs`` the fields that ``write`` fills; ``values`` are in them."""
        self.launch = launch
        self.view, start, memory = filled(launch.plan.layout, contents)
        self.function = ctypes.c_void_p(launch.function)
        self._config = launch.config_on(0)
        self._by_reference = ctypes.byref(self._config)
        arguments = (ctypes.c_void_p * 1)(start)
        self.arguments = ctypes.byref(arguments)
        self._kept = memory, arguments
        self._scalars = [(code, field.offset, number) for field, number, code in inputs if code]
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
        rows = _rows([scalar for scalar in self._scalars if scalar[2] in moving])
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


def _rows(scalars: Sequence[tuple[str, int, int]]) -> list[_Row]:
    """The rows that write fields without a gap between them at once: function, offset, and the values among all."""
    runs: list[tuple[str, int, list[int]]] = []
    for code, offset, number in sorted(scalars, key=itemgetter(1)):
        if runs and runs[-1][1] + struct.calcsize(f"<{runs[-1][0]}") == offset:
            codes, begin, numbers = runs.pop()
            runs.append((codes + code, begin, [*numbers, number]))
        else:
            runs.append((code, offset, [number]))
    return [(struct.Struct(f"<{codes}").pack_into, offset, _items(numbers)) for codes, offset, numbers in runs]


def _items(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(numbers) > 1:
        return itemgetter(*numbers)
    (number,) = numbers
    return lambda values: (values[number],)


def filled(layout: StructLayout, values: Mapping[str, object]) -> tuple[memoryview, int, Any]:
    """Memory with the struct's bytes, aligned as the struct: a view, its address, and what keeps it alive."""
    memory = ctypes.create_string_buffer(layout.size + layout.alignment)
    offset = -ctypes.addressof(memory) % layout.alignment
    view = memoryview(memory).cast("B")[offset : offset + layout.size]
    view[:] = layout.pack(values)
    return view, ctypes.addressof(memory) + offset, memory
