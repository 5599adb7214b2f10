"""Guards as source text: tests that a call's tensors have known forms, and expressions for their addresses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

from ...errors import CubinRuntimeError
from ...launch.accelerator import accelerator
from ...tensor import TensorView, view_of

_LEVEL = "_current_level"  # a tensor has a tangent in that of torch.autograd.forward_ad alone
_ALIGNED, _PLACED = 15, 255  # bits of an address that count: of a tensor, of memory that regions are placed in


class GuardedTensor(NamedTuple):
    """A tensor of a call: the name that the source knows it by, and its view."""

    name: str
    tensor: Any
    view: TensorView

    @property
    def address(self) -> str:
        """The expression of its address."""
        return f"{self.name}.pointer" if type(self.tensor) is TensorView else f"{self.name}.data_ptr()"


def guarded(name: str, tensor: Any) -> GuardedTensor | None:
    """The tensor if it can be guarded and has elements: a view, or one of torch's own classes."""
    if type(tensor) is not TensorView and not (is_plain(tensor) and _LEVEL in _levels()):
        return None
    try:
        view = view_of(tensor, name)
    except CubinRuntimeError:
        return None
    if not (view.pointer and all(view.shape) and min(view.strides, default=0) >= 0):
        return None
    return GuardedTensor(name, tensor, view)


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is of a class of torch's own, which keeps no data of another kind behind it."""
    return "torch" in sys.modules and type(tensor) in _plain_classes()


def _plain_classes() -> tuple[type, ...]:
    torch = sys.modules["torch"]
    return torch.Tensor, torch.nn.Parameter


def _levels() -> dict[str, Any]:
    """The names of torch's module of forward-mode derivatives, among them the number of the open level, or -1."""
    names: dict[str, Any] = vars(sys.modules["torch"].autograd.forward_ad)
    return names


def conditions(tensors: Sequence[GuardedTensor], scope: dict[str, Any], sized: Collection[str] = ()) -> list[str]:
    """Expressions that are all true for tensors of the same forms; what they refer to is put into ``scope``.

    Dtype, shape, strides and device are compared at every call: all of them can change while object and address stay.
    The first dimension of those called ``sized`` may be any.
    """
    found = []
    views = [item for item in tensors if type(item.tensor) is TensorView]
    first = {id(item.tensor): item for item in reversed(tensors)}  # by whose name the tensor's address is read
    found += [f"{item.name} is {first[id(item.tensor)].name}" for item in tensors if first[id(item.tensor)] is not item]
    for item in views:
        name, view = item.name, item.view
        scope |= {f"spec_{name}": view.spec, "TensorView": TensorView}
        if name in sized:
            scope |= {f"{part}_{name}": getattr(view, part) for part in ("dtype", "strides", "device")}
            scope[f"shape_{name}"] = view.shape[1:]
            found.append(
                f"type({name}) is TensorView and {name}.strides == strides_{name} and {name}.shape[1:] == shape_{name} "
                f"and {name}.dtype == dtype_{name} and {name}.device == device_{name}"
            )
        else:
            found.append(f"type({name}) is TensorView and {name}.spec == spec_{name}")
    rest = [item for item in tensors if type(item.tensor) is not TensorView]
    if rest:
        torch = sys.modules["torch"]
        scope |= {"modes": torch._C._len_torch_dispatch_stack, "levels": _levels()}
        found += ["not modes()", f"levels['{_LEVEL}'] < 0"]  # in a level, any tensor may have a tangent
        if any(item.tensor.requires_grad for item in rest):
            scope["grad_enabled"] = torch.is_grad_enabled
            found.append("not grad_enabled()")
        # torch's guards take no tensor twice.
        distinct = [item for item in rest if first[id(item.tensor)] is item]
        check = torch_guard([item.tensor for item in distinct], [item.name in sized for item in distinct])
        if check is not None:
            name = "check" if len(distinct) == len(rest) else "check_distinct"
            scope[name] = check
            if accelerator() is None:
                scope["PLAIN"] = _plain_classes()
                found += [f"type({item.name}) in PLAIN and not {item.name}.is_nested" for item in distinct]
            found.append(f"{name}({', '.join(item.name for item in distinct)})")
        else:
            found += [_compared(item, scope, item.name in sized) for item in rest]
    return found


def address_conditions(tensors: Sequence[GuardedTensor], memory: Collection[str], scope: dict[str, Any]) -> list[str]:
    """Expressions that are all true where no address, ``a_`` and the tensor's name, is null and each is as aligned as
    it was, as far as that counts: regions are placed in those called ``memory``."""
    plain, found = [], [f"a_{item.name}" for item in tensors]
    for item in tensors:
        mask = _PLACED if item.name in memory else _ALIGNED
        rest = item.view.pointer & mask
        if mask == _ALIGNED and not rest:
            plain.append(f"a_{item.name}")
        else:
            scope[f"x_{item.name}"] = rest
            found.append(f"a_{item.name} & {mask} == x_{item.name}")
    return [*found, f"not ({' | '.join(plain)}) & {_ALIGNED}"] if plain else found


def _compared(item: GuardedTensor, scope: dict[str, Any], sized: bool) -> str:
    """The test by public attributes, where torch's guards cannot be had; ``sized``: of any first dimension."""
    name, tensor = item.name, item.tensor
    scope |= {
        f"type_{name}": type(tensor),
        f"layout_{name}": tensor.layout,
        f"dtype_{name}": tensor.dtype,
        f"shape_{name}": tensor.shape[sized:],
        f"stride_{name}": tensor.stride(),
        f"device_{name}": item.view.device,
    }
    return (
        f"type({name}) is type_{name} and not {name}.is_nested and {name}.layout is layout_{name} and "
        f"not {name}.is_neg() and {name}.dtype is dtype_{name} and "
        f"{name}.shape{'[1:]' * sized} == shape_{name} and "
        f"{name}.stride() == stride_{name} and {name}.get_device() == device_{name}"
        + ("" if tensor.requires_grad else f" and not {name}.requires_grad")
    )


def torch_guard(tensors: Sequence[Any], sized: Sequence[bool]) -> Callable[..., bool] | None:
    """torch's guard of the forms of ``tensors``, which tests them all in one call of C; None where it cannot be had.

    The first dimension of those that are ``sized`` may be any.
    """
    return _guard(tensors, sized) if _guards_work() else None


def form_guard(
    tensors: Sequence[Any], sizes: Sequence[Sequence[int | None]], strides: Sequence[Sequence[int | None]]
) -> Callable[..., bool] | None:
    """As ``torch_guard``, which other tensors than torch's fail too; a size or stride that is None may be any."""
    if not _guards_work():
        return None
    check = _guard_of(tensors, sizes, strides)
    if accelerator() is not None:
        return check

    def plain(*others: Any) -> bool:
        return all(is_plain(other) and not other.is_nested for other in others) and check(*others)

    return plain


def _guard(tensors: Sequence[Any], sized: Sequence[bool]) -> Callable[..., bool]:
    sizes = [[None] * of_any + list(tensor.size())[of_any:] for tensor, of_any in zip(tensors, sized, strict=True)]
    return _guard_of(tensors, sizes, [list(tensor.stride()) for tensor in tensors])


def _guard_of(
    tensors: Sequence[Any], sizes: Sequence[Sequence[int | None]], strides: Sequence[Sequence[int | None]]
) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    known: dict[str, Any] = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    check: Callable[..., bool] = TensorGuards(*tensors, **known).check
    module = accelerator()
    return check if module is None else module.guard(check)


@cache
def _guards_work() -> bool:
    """Whether torch's guards, which are not public, tell apart all that they must."""
    torch = sys.modules["torch"]
    try:
        empty = torch.empty
        known = empty(4, 8, dtype=torch.float16), empty(2, dtype=torch.int32)
        check, of_any = _guard(known, (False, False)), _guard(known, (True, False))
        shorter, viewed, turned = (empty(4, 8, dtype=torch.float16) for _ in range(3))
        shorter.data = shorter.data[:2]
        viewed.data = viewed.data.view(torch.bfloat16)
        turned.transpose_(0, 1)
        wide = empty(4, 16, dtype=torch.float16)[:, :8]
        negated, parameter = torch._neg_view(known[0]), torch.nn.Parameter(known[0])
        others = (shorter, viewed, turned, wide, negated, parameter, known[0].to("meta"), None, 1)
        others_of_any = (*others[1:], known[0].view(1, 32), empty(4, 8, 1, dtype=torch.float16))
        same = check(empty(4, 8, dtype=torch.float16), known[1]) and of_any(shorter, known[1])
        differ = not any(check(other, known[1]) for other in others)
        return bool(same) and differ and not any(of_any(other, known[1]) for other in others_of_any)
    except Exception:  # whatever a later torch does to names that are its own
        return False
