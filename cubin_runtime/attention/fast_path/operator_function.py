"""An operator's function: fast paths of earlier calls first, then the full path."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from itertools import count
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from ...launch.compiled import compiled
from ...provenance import number_of
from ..process import default, default_runtime, runtime_of
from ..torch_ops import TorchOp, is_intercepted
from .any_size import any_size_path, is_second
from .generated import MISS, fast_path
from .notes import taking_notes
from .options import Form, Signature, note_use

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
DEFAULT_RUNTIME = "default.runtime or default_runtime()"
# Of an operator with that argument.
CALL_RUNTIME = "default.runtime or default_runtime() if runtime is None else runtime_of(runtime)"
_MOST = 16  # paths of one operator
_MOST_OF_FAMILIES = 8
FULL_RUNS = 3  # to write a fast path takes longer than a call, so calls of a form seen this often get one
_numbers = count()


class _State:
    """What all operators look at before a fast path."""

    suspended = 0
    compiling: Callable[[], bool]


def _compiling() -> bool:
    """``torch.compiler.is_compiling`` where torch may come later."""
    if "torch" not in sys.modules:
        return False
    _define_ops()
    import torch

    return bool(torch.compiler.is_compiling())


def _define_ops() -> None:
    """Define the ops of all operators, once torch is there."""
    import torch

    while _undefined:
        op, operator = _undefined.pop()
        op.define(operator)
    _state.compiling = torch.compiler.is_compiling


_define_ops._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while torch traces, and is not traced
_undefined: list[tuple[TorchOp, Callable[..., Any]]] = []


class Suspendable(Protocol):
    """What sends calls by a function of its own."""

    def suspend(self, suspended: bool) -> None:
        """Take the full path from now on, or no longer."""
        ...


_lock = threading.RLock()
_steps: WeakSet[Suspendable] = WeakSet()
_methods: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # instances that have a fast path as their own method
_wholes: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()  # the instances by their twins
_state = _State()
_state.compiling = _compiling


def is_compiling() -> bool:
    """Whether torch traces or compiles this call."""
    return _state.compiling()


def is_suspended() -> bool:
    """Whether calls take the full path alone: they are recorded, or this process was forked."""
    return _state.suspended > 0


os.register_at_fork(after_in_child=lambda: setattr(_state, "suspended", 1))  # the full path says what is wrong


def suspend(change: int) -> None:
    """Let all calls take the full path while the sum of all changes is not 0."""
    with _lock:
        _state.suspended += change
        suspended = _state.suspended > 0
        for step in _steps:
            step.suspend(suspended)
        if suspended:
            for holder, name in _methods.items():
                vars(holder).pop(name, None)
            _methods.clear()


def _give_method(holder: Any, method: Callable[..., Any]) -> None:
    with _lock:
        if not _state.suspended:
            vars(holder)[method.__name__] = method
            _methods[holder] = method.__name__


def _twin(holder: Any) -> Any:
    """The same holder without a method of its own, for that method: it refers to the twin, and so is in no reference
    cycle with the holder."""
    twin = copy(holder)
    vars(twin).pop(_methods.get(holder, ""), None)
    _wholes[twin] = ref(holder)
    return twin


def _whole(holder: Any) -> Any:
    """The holder that a twin was made of, None if it is no more; another holder itself."""
    of_twin = _wholes.get(holder)
    return holder if of_twin is None else of_twin()


def suspendable(step: Suspendable) -> None:
    """Tell ``step`` from now on whether calls are suspended; it is not kept alive."""
    with _lock:
        _steps.add(step)
        step.suspend(_state.suspended > 0)


def operator_function(  # noqa: C901, PLR0915
    *,
    owner: str = DEFAULT_RUNTIME,
    scales: tuple[str, ...] = (),
    bound: str = "max_seq_len",
    memory: tuple[str, ...] = (),
    contents: tuple[str, ...] = (),
    any_size: bool = False,
    op: Callable[[Callable[..., Any]], TorchOp] | None = None,
) -> Callable[[FunctionT], FunctionT]:
    """Let a function, which is then the full path, try the fast paths of earlier calls first.

    Args:
        owner: the expression of the object that has the fast paths.
        scales, bound, memory, contents: as in ``Signature``.
        any_size: whether calls that differ in sizes alone share a path; ``owner`` is then a runtime.
        op: makes the op, from the full path, through which calls go that torch traces.
    """

    def decorate(full: FunctionT) -> FunctionT:  # noqa: C901, PLR0915
        parameters = inspect.signature(full).parameters
        signature = Signature(tuple(parameters), scales, bound, frozenset(memory), contents)
        number, traced = next(_numbers), op(full) if op else None
        heads, defaults = _heads(list(parameters.values()))

        def call(holder: Any, arguments: tuple[Any, ...]) -> Any:
            """The full path, from whose notes a fast path is made for calls like one that is made again and again."""
            given = dict(zip(parameters, arguments, strict=True))
            if traced is not None and is_intercepted(arguments):
                return traced.call(given)
            if _state.suspended:
                return full(**given)
            with taking_notes() as notes:
                traced_scales = {name: number_of(name, given[name]) for name in scales if type(given[name]) is float}
                result = full(**{**given, **traced_scales})
            note_use(given, notes)
            if any_size and is_second(holder.families, notes):
                made = any_size_path(signature, arguments, result, notes, Form("fast", names))
                if made is not None:
                    path = compiled("fast", *made)
                    holder.family_paths[number] = (path, *holder.family_paths[number][: _MOST_OF_FAMILIES - 1])
            if all(launched.prepared.runs < FULL_RUNS for launched in notes.launched):
                return result
            made = fast_path(signature, arguments, result, notes, Form("fast", names))
            if made is not None:
                path = compiled("fast", *made)
                holder.fast_paths[number] = (path, *holder.fast_paths[number][: _MOST - 1])
                whole = _whole(holder) if "self" in parameters else None
                if whole is not None:
                    form = _method(full.__name__, parameters, given)
                    source, scope = fast_path(signature, arguments, result, notes, form) or made
                    scope |= defaults | {"otherwise": partial(operator, _twin(whole))}
                    _give_method(whole, compiled(full.__name__, source, scope))
            return result

        def promote(holder: Any, path: Callable[..., Any]) -> None:
            paths = holder.fast_paths[number]
            holder.fast_paths[number] = (path, *(other for other in paths if other is not path))

        names = ", ".join(parameters)
        given = ", ".join(f"{name!r}: {name}" for name in parameters)
        of_families = (
            f"        for path in owner.family_paths[{number}]:\n"
            f"            result = path({names})\n"
            f"            if result is not MISS:\n"
            f"                return result\n"
        )
        source = (
            f"def {full.__name__}({heads}):\n"
            + (f"    if state.compiling():\n        return traced({{{given}}})\n" if traced else "")
            + f"    owner = {owner}\n"
            f"    if not state.suspended:\n"
            f"        paths = owner.fast_paths[{number}]\n"
            f"        for path in paths:\n"
            f"            result = path({names})\n"
            f"            if result is not MISS:\n"
            f"                if path is not paths[0]:\n"
            f"                    promote(owner, path)\n"
            f"                return result\n"
            + (of_families if any_size else "")
            + f"    return call(owner, ({names},))\n"
        )
        scope = {
            **defaults,
            "state": _state,
            "call": call,
            "promote": promote,
            "MISS": MISS,
            "default": default,
            "default_runtime": default_runtime,
            "runtime_of": runtime_of,
        }
        if traced is not None:
            scope["traced"] = traced.call
        operator: Any = wraps(full)(compiled(full.__name__, source, scope))
        if traced is not None:
            _undefined.append((traced, operator))
            _state.compiling = _compiling  # which defines it
        return operator  # type: ignore[no-any-return]

    return decorate


def _method(name: str, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> Form:
    """The form of the instance's own method: the last fast path, which spares the way over all of them."""
    own = [parameter for parameter in parameters.values() if parameter.name != "self"]
    places = [parameter for parameter in own if parameter.kind is not parameter.KEYWORD_ONLY]
    options = frozenset(parameter.name for parameter in own if parameter not in places)
    if any(given[option] is not parameters[option].default for option in options):
        passed = ", ".join(f"{parameter.name}={parameter.name}" for parameter in own)
        return Form(name, _heads(own)[0], unlike=f"return otherwise({passed})")
    # None of them is passed as a rule, and an empty dict costs less than a default for each.
    passed = ", ".join(parameter.name for parameter in places)
    unlike = f"return otherwise({passed}, *more, **options)"
    head = f"{_heads(places)[0]}, *more, **options"
    return Form(name, head, options, ("not more and not options",), unlike)


def _heads(parameters: Sequence[inspect.Parameter]) -> tuple[str, dict[str, Any]]:
    """Parameters as a definition lists them, and what their defaults refer to."""
    heads, defaults = list[str](), dict[str, Any]()
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in heads:
            heads.append("*")
        if parameter.default is parameter.empty:
            heads.append(parameter.name)
        else:
            defaults[f"given_{parameter.name}"] = parameter.default
            heads.append(f"{parameter.name}=given_{parameter.name}")
    return ", ".join(heads), defaults


def full_path(operator: FunctionT) -> FunctionT:
    """The full path of an operator, for one that stands on it: the notes are then its own."""
    return getattr(operator, "__wrapped__", operator)
