"""The paths of one operator, tried one after another, and how calls name its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...launch.accelerator import accelerator
from .path import MISS, AnyPath


class Binding:
    """The parameters of an operator, by which a call's arguments become a sequence in their order."""

    def __init__(self, parameters: Mapping[str, inspect.Parameter], first: int = 0) -> None:
        """Calls leave out the ``first`` parameters: an instance, in calls of its method."""
        own = list(parameters.values())
        self.names, self.first = tuple(parameters), first
        self.by_position = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in own) - first
        self.defaults = {p.name: p.default for p in own if p.default is not p.empty} | dict.fromkeys(self.names[:first])

    @classmethod
    def of(cls, names: Sequence[str]) -> Binding:
        """Of parameters that may be passed by position or name, all of them."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return cls({name: inspect.Parameter(name, kind) for name in names})

    def without_instance(self) -> Binding:
        """The same for calls of a method of an instance."""
        own = Binding.__new__(Binding)
        own.names, own.first, own.by_position = self.names, 1, self.by_position - 1
        own.defaults = {**self.defaults, self.names[0]: None}
        return own

    def in_order(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> list[Any] | None:
        """The arguments of a call in the order of the parameters; None: they are not as the operator takes them."""
        if len(arguments) > self.by_position:
            return None
        given = dict(zip(self.names[self.first :], arguments, strict=False))
        known = {**self.defaults, **given, **options}
        twice = [name for name in options if name in given]
        if twice or len(known) != len(self.names):
            return None
        missing = [name for name in self.names if name not in known]
        return None if missing else [known[name] for name in self.names]


class Paths(Protocol):
    """The paths of calls, the last used first."""

    entries: tuple[AnyPath, ...]

    def send(self, *arguments: Any, **options: Any) -> Any:
        """What the path of such calls gives, or else what ``otherwise`` does, or ``MISS`` without that."""
        ...


def new_paths(binding: Binding, otherwise: Callable[..., Any] | None = None) -> Paths:
    """No paths yet of an operator whose calls bind so; ``otherwise`` takes the calls of none."""
    module = accelerator()
    if module is None or len(binding.names) > module.MOST_SLOTS:
        return _Paths(binding, otherwise)
    return module.Paths(  # type: ignore[no-any-return]
        names=binding.names,
        defaults=tuple(binding.defaults.get(name, MISS) for name in binding.names),
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
