"""Tests that a call's tensors have known forms: dtype, shape, strides, device, and nothing lazy about them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from ...errors import CubinRuntimeError
from ...launch.accelerator import FORM, MAX_DIMS, accelerator, packed
from ...tensor import TensorView, view_of

LEVEL = "_current_level"  # a tensor has a tangent in that of torch.autograd.forward_ad alone


class GuardedTensor(NamedTuple):
    """A tensor of a call: the name of its argument, and its view."""

    name: str
    tensor: Any
    view: TensorView

    @property
    def address_of(self) -> Callable[[Any], int]:
        """The function that reads the address of such a tensor."""
        return _pointer if type(self.tensor) is TensorView else sys.modules["torch"].Tensor.data_ptr


def _pointer(view: TensorView) -> int:
    return view.pointer


def guarded(name: str, tensor: Any) -> GuardedTensor | None:
    """The tensor if it can be guarded and has elements: a view, or one of torch's own classes."""
    if type(tensor) is not TensorView and not (is_plain(tensor) and LEVEL in _levels()):
        return None
    try:
        view = view_of(tensor, name)
    except CubinRuntimeError:
        return None
    if not (view.pointer and all(view.shape) and min(view.strides, default=0) >= 0):
        return None
    return GuardedTensor(name, tensor, view)


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is of a class of torch's own, which keeps no data of another kind behind it."""
    return "torch" in sys.modules and type(tensor) in _plain_classes()


def _plain_classes() -> tuple[type, ...]:
    torch = sys.modules["torch"]
    return torch.Tensor, torch.nn.Parameter


def _levels() -> dict[str, Any]:
    """The names of torch's module of forward-mode derivatives, among them the number of the open level, or -1."""
    names: dict[str, Any] = vars(sys.modules["torch"].autograd.forward_ad)
    return names


class KnownForms:
    """The forms of the tensors of one call, which those of another may have too; the first dimension of those called
    ``sized`` may be any.

    Dtype, shape, strides and device are compared at every call: all of them can change while object and address stay.
    """

    def __init__(self, tensors: Sequence[GuardedTensor], sized: Collection[str] = ()) -> None:
        first = {id(item.tensor): number for number, item in reversed(list(enumerate(tensors)))}
        pairs = [(number, first[id(item.tensor)]) for number, item in enumerate(tensors)]
        self._same = [pair for pair in pairs if pair[0] != pair[1]]  # whose address is read of the first alone
        views = [number for number, item in enumerate(tensors) if type(item.tensor) is TensorView]
        self._views = [(number, _view_test(tensors[number].view, tensors[number].name in sized)) for number in views]
        # torch's guards take no tensor twice.
        rest = [n for n, item in enumerate(tensors) if type(item.tensor) is not TensorView and pairs[n] == (n, n)]
        self._rest, self._without_grad = rest, any(tensors[number].tensor.requires_grad for number in rest)
        self._check: Callable[..., bool] | None = None
        self._rows: bytes | None = None
        if rest:
            torch = sys.modules["torch"]
            self._modes, self._levels = torch._C._len_torch_dispatch_stack, _levels()
            of_any = [tensors[number].name in sized for number in rest]
            examples = [tensors[number].tensor for number in rest]
            sizes, strides = _sizes_and_strides(examples, of_any)
            self._rows = _form_rows(examples, sizes, strides)
            self._check = _test_by(self._rows) or _guard_of(examples, sizes, strides)
            if self._check is None:
                self._each = [_torch_test(tensors[number], of) for number, of in zip(rest, of_any, strict=True)]

    @property
    def accelerated(self) -> tuple[Any, Any, Any, Any, bytes | None] | None:
        """The same test for C: DLPack's exchange API, whether any mode intercepts calls, the names of torch's module of
        derivatives, whether gradients are recorded, and the forms of all tensors, None where there are none; None:
        Python is to test them."""
        if self._same or self._views or (self._rest and self._rows is None):
            return None
        if not self._rest:
            return exchange_api(), bool, {}, bool, None
        return exchange_api(), self._modes, self._levels, sys.modules["torch"].is_grad_enabled, self._rows

    def are_of(self, tensors: Sequence[Any]) -> bool:
        """Return whether tensors have these forms."""
        for number, first in self._same:
            if tensors[number] is not tensors[first]:
                return False
        for number, test in self._views:
            if not test(tensors[number]):
                return False
        if not self._rest:
            return True
        if len(self._rest) < len(tensors):
            tensors = [tensors[number] for number in self._rest]
        return self._are_of_torch(tensors)

    def _are_of_torch(self, others: Sequence[Any]) -> bool:
        """Return whether torch's tensors have these forms."""
        if self._modes() or self._levels.get(LEVEL, 0) >= 0:  # in a level, any tensor may have a tangent
            return False
        if self._without_grad and sys.modules["torch"].is_grad_enabled():
            return False
        if self._check is None:
            return all(test(other) for test, other in zip(self._each, others, strict=True))
        return self._check(*others)


def _view_test(view: TensorView, any_size: bool) -> Callable[[Any], bool]:
    def test(other: Any) -> bool:
        if type(other) is not TensorView or other.dtype != view.dtype or other.device != view.device:
            return False
        return other.strides == view.strides and other.shape[any_size:] == view.shape[any_size:]

    return test


def _torch_test(item: GuardedTensor, any_size: bool) -> Callable[[Any], bool]:
    """The test by public attributes, where torch's guards cannot be had."""
    tensor, kind, shape = item.tensor, type(item.tensor), item.tensor.shape[any_size:]
    layout, dtype, strides, device = tensor.layout, tensor.dtype, tensor.stride(), item.view.device
    grad = tensor.requires_grad

    def test(other: Any) -> bool:
        if type(other) is not kind or other.is_nested or other.layout is not layout or other.is_neg():
            return False
        if other.dtype is not dtype or other.shape[any_size:] != shape or other.stride() != strides:
            return False
        return other.get_device() == device and (grad or not other.requires_grad)

    return test


def form_test(
    tensors: Sequence[Any], sizes: Sequence[Sequence[int | None]], strides: Sequence[Sequence[int | None]]
) -> Callable[..., bool] | None:
    """A function that tests whether tensors are of the forms of ``tensors``, all in one call of C: the accelerator's or
    torch's guard; None where neither can be had. A size or stride that is None may be any.

    Tensors of other classes than torch's own fail it, and those that are negated lazily or, in grad mode, require grad.
    """
    return _test_by(_form_rows(tensors, sizes, strides)) or _guard_of(tensors, sizes, strides)


def exchange_api() -> Any:
    """DLPack's C exchange API of torch's tensors, as torch 2.11 has it; None: there is none that can be read."""
    torch, module = sys.modules.get("torch"), accelerator()
    api = None if torch is None else getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return api if module is not None and module.readable(api) else None


def _form_rows(
    tensors: Sequence[Any], sizes: Sequence[Sequence[int | None]], strides: Sequence[Sequence[int | None]]
) -> bytes | None:
    """The forms of tensors as the accelerator reads them; None: there is none, or it cannot read these."""
    module: Any = accelerator()
    exchange = exchange_api()
    if exchange is None:
        return None
    try:
        forms = [module.form(exchange, tensor) for tensor in tensors]
    except Exception:  # too many dimensions, or whatever DLPack does not describe
        return None
    rows = []
    for form, *dims in zip(forms, sizes, strides, strict=True):
        values = list(FORM.unpack(form))
        for first, of_tensor in zip((-2 * MAX_DIMS, -MAX_DIMS), dims, strict=True):
            for number, value in enumerate(of_tensor):
                values[first + number] = -1 if value is None else value
        rows.append(values)
    return packed(FORM, rows)


def _test_by(rows: bytes | None) -> Callable[..., bool] | None:
    """The accelerator's test of forms, if there are any."""
    if rows is None:
        return None
    module: Any = accelerator()
    return module.alike(exchange_api(), sys.modules["torch"].is_grad_enabled, rows)  # type: ignore[no-any-return]


def _sizes_and_strides(tensors: Sequence[Any], of_any: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """The sizes of tensors, of which some may have any first one, and their strides."""
    sizes = [
        [None] * any_size + list(tensor.size())[any_size:] for tensor, any_size in zip(tensors, of_any, strict=True)
    ]
    return sizes, [list(tensor.stride()) for tensor in tensors]


def _guard_of(
    tensors: Sequence[Any], sizes: Sequence[Sequence[int | None]], strides: Sequence[Sequence[int | None]]
) -> Callable[..., bool] | None:
    """torch's guard of the forms; None where it cannot be had."""
    return _new_guard(tensors, sizes, strides) if _guards_work() else None


def _new_guard(
    tensors: Sequence[Any], sizes: Sequence[Sequence[int | None]], strides: Sequence[Sequence[int | None]]
) -> Callable[..., bool]:
    """torch's guard, but False for what it would throw for: other classes than torch's own, and nested tensors."""
    from torch._C._dynamo.guards import TensorGuards

    dynamic: dict[str, Any] = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    check: Callable[..., bool] = TensorGuards(*tensors, **dynamic).check
    plain = frozenset(_plain_classes())

    def guard(*others: Any) -> bool:
        return plain.issuperset(map(type, others)) and not any(map(_nested, others)) and check(*others)

    return guard


_nested = attrgetter("is_nested")


@cache
def _guards_work() -> bool:
    """Return whether torch's guards, which are not public, tell apart all that they must."""
    torch = sys.modules["torch"]
    try:
        empty = torch.empty
        examples = empty(4, 8, dtype=torch.float16), empty(2, dtype=torch.int32)
        check, of_any = (_new_guard(examples, *_sizes_and_strides(examples, (first, False))) for first in (False, True))
        shorter, viewed, turned = (empty(4, 8, dtype=torch.float16) for _ in range(3))
        shorter.data = shorter.data[:2]
        viewed.data = viewed.data.view(torch.bfloat16)
        turned.transpose_(0, 1)
        wide = empty(4, 16, dtype=torch.float16)[:, :8]
        negated, parameter = torch._neg_view(examples[0]), torch.nn.Parameter(examples[0])
        others = (shorter, viewed, turned, wide, negated, parameter, examples[0].to("meta"), None, 1)
        others_of_any = (*others[1:], examples[0].view(1, 32), empty(4, 8, 1, dtype=torch.float16))
        same = check(empty(4, 8, dtype=torch.float16), examples[1]) and of_any(shorter, examples[1])
        differ = not any(check(other, examples[1]) for other in others)
        return bool(same) and differ and not any(of_any(other, examples[1]) for other in others_of_any)
    except Exception:  # whatever a later torch does to names that are its own
        return False
