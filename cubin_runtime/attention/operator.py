"""The tensors of an operator, declared once, and what follows from that: reading, checks, forms, messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from operator import attrgetter
from typing import Any

from ..dtypes import ITEM_BYTES
from ..errors import UsageError
from ..kernels.native.problem import NUMBERS
from ..tensor import TensorSpec, TensorView, view_of
from ..values import dataclass
from .checks import check_dtype
from .scales import flat_scalar

Given = Mapping[str, Any]
_NAME = attrgetter("name")


@dataclass(frozen=True, slots=True)
class TensorArg:
    """One tensor of an operator.

    ``dtypes`` are those that it may have; where they depend on a cache, ``dtypes_by`` names that and ``dtypes`` has
    them for each of its dtypes. Addresses are multiples of ``alignment`` bytes, strides of dimensions over 1 of
    ``stride_bytes`` (0: any). ``rows``: the last dimension is dense; ``contiguous``: all are. ``written``: the kernel
    writes it, so no two elements may share an address. ``resident``: it stays while others change from step to step, as
    a layer's cache does. ``scalar``: it has one element, of any number of dimensions, so none of them is a size.
    ``value`` is what launch plans call its address, where that is not its name. ``canonical``
    gives its one form among several that a caller may use, from a view and the call's options.
    """

    name: str
    dtypes: tuple[str, ...] | Mapping[str, Sequence[str]]
    dtypes_by: str = ""
    optional: bool = False
    alignment: int = 4
    stride_bytes: int = 0
    rows: bool = False
    contiguous: bool = False
    written: bool = False
    resident: bool = False
    scalar: bool = False
    value: str = ""
    canonical: Callable[[TensorView, Any], TensorView] | None = None

    def read(self, tensor: Any, options: Any) -> TensorView | None:
        """The canonical view of a caller's tensor.

        Raises:
            UsageError: it is missing, no CUDA tensor, or of no form that has a canonical one.
        """
        if tensor is None and self.optional:
            return None
        view = view_of(tensor, self.name, written=self.written)
        if self.scalar:
            return flat_scalar(view)
        return view if self.canonical is None else self.canonical(view, options)


class CallTensors:
    """The canonical views of one call's tensors, by name and in the order of the declaration; immutable."""

    __slots__ = ("_by_name", "_there", "declared", "specs")

    def __init__(self, declared: Sequence[TensorArg], views: Sequence[TensorView | None]) -> None:
        self.declared = tuple(declared)
        self._by_name: dict[str, TensorView | None] = dict(zip(map(_NAME, declared), views, strict=True))
        self._there = [(arg, view) for arg, view in zip(declared, views, strict=True) if view is not None]
        # The forms: calls of equal forms can share a plan.
        self.specs: tuple[TensorSpec | None, ...] = tuple([view.spec if view else None for view in views])

    def __getitem__(self, name: str) -> TensorView:
        view = self._by_name[name]
        if view is None:
            raise KeyError(name)
        return view

    def get(self, name: str) -> TensorView | None:
        """The tensor, None if it is left out."""
        return self._by_name[name]

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses, 0 for what is left out."""
        return tuple([view.pointer if view else 0 for view in self._by_name.values()])

    @property
    def sized(self) -> dict[str, int]:
        """The first dimension of each tensor that does not stay from step to step: counts of tokens and requests."""
        sized = [(arg, view) for arg, view in self._there if not (arg.resident or arg.scalar)]
        return {arg.name: view.shape[0] for arg, view in sized if view.shape}

    def resized(self, sizes: Mapping[str, int]) -> CallTensors:
        """The same with other first dimensions, by name."""
        views = dict(self._by_name)
        for name, size in sizes.items():
            view = views.get(name)
            if view is not None and view.shape[0] != size:
                shape = (size, *view.shape[1:])
                views[name] = TensorView(view.pointer, view.dtype, shape, view.strides, view.device)
        return CallTensors(self.declared, tuple(views.values()))

    def check_dtypes(self) -> None:
        """Check that every tensor has an allowed dtype."""
        dependent = []
        for arg, view in self._there:
            if not isinstance(arg.dtypes, tuple):
                dependent.append((arg, view, arg.dtypes))
            elif view.dtype not in arg.dtypes:
                check_dtype(arg.name, view, arg.dtypes)
        for arg, view, dtypes in dependent:
            other = self[arg.dtypes_by]
            if view.dtype not in dtypes[other.dtype]:
                check_dtype(arg.name, view, dtypes[other.dtype], f" with {other.dtype} caches")

    def check_devices(self) -> None:
        """Check that all tensors are on the device of the first."""
        first = self.declared[0].name
        device = self[first].device
        for arg, view in self._there:
            if view.device != device:
                raise UsageError(f"{arg.name}: on device {view.device}, {first} is on device {device}")

    def check_addresses(self) -> None:
        """Check that every address is aligned as required, and that none is null."""
        for arg, view in self._there:
            address = view.pointer
            if address % arg.alignment or not address:
                raise UsageError(
                    f"{arg.name}: address {address:#x}, expected a multiple of {arg.alignment} that is not 0"
                )

    def check_memory(self) -> None:
        """Check addresses, strides, and which tensors must be contiguous."""
        self.check_addresses()
        for arg, view in self._there:
            shape, strides = view.shape, view.strides
            # A dimension of size 1 is never stepped over.
            if arg.rows and strides[-1] != 1 and shape[-1] > 1:
                raise UsageError(f"{arg.name}: last stride {strides[-1]}, expected 1")
            if strides and min(strides) < 0:
                raise UsageError(f"{arg.name}: strides {strides}, expected no negative stride")
            unit = arg.stride_bytes and arg.stride_bytes // ITEM_BYTES[view.dtype]
            uneven = unit > 1 and gcd(*strides[:-1]) % unit
            if uneven and [s for size, s in zip(shape[:-1], strides, strict=False) if size > 1 and s % unit]:
                raise UsageError(f"{arg.name}: strides {strides}, expected multiples of {unit} elements")
            overlapping = arg.written and 0 in strides
            if overlapping and 0 in [stride for size, stride in zip(shape, strides, strict=True) if size > 1]:
                raise UsageError(f"{arg.name}: strides {strides}, expected no overlapping elements")
            if arg.contiguous and not view.is_contiguous:
                raise UsageError(f"{arg.name}: shape {shape} with strides {strides}, expected a contiguous tensor")

    def check_planned(self, planned: Sequence[TensorSpec | None]) -> None:
        """Raise ``UsageError`` for the first tensor that is not of the form that a plan was made for."""
        for (name, view), expected in zip(self._by_name.items(), planned, strict=True):
            came = view.spec if view else None
            if came and expected and came.device != expected.device:
                raise UsageError(f"{name}: on device {came.device}, planned for device {expected.device}")
            if came != expected:
                words = tuple(came) if came else "of no tensor", tuple(expected) if expected else "no tensor"
                raise UsageError(f"{name}: dtype, shape, strides, device {words[0]}, planned for {words[1]}")


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: its name, and its tensors in the order in which everything lists them; the first gives the device.

    A run takes some numbers beside them.
    """

    name: str
    tensors: tuple[TensorArg, ...]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Their names in launch plans."""
        return NUMBERS

    @property
    def number_arguments(self) -> tuple[str, ...]:
        """The arguments that give them; those of scales may be tensors too."""
        return "softmax_scale", "output_scale", "max_seq_len"

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the tensors' addresses in launch plans."""
        return tuple(arg.value or arg.name for arg in self.tensors)

    @property
    def resident(self) -> tuple[str, ...]:
        """The names of tensors that stay the same from step to step."""
        return tuple(arg.value or arg.name for arg in self.tensors if arg.resident)

    def read(self, tensors: Given, options: Any) -> CallTensors:
        """The canonical views of the tensors among a call's arguments, by name.

        Raises:
            UsageError: one is missing, no CUDA tensor, or of no form that has a canonical one.
        """
        return CallTensors(self.tensors, [arg.read(tensors[arg.name], options) for arg in self.tensors])
