"""Checks of the attention that follows an append, before the append: a call that is refused has written nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from ...attention.fast_path.guards import KnownForms, guarded
from ...attention.fast_path.operator_function import is_compiling, is_intercepted
from ...attention.operator import Operator
from ...attention.operators.context_attention import CONTEXT_ATTENTION, plan_context_attention
from ...attention.operators.paged_decode import PAGED_DECODE, plan_paged_decode
from ...attention.runtime import Runtime, default_runtime
from ..shapes import shape_of
from .cache import Cache, Queries, attend_cache
from .options import Options

_NUMBERS = (int, float, bool, type(None))
_WINDOW = Options._fields.index("window_size")
_ALIGNED = 15  # the bits of an address that an alignment can ask for
_MOST_CHECKED = 64
_checked: dict[Hashable, _CheckedForm] = {}


class _CheckedForm(NamedTuple):
    """The tensors' forms of a call that was checked for a runtime, and how their addresses are aligned."""

    runtime: ref[Runtime]
    forms: KnownForms
    addresses_of: Sequence[Callable[[Any], int]]
    alignment: Sequence[int]

    def is_of(self, tensors: Sequence[Any]) -> bool:
        """Return whether a call with these tensors needs no other check."""
        return self.runtime() is default_runtime() and self.forms.are_of(tensors) and self.has_alignment_of(tensors)

    def has_alignment_of(self, tensors: Sequence[Any]) -> bool:
        addresses = zip(self.addresses_of, tensors, strict=True)
        return [address_of(tensor) & _ALIGNED for address_of, tensor in addresses] == self.alignment


def check_before_append(queries: Queries, cache: Cache, lengths: Any, options: Options) -> None:
    """Check ``attend_cache`` of a call that appends first, with the lengths before; one like an earlier call is known.

    A call that torch traces is checked when it runs.

    Raises:
        as ``attend_cache``.
    """
    if is_compiling():
        return
    values = (*queries, *cache, lengths, *options.window, *options[1:_WINDOW], *options[_WINDOW + 1 :])
    tensors = [value for value in values if type(value) not in _NUMBERS]
    numbers = [value if type(value) in _NUMBERS else "tensor" for value in values]
    key = (*shape_of(queries.q, "q"), *numbers)
    form = _checked.get(key)
    if (form is not None and form.is_of(tensors)) or is_intercepted(tensors):
        return
    attend_cache(queries, cache, lengths, options, _CHECK_DECODE, _CHECK_CONTEXT)
    _remember(key, tensors)


def _remember(key: Hashable, tensors: Sequence[Any]) -> None:
    items = [item for item in [guarded("", tensor) for tensor in tensors] if item is not None]
    if len(items) < len(tensors):
        return
    if len(_checked) >= _MOST_CHECKED:
        _checked.clear()
    addresses_of = [item.address_of for item in items]
    alignment = [item.view.pointer & _ALIGNED for item in items]
    _checked[key] = _CheckedForm(ref(default_runtime()), KnownForms(items), addresses_of, alignment)


def _check(operator: Operator, plan: Callable[..., Any], *tensors: Any, out: Any, **named: Any) -> None:
    """Plan a call of an operator, whose checks are those of the call; an output that is left out is made for it."""
    if out is None:
        assert operator.output is not None
        out = default_runtime().memory.empty(*operator.output({"q": tensors[0]}))
    plan(*tensors, out=out, **named)


_CHECK_DECODE = partial(_check, PAGED_DECODE, plan_paged_decode)
_CHECK_CONTEXT = partial(_check, CONTEXT_ATTENTION, plan_context_attention)
