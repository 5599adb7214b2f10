"""Values that are wrong for nearly every argument, and calls with each of them in the place of each argument."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cubin_runtime.attention import TensorView
from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.testing import StandIn

_ADDRESS = 0x7F0000004000


class _Stubborn:
    """An object all of whose conversions fail."""

    __hash__ = None  # type: ignore[assignment]

    def _fail(self, *_: object) -> Any:
        raise RuntimeError("a conversion failed")

    __eq__ = __bool__ = __index__ = __int__ = __float__ = __repr__ = __str__ = __len__ = __iter__ = _fail


def _tensor(dtype: Any, *shape: int, device: int = 0, address: int = _ADDRESS) -> TensorView:
    return TensorView.contiguous(address, dtype, shape, device)


VALUES: Mapping[str, tuple[Any, ...]] = {
    "words": ("word", "", "\ud800", b"bytes"),
    "collections": ([], [1], (), (1, 2), (None, None), {}, set(), [object()]),
    "floats": (math.nan, math.inf, -math.inf, 1.5, -1.5, 1e300),
    "integers": (0, 1, -1, -2, 1 << 31, 1 << 63, 1 << 70, -(1 << 70), 10**400, 10**5000, -(10**5000)),
    "switches and none": (None, True, False),
    "objects": (object(), 1j, len, int, _Stubborn()),
    "tensors": (
        _tensor("float32"),
        _tensor("bfloat16"),
        _tensor("float32", 1),
        _tensor("bool", 1),
        _tensor("int64", 4),
        _tensor("int32", 4),
        _tensor("int32", 4, device=7),
        _tensor("int32", 4, address=0),
        _tensor("float32", 4, 4),
        _tensor("bfloat16", 0, 0, 0),
        _tensor("float32", 4, 1, 64, 128, device=3),
        _tensor("bfloat16", 2, 2, 2, 2, 2, 2),
    ),
}


def untyped(
    function: Callable[..., Any],
    good: Mapping[str, Any],
    values: Sequence[Any],
    standin: StandIn,
    names: Iterable[str] = (),
) -> list[tuple[str, str, str]]:
    """Calls that end in another error than ours, or in ours behind a launch: argument, kind of value, outcome.

    ``names`` are the arguments; without them, all that the function lists.
    """
    return [
        (name, type(value).__name__, outcome)
        for name in names or inspect.signature(function).parameters
        for value in values
        for outcome in _outcomes(function, {**good, name: value}, standin)
    ]


def _outcomes(function: Callable[..., Any], arguments: Mapping[str, Any], standin: StandIn) -> Iterator[str]:
    standin.clear_log()
    try:
        function(**arguments)
    except CubinRuntimeError as error:
        if "cuLaunchKernelEx" in standin.names():
            yield f"launched, then {error}"
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
