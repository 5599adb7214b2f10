"""An operator's function: how its calls name arguments, the paths of earlier calls first, then the full path."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from ...launch.accelerator import accelerator
from ...launch.streams import stream_handle
from ...provenance import number_of
from ..former_names import renamed_options
from ..runtime import Runtime, default, runtime_of
from ..torch_ops import TorchOp
from .any_size import any_size_path
from .build import Signature, new_path
from .guards import is_plain
from .notes import FastPaths, Notes
from .path import MISS, AnyPath, record_use

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_MOST = 16  # paths of one operator
_MOST_OF_FAMILIES = 16  # engines have prompts of three bounds, whose lengths begin at four places
_MOST_FAMILIES = 64
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


_CONSTANTS = frozenset({bool, int, float, str})


def is_intercepted(arguments: Sequence[Any]) -> bool:
    """Return whether torch, or a class of tensors, wants to see the ops of a call rather than their memory."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch._C._len_torch_dispatch_stack():
        return True
    others = [value for value in arguments if value is not None and type(value) not in _CONSTANTS]
    flat = [part for value in others for part in (value if isinstance(value, (tuple, list)) else (value,))]
    tensors = [value for value in flat if isinstance(value, torch.Tensor) and not value.is_nested]  # refused later
    return any(
        type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


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


class Binding:
    """The parameters of an operator, by which a call's arguments become a sequence in their order."""

    def __init__(self, names: Sequence[str], defaults: Mapping[str, Any], by_position: int, first: int = 0) -> None:
        """Calls leave out the ``first`` parameters, which are None then, and pass ``by_position`` of the others so."""
        self.names, self.first, self.by_position = tuple(names), first, by_position
        self.defaults = {**defaults, **dict.fromkeys(self.names[:first])}
        self._slots = {name: slot for slot, name in enumerate(self.names)}
        self.empty = tuple(self.defaults.get(name, MISS) for name in self.names)  # a call without arguments
        self._required = [slot for slot, default in enumerate(self.empty) if default is MISS]

    @classmethod
    def of(cls, operator: Callable[..., Any]) -> Binding:
        """Return the binding of a function's parameters."""
        parameters = list(inspect.signature(operator).parameters.values())
        defaults = {
            parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
        }
        by_position = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)
        return cls([parameter.name for parameter in parameters], defaults, by_position)

    def without_instance(self) -> Binding:
        """The same for calls of a method of an instance."""
        return Binding(self.names, self.defaults, self.by_position - 1, 1)

    def in_order(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> list[Any] | None:
        """The arguments of a call in the order of the parameters; None: they are not as the operator takes them."""
        if len(arguments) > self.by_position:
            return None
        behind, slots = self.first + len(arguments), self._slots
        slots_in_order = [*self.empty[: self.first], *arguments, *self.empty[behind:]]
        for name, value in options.items():
            slot = slots.get(name, -1)
            if slot < behind:  # unknown, or given by position too
                return None
            slots_in_order[slot] = value
        for slot in self._required:
            if slots_in_order[slot] is MISS:
                return None
        return slots_in_order


class Paths(Protocol):
    """The paths of calls, the last used first."""

    entries: tuple[AnyPath, ...]

    def call(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """The result of the path of such calls, or ``MISS``."""
        ...

    def send(self, *arguments: Any, **options: Any) -> Any:
        """The result of the path of such calls, or else of ``otherwise``, or ``MISS`` without that."""
        ...


def new_paths(binding: Binding, otherwise: Callable[..., Any] | None = None) -> Paths:
    """No paths yet of an operator whose calls bind so; ``otherwise`` takes the calls of none."""
    module = accelerator()
    if module is None or len(binding.names) > module.MOST_SLOTS:
        return _Paths(binding, otherwise)
    return module.Paths(  # type: ignore[no-any-return]
        names=binding.names,
        defaults=binding.empty,
        missing=MISS,
        first=binding.first,
        by_position=binding.by_position,
        miss=MISS,
        **({} if otherwise is None else {"otherwise": otherwise}),
    )


def add_path(paths: Paths, path: AnyPath, most: int) -> None:
    """Put a path before the others, of which the last used stay, up to ``most`` in all."""
    paths.entries = (path, *paths.entries[: most - 1])


class _Paths:
    """As the accelerator has it in C."""

    def __init__(self, binding: Binding, otherwise: Callable[..., Any] | None) -> None:
        self._binding, self._otherwise = binding, otherwise
        self.entries: tuple[AnyPath, ...] = ()

    def call(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        slots = self._binding.in_order(arguments, options)
        if slots is not None:
            entries = self.entries
            for path in entries:
                result = path(slots)
                if result is not MISS:
                    if path is not entries[0]:
                        self.entries = (path, *(other for other in self.entries if other is not path))
                    return result
        return MISS

    def send(self, *arguments: Any, **options: Any) -> Any:
        result = self.call(arguments, options)
        return result if result is not MISS or self._otherwise is None else self._otherwise(*arguments, **options)


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
        traced = op(full) if op else None
        dispatcher = _Operator(full, binding, signature, traced, any_size=any_size, former=former)
        number, is_method = dispatcher.number, dispatcher.is_method

        @wraps(full)
        def operator(*arguments: Any, **options: Any) -> Any:
            if traced is not None and _state.compiling():
                return traced.call(dispatcher.bound(arguments, options))
            if is_method:
                holder = arguments[0]
            else:
                named = options.get("runtime")
                holder = named if isinstance(named, Runtime) else default.runtime
            if holder is not None and not _state.suspended:
                result = MISS
                if any_size and number in holder.family_paths:  # ahead of paths that would each miss another size
                    result = holder.family_paths[number].call(arguments, options)
                if result is MISS and number in holder.fast_paths:
                    result = holder.fast_paths[number].call(arguments, options)
                if result is not MISS:
                    return result
            return dispatcher.call(arguments, options)

        dispatcher.function = operator
        if traced is not None:
            _undefined.append((traced, operator))
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
        if values.get("stream") is not None:
            _note_use(values, notes)
        self._keep(holder, list(values.values()), result, notes)
        return result

    def _keep(self, holder: Any, arguments: list[Any], result: Any, notes: Notes) -> None:
        """Build what paths there can be of such calls, if they are made often enough."""
        if self._any_size and _is_second(holder.families, notes):
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


def _is_second(families: dict[Hashable, None], notes: Notes) -> bool:
    """Return whether this is the second call that needed a new plan in its family, of these ``families``."""
    launched = notes.single
    if launched is None or launched.family is None or launched.prepared.runs != 1:
        return False
    key = launched.family.key
    if key in families:
        families.pop(key, None)
        return True
    families[key] = None
    for oldest in list(families)[:-_MOST_FAMILIES]:
        families.pop(oldest, None)
    return False


def _note_use(arguments: Mapping[str, Any], notes: Notes) -> None:
    """Tell torch's allocator of a call's tensors where the call named a stream that is not the current one."""
    stream, launched = arguments["stream"], notes.launched[0] if notes.launched else None
    if launched is None or launched.memory is None:
        return
    tensors = [
        value for value in (*arguments.values(), *(item.tensor for item in notes.new_tensors)) if is_plain(value)
    ]
    if tensors and stream_handle(stream) != launched.memory.stream_query(launched.device):
        record_use(stream_handle(stream), launched.device, tensors)
