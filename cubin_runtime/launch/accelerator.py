"""The optional accelerator: one C call replaces the Python lines that patch parameters and call the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

from .history import LaunchHistory
from .run_source import PreparedLaunch

_ABI = 1
_Sends = tuple[Callable[..., int], ...]


@cache  # an import that fails is tried anew each time
def sender() -> Callable[..., Any] | None:
    """The class ``cubin_runtime_accelerator.Sender``, where it is installed and fits."""
    try:
        import cubin_runtime_accelerator as accelerator
    except ImportError:
        return None
    found: Callable[..., Any] | None = accelerator.Sender if accelerator.ABI == _ABI else None
    return found


class Senders:
    """What sends the launches, by the key that their unchanging values have; safe between threads without a lock."""

    def __init__(
        self,
        make: Callable[..., Any],
        launches: Sequence[PreparedLaunch],
        call: Any,
        contents: Callable[[Sequence[Any]], Sequence[dict[str, object]]],
        history: LaunchHistory,
        keep: Callable[[dict[Hashable, _Sends], Hashable, _Sends], _Sends],
        written: frozenset[int],
    ) -> None:
        """``contents`` gives the fields of each launch for a call's values, of which ``written`` come at each call.

        ``call`` is the driver's function; ``keep`` puts what was made under its key, and gives what is there then.
        """
        self.made: dict[Hashable, _Sends] = {}
        self._make, self._launches, self._contents, self._history = make, launches, contents, history
        self._call = ctypes.cast(call, ctypes.c_void_p).value
        self._keep, self._written = keep, written

    def of(self, key: Hashable, stream: int, given: tuple[Any, ...]) -> _Sends:
        """The function of each launch on a stream, of the values that are written."""
        fields = self._contents(given)
        sends = tuple(
            self._new(launch, stream, values).send for launch, values in zip(self._launches, fields, strict=True)
        )
        return self._keep(self.made, key, sends)

    def _new(self, launch: PreparedLaunch, stream: int, values: dict[str, object]) -> Any:
        config = launch.config_on(stream)
        written = (item for item in launch.inputs if item.value in self._written)
        return self._make(
            call=self._call,
            config=ctypes.addressof(config),
            function=launch.function,
            parameters=launch.plan.layout.pack(values),
            fields=tuple((item.field.offset, item.code) for item in written),
            launch=launch,
            stream=stream,
            record=self._history.record,
            tick=self._history.tick,
            kept=config,
        )
