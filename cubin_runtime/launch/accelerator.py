"""The optional accelerator: C calls replace generated Python lines, one for a launch, one for a whole call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

from .history import LaunchHistory
from .run_source import PreparedLaunch

_ABI = 3
_Sends = tuple[Callable[..., int], ...]


@cache  # an import that fails is tried anew each time
def accelerator() -> Any | None:
    """The module ``cubin_runtime_accelerator``, with its classes ``Sender`` and ``Step``, where it is installed and
    fits."""
    try:
        import cubin_runtime_accelerator as module
    except ImportError:
        return None
    return module if module.ABI == _ABI else None


class Senders:
    """What sends the launches, by the key that their unchanging values have; safe between threads without a lock.

    ``written`` are for each launch the numbers of the values that it is sent with, in order.
    """

    def __init__(
        self,
        module: Any,
        launches: Sequence[PreparedLaunch],
        call: Any,
        contents: Callable[[Sequence[Any]], Sequence[dict[str, object]]],
        history: LaunchHistory,
        keep: Callable[[dict[Hashable, _Sends], Hashable, _Sends], _Sends],
        written: frozenset[int],
        failed: Callable[[int], Exception],
    ) -> None:
        """``contents`` gives the fields of each launch for a call's values, of which ``written`` come at each call.

        ``call`` is the driver's function; ``keep`` puts what was made under its key, and gives what is there then;
        ``failed`` gives the error for what the driver answered.
        """
        self.made: dict[Hashable, _Sends] = {}
        self.written = tuple(
            tuple(item.value for item in launch.inputs if item.value in written) for launch in launches
        )
        self._module, self._launches, self._contents, self._history = module, launches, contents, history
        self._call = ctypes.cast(call, ctypes.c_void_p).value
        self._keep, self._numbers, self._failed = keep, written, failed

    def of(self, key: Hashable, stream: int, given: tuple[Any, ...]) -> _Sends:
        """The function of each launch on a stream, of the values that are written."""
        fields = self._contents(given)
        sends = tuple(
            self._new(launch, stream, values).send for launch, values in zip(self._launches, fields, strict=True)
        )
        return self._keep(self.made, key, sends)

    def step(
        self,
        *,
        forms: tuple[Callable[[], object], dict[str, Any], Callable[..., bool]],
        data_ptr: Callable[[Any], int],
        addresses: Sequence[tuple[bool, int, int] | None],
        sources: Mapping[int, tuple[int, int]],
        made: tuple[Callable[..., Any], tuple[int, ...]] | None = None,
        stream: tuple[Callable[[Any], int], Any] | None = None,
        scratch: tuple[Any, Callable[[int], Hashable | None]] | None = None,
    ) -> tuple[Callable[..., Any], list[int]] | None:
        """One call in the place of all the lines, and the numbers of the values that it takes behind the tensors.

        It gives True, or the tensor that it made, if the launches were sent; None: a tensor is unlike the known ones;
        False: nothing was sent, and the lines are to do it. A launch that is refused behind others raises. Its key are
        the stream, the addresses that are part of it, and the place of the scratch.
        None: it cannot take so many tensors, addresses in its key, or launches.

        Args:
            forms: whether any mode intercepts calls, the names of ``torch.autograd.forward_ad``, and the test of the
                tensors' forms.
            addresses: for each tensor, unless its address does not count: whether it is part of the key, and else its
                bits that count, and what they are.
            sources: the tensor whose address a value is, by its number, and the offset; the last tensor is that made.
            made: the function that makes a tensor, and the numbers of the tensors that it takes.
            stream: a function and its argument that give the stream.
            scratch: ``Workspace.legacy`` of the legacy default stream, and a function that gives the place of another.
        """
        module, keyed = self._module, sum(address is not None and address[0] for address in addresses)
        if (
            len(addresses) > module.MOST_TENSORS
            or keyed > module.MOST_KEYED
            or len(self.written) > module.MOST_LAUNCHES
        ):
            return None
        numbers = [value for value in dict.fromkeys(chain(*self.written)) if value not in sources]
        behind = {value: (len(addresses) + bool(made) + place, 0) for place, value in enumerate(numbers)}
        writes = tuple(tuple((sources.get(value) or behind[value]) for value in values) for values in self.written)
        modes, levels, check = forms
        step = module.Step(
            modes=modes,
            levels=levels,
            check=check,
            data_ptr=data_ptr,
            failed=self._failed,
            addresses=tuple(addresses),
            senders=self.made,
            writes=writes,
            numbers=len(numbers),
            stream=stream,
            scratch=scratch,
            made=made,
        )
        return step.send, numbers

    def _new(self, launch: PreparedLaunch, stream: int, values: dict[str, object]) -> Any:
        config = launch.config_on(stream)
        written = (item for item in launch.inputs if item.value in self._numbers)
        return self._module.Sender(
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
