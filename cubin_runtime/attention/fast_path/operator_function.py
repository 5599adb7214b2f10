"""An operator's function: fast paths of earlier calls first, then the full path."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import count
from typing import Any, TypeVar

from ...launch.compiled import compiled
from .generated import MISS, Signature, fast_path
from .notes import active, taking_notes

FastPaths = defaultdict[int, tuple[Callable[..., Any], ...]]  # of each operator, by its number
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_MOST = 32  # paths of one operator
_numbers = count()


class _State:
    """What all operators look at before a fast path."""

    suspended = 0


_state = _State()
os.register_at_fork(after_in_child=lambda: setattr(_state, "suspended", 1))  # the full path says what is wrong


def suspend(change: int) -> None:
    """Let all calls take the full path while the sum of all changes is not 0; callers hold a lock of their own."""
    _state.suspended += change


def operator_function(
    *,
    owner: str,
    scales: Mapping[str, str] | None = None,
    bound: str = "max_seq_len",
    memory: tuple[str, ...] = (),
    contents: tuple[str, ...] = (),
) -> Callable[[FunctionT], FunctionT]:
    """Let a function, which is then the full path, try the fast paths of earlier calls first.

    Args:
        owner: the expression of the object that has the fast paths; ``default()`` is the process's runtime.
        scales, bound, memory, contents: as in ``Signature``.
    """

    def decorate(full: FunctionT) -> FunctionT:
        parameters = inspect.signature(full).parameters
        signature = Signature(tuple(parameters), scales or {}, bound, memory, contents)
        number = next(_numbers)

        def call(holder: Any, arguments: tuple[Any, ...]) -> Any:
            """The full path, from whose notes the next call's fast path is made."""
            given = dict(zip(parameters, arguments, strict=True))
            if _state.suspended or active():
                return full(**given)
            with taking_notes() as notes:
                result = full(**given)
            made = fast_path(signature, arguments, result, notes)
            if made is not None:
                holder.fast_paths[number] = (made, *holder.fast_paths[number][: _MOST - 1])
            return result

        def promote(holder: Any, path: Callable[..., Any]) -> None:
            paths = holder.fast_paths[number]
            holder.fast_paths[number] = (path, *(other for other in paths if other is not path))

        return wraps(full)(_written(full, owner, number, call, promote))  # type: ignore[return-value]

    return decorate


def full_path(operator: FunctionT) -> FunctionT:
    """The full path of an operator, for one that stands on it: the notes are then its own."""
    return getattr(operator, "__wrapped__", operator)


def _written(full: Callable[..., Any], owner: str, number: int, call: Any, promote: Any) -> Callable[..., Any]:
    """The function with the parameters of ``full``; written out, since forwarding ``**kwargs`` costs a microsecond."""
    from .. import runtime

    parameters = list(inspect.signature(full).parameters.values())
    names = ", ".join(parameter.name for parameter in parameters)
    heads, keyword, scope = [], False, {"state": _state, "call": call, "promote": promote, "MISS": MISS}
    scope |= {"default": runtime.default_runtime}
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            heads.append("*")
            keyword = True
        if parameter.default is parameter.empty:
            heads.append(parameter.name)
        else:
            scope[f"default_{parameter.name}"] = parameter.default
            heads.append(f"{parameter.name}=default_{parameter.name}")
    source = (
        f"def {full.__name__}({', '.join(heads)}):\n"
        f"    owner = {owner}\n"
        f"    if not state.suspended:\n"
        f"        paths = owner.fast_paths[{number}]\n"
        f"        for path in paths:\n"
        f"            result = path({names})\n"
        f"            if result is not MISS:\n"
        f"                if path is not paths[0]:\n"
        f"                    promote(owner, path)\n"
        f"                return result\n"
        f"    return call(owner, ({names},))\n"
    )
    return compiled(full.__name__, source, scope)
