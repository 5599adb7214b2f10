"""Replacing an installed FlashInfer's functions with ours, and undoing that."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from ...values import dataclass

_PACKAGE = "flashinfer"
_HOMES = ("cascade", "decode", "mla", "page", "prefill", "xqa")
_Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A function of FlashInfer's, and the copy of ours that takes its place.

    The copy is an object of its own, so that undoing finds it wherever it was imported meanwhile, and leaves alone who
    imported ours.
    """

    name: str
    theirs: _Function
    ours: _Function


class _State:
    """The replacements in this process, and the number of handles that made them."""

    handles = 0
    replacements: tuple[_Replacement, ...] = ()


_lock = threading.RLock()


class Installed:
    """A handle that undoes ``install``; as a context manager, at the end of the block.

    Attributes:
        replaced: for each function the places, ``module.name``, in which it was found at installation.
        missing: functions of ours that the installed FlashInfer lacks.
        unknown: for each function the parameters of the installed FlashInfer that ours lacks: a call that gives one is
            a ``TypeError``.
    """

    def __init__(
        self,
        replaced: Mapping[str, tuple[str, ...]],
        missing: tuple[str, ...],
        unknown: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.replaced, self.missing, self.unknown = replaced, missing, unknown
        self._active = True

    def undo(self) -> None:
        """Give FlashInfer its functions back, once all handles are undone. A second call does nothing.

        A module that imported a function meanwhile gets FlashInfer's too. What something else has replaced since stays.
        """
        with _lock:
            if not self._active:
                return
            self._active = False
            _State.handles -= 1
            if not _State.handles:
                _replace({id(one.ours): one.theirs for one in _State.replacements})
                _State.replacements = ()

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def install() -> Installed:
    """Replace an installed FlashInfer's attention functions by those of this package, until the handle is undone.

    This replaces the functions of its modules decode, mla, prefill, xqa, page and cascade, what its package re-exports,
    and the same functions in every module that imported them by name. A function that is held in another way stays
    FlashInfer's: in an attribute of a class or an instance, a default argument, a ``functools.partial``, a closure.
    FlashInfer's own code that calls these functions (its cascade wrappers, for example) then calls ours. Functions that
    this package does not have, and FlashInfer's classes, stay FlashInfer's.

    Calls are counted: FlashInfer has its functions back when every handle is undone. Threads may install and undo at
    the same time; a call that has begun is not affected.

    Returns:
        the handle, which also says what was replaced and what the installed version lacks.

    Raises:
        ImportError: FlashInfer is not installed, or cannot be imported.
    """
    offered = _offered()
    with _lock:
        functions = list(_functions_of(_modules_of_package(), offered))
        replacements = tuple(_Replacement(name, theirs, _copy_of(offered[name])) for name, theirs in functions)
        mine = {id(one.ours): one for one in _State.replacements}
        # A function that is replaced already is found as our copy of it.
        fresh = tuple(one for one in replacements if id(one.theirs) not in mine)
        _replace({id(one.theirs): one.ours for one in fresh})
        _State.replacements += fresh
        _State.handles += 1
        current = {id(one.ours): one.name for one in _State.replacements}
        there = {one.name for one in _State.replacements}
        places = defaultdict[str, list[str]](list)
        for module, name, value in _globals_of_modules():
            if id(value) in current:
                places[current[id(value)]].append(f"{module.__name__}.{name}")
        return Installed(
            {name: tuple(sorted(places[name])) for name in sorted(places)},
            tuple(sorted(offered.keys() - there)),
            {one.name: more for one in _State.replacements if (more := _more_parameters(one))},
        )


def _offered() -> dict[str, _Function]:
    """Our functions by FlashInfer's names."""
    package = sys.modules[__package__ or ""]
    values = {name: getattr(package, name) for name in package.__all__}
    return {name: value for name, value in values.items() if isinstance(value, FunctionType) and value is not install}


def _modules_of_package() -> Iterator[ModuleType]:
    """FlashInfer and its modules that define the functions; an older version may lack some."""
    yield import_module(_PACKAGE)
    for home in _HOMES:
        try:
            yield import_module(f"{_PACKAGE}.{home}")
        except ModuleNotFoundError as error:
            if error.name != f"{_PACKAGE}.{home}":
                raise


def _functions_of(modules: Iterator[ModuleType], names: Mapping[str, Any]) -> Iterator[tuple[str, _Function]]:
    """Every function that one of the modules has under one of the names, each once."""
    seen = set[int]()
    for module in modules:
        for name in names:
            value = vars(module).get(name)
            # The package has its module xqa under the name of the function, unless it re-exports the function.
            if callable(value) and not isinstance(value, ModuleType) and id(value) not in seen:
                seen.add(id(value))
                yield name, value


def _copy_of(function: _Function) -> _Function:
    """Another function object with the code of ``function``: a call costs what it costs there."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(vars(function))
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    copy.__qualname__, copy.__annotations__ = function.__qualname__, function.__annotations__
    return copy


def _replace(replacements: Mapping[int, _Function]) -> None:
    """Replace, in every module, the values with these ids; ids are of objects that the caller keeps alive."""
    for module, name, value in _globals_of_modules():
        if id(value) in replacements:
            # Past __setattr__, which a module of another class may have.
            vars(module)[name] = replacements[id(value)]


def _globals_of_modules() -> Iterator[tuple[ModuleType, str, Any]]:
    """Module, name and value of all that modules have now; nothing is computed or imported for it."""
    seen = set[int]()
    modules: Sequence[Any] = tuple(sys.modules.values())
    for module in modules:
        # Not isinstance: what stands in for a module may claim its class.
        if issubclass(type(module), ModuleType) and id(module) not in seen:
            seen.add(id(module))
            names = ModuleType.__getattribute__(module, "__dict__")
            yield from ((module, name, value) for name, value in tuple(names.items()))


def _more_parameters(replacement: _Replacement) -> tuple[str, ...]:
    """The parameters of FlashInfer's function that ours lacks."""
    try:
        theirs = inspect.signature(replacement.theirs).parameters.values()
    except (TypeError, ValueError):
        return ()
    ours = inspect.signature(replacement.ours).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(one.name for one in theirs if one.kind not in variable and one.name not in ours)
