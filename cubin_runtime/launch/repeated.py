"""Launches of one thread on one stream that are sent again and again, most of whose values stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .history import LaunchHistory
from .parameter_block import ParameterBlock


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
        self._record, self._tick = history.record, history.tick

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
            self._tick()
            code = self._call(config, block.function, block.arguments, None)
            if code:
                if sent:
                    raise self._failed(code)
                return False
            sent = True
        return True


def _none(spec: object, address: int) -> bytes:
    raise AssertionError("every descriptor comes with the call")
