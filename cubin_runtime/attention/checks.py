"""Checks of single arguments, scales among them; each error names the argument, what came and what was expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from math import prod
from numbers import Real
from typing import Any

from ..errors import UsageError
from ..provenance import ArgumentNumber
from ..tensor import TensorView
from ..values import dataclass

OptionCheck = tuple[str, Callable[[str, Any], Any], bool]  # name, what converts the value, whether it may be None
_PLAIN = (bool, int, float, str, bytes, type(None))
_LONGEST_TEXT = 80
_INTEGER_END = 1 << 63
_LSE_BASES = ("2", "e")
MAX_SCALE = 2.0**127
_TENSOR_MARKS = ("data_ptr", "__cuda_array_interface__", "__dlpack__")


def shown(value: object) -> str:
    """A value as errors show it: short, and without asking objects of other libraries for their text.

    A tensor's text would wait for the device, and that of a huge integer is an error.
    """
    if isinstance(value, (tuple, list)) and all(type(item) in _PLAIN for item in value[:_LONGEST_TEXT]):
        text = f"[{', '.join(map(shown, value[:_LONGEST_TEXT]))}]"
        text = text if isinstance(value, list) else f"({text[1:-1]})"
    elif type(value) is int and value.bit_length() > 64:
        text = f"an integer of {value.bit_length()} bits"
    elif type(value) in _PLAIN:
        text = repr(value)
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def switch(name: str, value: Any) -> bool:
    """``value``, which is True or False: 1 would hash like True in a plan's key.

    Raises:
        UsageError: it is neither.
    """
    if value is True or value is False:
        return bool(value)
    raise UsageError("expected True or False", argument=name, value=shown(value))


def word(name: str, value: Any) -> str:
    """``value``, which is text.

    Raises:
        UsageError: it is not.
    """
    if isinstance(value, str):
        return value
    raise UsageError("expected a word", argument=name, value=shown(value))


def integer(name: str, value: Any) -> int:
    """``value`` as an int.

    Raises:
        UsageError: it is not one, or has more than 64 bits.
    """
    try:
        number = operator.index(value)
    except Exception:  # whatever an object of another library raises
        raise UsageError("expected an integer", argument=name, value=shown(value)) from None
    if not -_INTEGER_END <= number < _INTEGER_END:
        raise UsageError("expected an integer of at most 64 bits", argument=name, value=shown(number))
    return number


def graph_count(value: Any) -> int:
    """``value`` as a number of graphs, the argument ``graphs``.

    Raises:
        UsageError: it is no integer of 0 or more.
    """
    count = integer("graphs", value)
    if count < 0:
        raise UsageError("expected 0 or more", argument="graphs", value=count)
    return count


def real(name: str, value: Any) -> float:
    """``value`` as a float, infinity if it is too large.

    Raises:
        UsageError: it is no real number.
    """
    try:
        if isinstance(value, Real):
            return value if isinstance(value, ArgumentNumber) else float(value)
    except OverflowError:
        return math.inf
    except Exception:  # whatever an object of another library raises
        pass
    raise UsageError("expected a number", argument=name, value=shown(value))


@dataclass(frozen=True, slots=True)
class ScaleProduct:
    """A scale that is a number times a tensor on the device, float32 of one element; None: the number alone."""

    number: float = 1.0
    tensor: Any = None


def split_scale(value: Any, name: str) -> tuple[float | None, Any]:
    """A scale as ``(number, tensor)``; None is no number, or no tensor.

    Raises:
        UsageError: it is neither a number nor a tensor, nor a product of them, or a number that float32 cannot hold.
    """
    if type(value) is ScaleProduct:
        return float32_number(name, value.number), value.tensor
    if value is None:
        return None, None
    if type(value) is float or isinstance(value, Real):
        return float32_number(name, value), None
    if isinstance(value, TensorView) or any(hasattr(value, has) for has in _TENSOR_MARKS):
        return None, value
    raise UsageError(
        f"got {type(value).__name__}, expected a number or a float32 CUDA tensor of one element", argument=name
    )


def float32_number(name: str, value: Any) -> float:
    """A number that is finite as float32, and times log2(e) too, as kernels want it.

    Raises:
        UsageError: it is not; the message begins with ``name``.
    """
    number = real(name, value)
    if not -MAX_SCALE <= number <= MAX_SCALE:
        raise UsageError(f"expected a finite number, at most {MAX_SCALE:.3g} in size", argument=name, value=number)
    return number


def flat_scalar(view: TensorView) -> TensorView:
    """A scale on the device as ``[1]``, which may come as ``[]`` or ``[1, 1]``: to a plan they are the same."""
    return view if prod(view.shape) != 1 else TensorView(view.pointer, view.dtype, (1,), (1,), view.device)


_EXACT: Mapping[Callable[[str, Any], Any], type] = {switch: bool, integer: int, real: float, word: str}
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "bool": switch,
    "int": integer,
    "float": real,
    **dict.fromkeys(("str", "KvLayout", "DecodeBackend", "CompatBackend", "CompatContextBackend"), word),
}


def option_checks(annotations: Mapping[str, str]) -> tuple[OptionCheck, ...]:
    """The checks of options, from their names with their annotations; those of other kinds are left out."""
    parted = [(name, text.removesuffix(" | None"), text) for name, text in annotations.items()]
    return tuple((name, _CHECKS[kind], kind != text) for name, kind, text in parted if kind in _CHECKS)


def check_options(checks: Sequence[OptionCheck], arguments: MutableMapping[str, Any]) -> None:
    """Check a call's options among its ``arguments`` by name, and convert them there.

    Raises:
        UsageError: one is of another kind than declared.
    """
    for name, check, optional in checks:
        value = arguments[name]
        kind = type(value)
        is_as_declared = kind is _EXACT[check] and (kind is not int or -_INTEGER_END < value < _INTEGER_END)
        if not is_as_declared and (value is not None or not optional):
            arguments[name] = check(name, value)


def check_dtype(name: str, view: TensorView | None, expected: Sequence[str], why: str = "") -> None:
    """Raise ``UsageError`` unless ``view`` is None or has one of the dtypes ``expected``."""
    if view is not None and view.dtype not in expected:
        narrow = view.dtype in ("int64", "uint64") and "int32" in expected
        hint = ", torch's .int() converts it" if narrow else ""
        raise UsageError(f"dtype {view.dtype}, expected {listed(expected)}{why}{hint}", argument=name)


def check_shape(name: str, view: TensorView | None, *expected: tuple[int, ...]) -> None:
    """Raise ``UsageError`` unless ``view`` is None or has one of the shapes ``expected``."""
    if view is not None and view.shape not in expected:
        raise UsageError(f"shape {view.shape}, expected {' or '.join(map(str, expected))}", argument=name)


def check_lse_base(value: Any) -> None:
    """Raise ``UsageError`` unless ``value`` is a base of log-sum-exps."""
    if value not in _LSE_BASES:
        raise UsageError(f"expected {' or '.join(map(repr, _LSE_BASES))}", argument="lse_base", value=repr(value))


def check_window(name: str, value: int) -> None:
    """Raise ``UsageError`` unless ``value`` is a number of keys, or -1 for all."""
    if not -1 <= value < 1 << 31:
        raise UsageError("expected -1 (none) or more, below 2^31", argument=name, value=value)


def token_stride(name: str, view: TensorView, trailing: int) -> int:
    """Elements between the query tokens of ``view``, whose last ``trailing`` dimensions belong to one token.

    In front of them stands ``[tokens]`` or ``[batch, q_len]``; the latter must lie like the former.

    Raises:
        UsageError: they do not; the message names the tensor.
    """
    leading = len(view.shape) - trailing
    shape, strides = view.shape[:leading], view.strides[:leading]
    if len(shape) == 1 or shape[1] == 1:
        return strides[0]
    (batch, q_len), (request, token) = shape, strides
    if batch > 1 and request != q_len * token:
        raise UsageError(
            f"strides {view.strides}, expected one stride between all tokens: {q_len * token} elements between "
            f"requests of {q_len} tokens {token} elements apart",
            argument=name,
        )
    return token


def listed(values: Sequence[object]) -> str:
    """``values`` as text."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
