"""An operator's function: the paths of earlier calls first, then the full path."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from ...provenance import number_of
from ..former_names import renamed_options
from ..runtime import Runtime, default, runtime_of
from ..torch_ops import TorchOp, is_intercepted
from .any_size import any_size_path, is_second
from .build import new_path
from .notes import FastPaths, Notes
from .options import Signature, note_use
from .path import MISS
from .paths import Binding, Paths, add_path, new_paths

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_MOST = 16  # paths of one operator
_MOST_OF_FAMILIES = 8
FULL_RUNS = 3  # to build a path takes longer than a call, so calls of a form seen this often get one
_numbers = count()


class _State:
    """The state that all operators look at before a path."""

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
    """A sender of calls by a path of its own."""

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
    """Return whether torch traces or compiles this call."""
    return _state.compiling()


def is_suspended() -> bool:
    """Return whether calls take the full path alone: they are recorded, or this process was forked."""
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


def _give_method(holder: Any, name: str, method: Callable[..., Any]) -> None:
    with _lock:
        if not _state.suspended:
            vars(holder)[name] = method
            _methods[holder] = name


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


def operator_function(
    *,
    scales: tuple[str, ...] = (),
    bound: str = "max_seq_len",
    memory: tuple[str, ...] = (),
    contents: tuple[str, ...] = (),
    any_size: bool = False,
    former: Mapping[str, str] = MappingProxyType({}),
    op: Callable[[Callable[..., Any]], TorchOp] | None = None,
) -> Callable[[FunctionT], FunctionT]:
    """Let a function, which is then the full path, try the paths of earlier calls first.

    The instance of a method keeps them, for a function the runtime that it is called with.

    Args:
        scales, bound, memory, contents: as in ``Signature``.
        any_size: whether calls that differ in sizes alone share a path.
        former: names that arguments had -> their names, which calls may still use on the full path.
        op: makes the op, from the full path, through which calls go that torch traces.
    """

    def decorate(full: FunctionT) -> FunctionT:
        binding = Binding.of(full)
        signature = Signature(binding.names, scales, bound, frozenset(memory), contents)
        dispatcher = _Operator(full, binding, signature, op(full) if op else None, any_size=any_size, former=former)
        number, is_method = dispatcher.number, dispatcher.is_method

        @wraps(full)
        def operator(*arguments: Any, **options: Any) -> Any:
            if dispatcher.op is not None and _state.compiling():
                return dispatcher.op.call(dispatcher.bound(arguments, options))
            if is_method:
                holder = arguments[0]
            else:
                named = options.get("runtime")
                holder = named if isinstance(named, Runtime) else default.runtime
            if holder is not None and not _state.suspended:
                result = MISS
                if any_size and number in holder.family_paths:  # ahead of paths that would each miss another size
                    result = holder.family_paths[number].send(*arguments, **options)
                if result is MISS and number in holder.fast_paths:
                    result = holder.fast_paths[number].send(*arguments, **options)
                if result is not MISS:
                    return result
            return dispatcher.call(arguments, options)

        dispatcher.function = operator
        if dispatcher.op is not None:
            _undefined.append((dispatcher.op, operator))
            _state.compiling = _compiling  # which defines it
        return operator  # type: ignore[return-value]

    return decorate


class _Operator:
    """An operator's full path, and how its paths are found and built."""

    function: Callable[..., Any]  # the operator itself, which tries paths first

    def __init__(
        self,
        full: Callable[..., Any],
        binding: Binding,
        signature: Signature,
        op: TorchOp | None,
        *,
        any_size: bool,
        former: Mapping[str, str],
    ) -> None:
        self.op, self._former = op, former
        self._full, self._signature, self._any_size = full, signature, any_size
        self._binding, self.number = binding, next(_numbers)
        self.is_method = signature.parameters[0] == "self"

    def bound(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, defaults among them.

        Raises:
            TypeError: they are not what the operator takes.
        """
        slots = self._binding.in_order(arguments, options)
        if slots is None and not self._former.keys().isdisjoint(options):
            options = renamed_options(self._full.__name__, self._former, options)
            slots = self._binding.in_order(arguments, options)
        if slots is None:
            inspect.signature(self._full).bind(*arguments, **options)  # which says what is wrong
            raise TypeError(f"{self._full.__name__}: unexpected arguments")
        return dict(zip(self._binding.names, slots, strict=True))

    def call(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """The full path, from whose notes a path is built for calls like one that is made again and again."""
        holder = arguments[0] if self.is_method else runtime_of(options.get("runtime"))
        values = self.bound(arguments, options)
        if self.op is not None and is_intercepted(list(values.values())):
            return self.op.call(values)
        if _state.suspended:
            return self._full(**values)
        with Notes() as notes:
            scales = {
                name: number_of(name, values[name]) for name in self._signature.scales if type(values[name]) is float
            }
            result = self._full(**{**values, **scales})
        note_use(values, notes)
        self._keep(holder, list(values.values()), result, notes)
        return result

    def _keep(self, holder: Any, arguments: list[Any], result: Any, notes: Notes) -> None:
        """Build what paths there can be of such calls, if they are made often enough."""
        if self._any_size and is_second(holder.families, notes):
            sized = any_size_path(self._signature, arguments, result, notes)
            if sized is not None:
                add_path(self._paths(holder.family_paths), sized, _MOST_OF_FAMILIES)
        if all(launched.prepared.runs < FULL_RUNS for launched in notes.launched):
            return
        path = new_path(self._signature, arguments, result, notes)
        if path is None:
            return
        add_path(self._paths(holder.fast_paths), path, _MOST)
        whole = _whole(holder) if self.is_method else None
        if whole is not None:
            paths = new_paths(self._binding.without_instance(), partial(self.function, _twin(whole)))
            paths.entries = (path,)
            _give_method(whole, self._full.__name__, paths.send)

    def _paths(self, of_operators: FastPaths) -> Paths:
        paths: Paths = of_operators.setdefault(self.number, new_paths(self._binding))
        return paths


def full_path(operator: FunctionT) -> FunctionT:
    """The full path of an operator, for one that stands on it: the notes are then its own."""
    return getattr(operator, "__wrapped__", operator)
