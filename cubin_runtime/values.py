"""Immutable values that are defined without generated code, which is most of what a dataclass costs at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["HashedOnce", "dataclass", "replaced"]
ItemT = TypeVar("ItemT")


class HashedOnce(tuple[ItemT, ...]):
    """A tuple whose hash is computed once: a long one that caches are asked with."""

    @classmethod
    def of(cls, items: Iterable[ItemT]) -> HashedOnce[ItemT]:
        """The items, themselves if they are such a tuple."""
        return items if isinstance(items, HashedOnce) else cls(items)

    def __hash__(self) -> int:
        attributes: dict[str, int] = self.__dict__
        if "hash" not in attributes:
            attributes["hash"] = super().__hash__()
        return attributes["hash"]

    def __reduce__(self) -> tuple[Any, ...]:
        return HashedOnce, (tuple(self),)  # hashes of text differ between processes


def replaced(value: ItemT, **changes: Any) -> ItemT:
    """``dataclasses.replace`` for values of the classes here, in two thirds of the time.

    Raises:
        TypeError: there is no field of a name.
    """
    instance: Any = value
    other: ItemT = instance.__replace__(**changes)
    return other


if TYPE_CHECKING:
    import inspect
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool, slots: bool, kw_only: bool = False) -> Callable[[type], type]:
        """``dataclasses.dataclass`` of ``frozen=True, slots=True``, to type checkers and to ``fields`` and ``replace``.

        Defining a class takes a tenth of the time, making a value up to one and a half times as long. Such classes may
        only inherit from each other, and may have an ``__init__`` of their own.

        Raises:
            TypeError: frozen or slots is not True.
        """
        if not (frozen and slots):
            raise TypeError(f"frozen={frozen}, slots={slots}: expected both True")

        def define(cls: type) -> type:
            defined = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
            fields = dataclasses.fields(defined)
            everything = _getter([field.name for field in fields])
            compared = _getter([field.name for field in fields if field.compare])
            shown = [field.name for field in fields if field.repr]

            def equal(self: Any, other: object) -> Any:
                return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

            methods = {
                "__init__": _initializer(defined, fields),
                "__eq__": equal,
                "__hash__": lambda self: hash(compared(self)),
                "__repr__": lambda self: (
                    f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
                ),
                "__replace__": _replacer(defined, [field.name for field in fields], everything),
                "__setattr__": _refuse,
                "__delattr__": _refuse,
                "__reduce__": lambda self: (_restored, (self.__class__, everything(self))),
            }
            for name, method in methods.items():
                if name not in vars(cls) or name in ("__replace__", "__setattr__", "__delattr__"):
                    setattr(defined, name, method)
            defined.__signature__ = _Signature()
            return defined

        return define


class _Signature:
    """The signature of a class by its fields, made when somebody asks: ``inspect`` is slow to load."""

    def __get__(self, value: object, cls: type) -> inspect.Signature:
        from inspect import Parameter, Signature

        parameters = []
        for field in dataclasses.fields(cls):
            default = Parameter.empty if field.default is dataclasses.MISSING else field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            kind = Parameter.KEYWORD_ONLY if field.kw_only else Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(Parameter(field.name, kind, default=default, annotation=field.type))
        parameters.sort(key=lambda parameter: parameter.kind)
        return Signature(parameters)


def _initializer(cls: Any, fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    """Return an ``__init__`` that takes the fields as a dataclass does."""
    positional = [field.name for field in fields if not field.kw_only]
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    factories = [(field.name, field.default_factory) for field in fields]
    factory_fields = [(name, make) for name, make in factories if make is not dataclasses.MISSING]
    setters = [(field.name, getattr(cls, field.name).__set__) for field in fields]
    names, check = {field.name for field in fields}, getattr(cls, "__post_init__", None)

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        if len(args) == len(setters) == len(positional) and not named:
            for (_, put), value in zip(setters, args, strict=True):
                put(self, value)
        else:
            values = dict(zip(positional, args, strict=False), **named) if args else named
            surplus = len(args) + len(named) > len(values)  # or an argument by place and by name
            if len(values) < len(names):
                values = {**defaults, **values}
                for name, make in factory_fields:
                    if name not in values:
                        values[name] = make()
            if surplus or values.keys() != names:
                raise _refusal(cls, args, named)
            for name, put in setters:
                put(self, values[name])
        if check is not None:
            check(self)

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return __init__


def _replacer(cls: Any, names: list[str], everything: Callable[[Any], tuple[Any, ...]]) -> Callable[..., Any]:
    """Return a ``__replace__`` that makes a copy with other fields, which is checked as a new value is."""
    setters = {name: getattr(cls, name).__set__ for name in names}
    check = getattr(cls, "__post_init__", None)

    def __replace__(self: Any, **changes: Any) -> Any:
        if not changes.keys() <= setters.keys():
            raise TypeError(f"{cls.__qualname__}: no fields {sorted(changes.keys() - setters.keys())}")
        other = object.__new__(cls)
        for put, value in zip(setters.values(), everything(self), strict=True):
            put(other, value)
        for name, value in changes.items():
            setters[name](other, value)
        if check is not None:
            check(other)
        return other

    return __replace__


def _refusal(cls: Any, args: tuple[Any, ...], named: dict[str, Any]) -> TypeError:
    """Return the error for arguments that a class does not take."""
    try:
        cls.__signature__.bind(*args, **named)
    except TypeError as error:
        return TypeError(f"{cls.__qualname__}: {error}")
    raise AssertionError(f"{cls.__qualname__}: its signature takes {args} and {named}")


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The attributes called ``names`` as a tuple."""
    if len(names) < 2:
        return lambda value: tuple(getattr(value, name) for name in names)
    return attrgetter(*names)


def _refuse(self: object, name: str, *_: object) -> None:
    raise dataclasses.FrozenInstanceError(f"{type(self).__qualname__}.{name}: values do not change")


def _restored(cls: type, values: tuple[Any, ...]) -> Any:
    """A copy of a value that was checked when it was made."""
    instance: Any = object.__new__(cls)
    for field, value in zip(dataclasses.fields(cls), values, strict=True):
        object.__setattr__(instance, field.name, value)
    return instance
