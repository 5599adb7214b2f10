"""The paths of one operator, tried one after another, and how calls name its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...launch.accelerator import accelerator
from .path import MISS, AnyPath


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
        otherwise=otherwise,
    )


def add_path(paths: Paths, path: AnyPath, most: int) -> None:
    """Put a path before the others, of which the last used stay, up to ``most`` in all."""
    paths.entries = (path, *paths.entries[: most - 1])


class _Paths:
    """As the accelerator has it in C."""

    def __init__(self, binding: Binding, otherwise: Callable[..., Any] | None) -> None:
        self._binding, self._otherwise = binding, otherwise
        self.entries: tuple[AnyPath, ...] = ()

    def send(self, *arguments: Any, **options: Any) -> Any:
        slots = self._binding.in_order(arguments, options)
        if slots is not None:
            entries = self.entries
            for path in entries:
                result = path(slots)
                if result is not MISS:
                    if path is not entries[0]:
                        self.entries = (path, *(other for other in self.entries if other is not path))
                    return result
        return MISS if self._otherwise is None else self._otherwise(*arguments, **options)
