"""Immutable values that are defined without generated code, which is most of what a dataclass costs at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["HashedOnce", "dataclass"]
ItemT = TypeVar("ItemT")


class HashedOnce(tuple[ItemT, ...]):
    """A tuple whose hash is computed once: a long one that caches are asked with."""

    def __hash__(self) -> int:
        known: dict[str, int] = self.__dict__
        if "hash" not in known:
            known["hash"] = super().__hash__()
        return known["hash"]

    def __reduce__(self) -> tuple[Any, ...]:
        return HashedOnce, (tuple(self),)  # hashes of text differ between processes


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool, slots: bool, kw_only: bool = False) -> Callable[[type], type]:
        """``dataclasses.dataclass`` of ``frozen=True, slots=True``, to type checkers and to ``fields`` and ``replace``.

        It takes a tenth of the time to define a class and about twice that to make an instance, so it is for classes of
        which a call makes few. Those may only inherit from each other.

        Raises:
            TypeError: frozen or slots is not True.
        """
        if not (frozen and slots):
            raise TypeError(f"frozen={frozen}, slots={slots}: expected both True")

        def define(cls: type) -> type:
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
            fields = dataclasses.fields(made)
            everything = _getter([field.name for field in fields])
            compared = _getter([field.name for field in fields if field.compare])
            shown = [field.name for field in fields if field.repr]

            def equal(self: Any, other: object) -> Any:
                return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

            methods = {
                "__init__": _initializer(made, fields),
                "__eq__": equal,
                "__hash__": lambda self: hash(compared(self)),
                "__repr__": lambda self: (
                    f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
                ),
                "__setattr__": _refuse,
                "__delattr__": _refuse,
                "__reduce__": lambda self: (_restored, (self.__class__, everything(self))),
            }
            for name, method in methods.items():
                if name not in vars(cls) or name in ("__init__", "__setattr__", "__delattr__"):
                    setattr(made, name, method)
            return made

        return define


def _initializer(cls: Any, fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    """An ``__init__`` that takes the fields as a dataclass does."""
    positional = [field.name for field in fields if not field.kw_only]
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    factories = [(field.name, field.default_factory) for field in fields]
    made = [(name, make) for name, make in factories if make is not dataclasses.MISSING]
    setters = [(field.name, getattr(cls, field.name).__set__) for field in fields]
    known, most, check = {field.name for field in fields}, len(positional), getattr(cls, "__post_init__", None)

    def __init__(self: Any, *args: Any, **named: Any) -> None:  # what a class will have
        values = named
        if args or len(named) < len(known):
            given = dict(zip(positional, args, strict=False))
            if len(args) > most or not named.keys().isdisjoint(given):
                raise TypeError(f"{cls.__qualname__}: got {len(args)} values and {list(named)}, expected {list(known)}")
            values = {**defaults, **given, **named}
            for name, make in made:
                if name not in values:
                    values[name] = make()
        if len(values) > len(known):
            raise TypeError(f"{cls.__qualname__}: got {', '.join(values.keys() - known)}, expected {list(known)}")
        try:
            for name, put in setters:
                put(self, values[name])
        except KeyError:
            missing = sorted(known - values.keys())
            raise TypeError(f"{cls.__qualname__}: missing {', '.join(missing)}") from None
        if check is not None:
            check(self)

    return __init__


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The attributes called ``names`` as a tuple."""
    if len(names) < 2:
        return lambda value: tuple(getattr(value, name) for name in names)
    return attrgetter(*names)


def _refuse(self: object, name: str, *_: object) -> None:
    raise dataclasses.FrozenInstanceError(f"{type(self).__qualname__}.{name}: values do not change")


def _restored(cls: type, values: tuple[Any, ...]) -> Any:
    """A copy of a value that was checked when it was made."""
    made: Any = object.__new__(cls)
    for field, value in zip(dataclasses.fields(cls), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made
