"""An operator, declared once: its tensors, options and scales, and what follows: reading, checks, forms, messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cache
from math import gcd
from typing import Any, ClassVar, NamedTuple

from ..dtypes import ITEM_BYTES
from ..errors import UsageError
from ..kernels.native.launches import NativeLaunch
from ..launch.driver import DeviceFacts
from ..tensor import TensorSpec, TensorView, dtype_word, is_torch, view_of
from ..values import dataclass
from .checks import OptionCheck, check_dtype, check_options, check_shape, flat_scalar, option_checks, split_scale
from .runtime import NativeRelease, Runtime

Given = Mapping[str, Any]
# From the first dimensions of a call's tensors by name, and the bound on its query tokens, to its launches with the
# same bound on the lengths; None: the call has to be checked, and its launches planned anew.
Resizer = Callable[[Mapping[str, int]], Sequence[NativeLaunch[Any]] | None]
LENGTHS = ("int32", "uint32")


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


class CallTensors(dict[str, TensorView]):
    """The canonical views of one call's tensors by name, without those that are left out; it does not change.

    ``declared`` are the tensors of the declaration, in its order, and ``specs`` their forms, None for what is left out.
    Calls of equal forms can share a plan.
    """

    __slots__ = ("_there", "declared", "specs")

    def __init__(self, declared: Sequence[TensorArg], views: Sequence[TensorView | None]) -> None:
        self.declared = tuple(declared)
        self._there = [(arg, view) for arg, view in zip(declared, views, strict=True) if view is not None]
        super().__init__([(arg.name, view) for arg, view in self._there])
        self.specs: tuple[TensorSpec | None, ...] = tuple(
            [TensorSpec(view.dtype, view.shape, view.strides, view.device) if view else None for view in views]
        )

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses, 0 for what is left out."""
        views = [self.get(arg.name) for arg in self.declared]
        return tuple([view.pointer if view else 0 for view in views])

    @property
    def sized(self) -> dict[str, int]:
        """The first dimension of each tensor that does not stay from step to step: counts of tokens and requests.

        A single element in a canonical form, such as one scale, may come with any number of dimensions, or none.
        """
        sized = [(arg, view) for arg, view in self._there if not (arg.resident or arg.scalar)]
        sized = [(arg, view) for arg, view in sized if not (arg.canonical and view.shape == (1,))]
        return {arg.name: view.shape[0] for arg, view in sized if view.shape}

    def resized(self, sizes: Mapping[str, int]) -> CallTensors:
        """The same with other first dimensions, by name."""
        views = []
        for arg in self.declared:
            view, size = self.get(arg.name), sizes.get(arg.name)
            if view is not None and size is not None and view.shape[0] != size:
                view = TensorView(view.pointer, view.dtype, (size, *view.shape[1:]), view.strides, view.device)
            views.append(view)
        return CallTensors(self.declared, views)

    def check_dtypes(self) -> None:
        """Check that every tensor has an allowed dtype."""
        for arg, view in self._there:
            if isinstance(arg.dtypes, tuple):
                if view.dtype not in arg.dtypes:
                    check_dtype(arg.name, view, arg.dtypes)
                continue
            other = self[arg.dtypes_by]
            if other.dtype not in arg.dtypes:
                check_dtype(arg.dtypes_by, other, tuple(arg.dtypes))
            if view.dtype not in arg.dtypes[other.dtype]:
                check_dtype(arg.name, view, arg.dtypes[other.dtype], f" with {other.dtype} caches")

    def check_shapes(self, **expected: Sequence[tuple[int, ...]]) -> None:
        """Check that each tensor that is there has one of the shapes expected of its name."""
        for name, shapes in expected.items():
            view = self.get(name)
            if view is not None and view.shape not in shapes:
                check_shape(name, view, *shapes)

    def check_addresses(self) -> None:
        """Check that every address is aligned as required, and that none is null."""
        for arg, view in self._there:
            address = view.pointer
            if address % arg.alignment or not address:
                raise UsageError(
                    f"address {address:#x}, expected a multiple of {arg.alignment} that is not 0", argument=arg.name
                )

    def check_memory(self) -> None:
        """Check that all tensors are on the device of the first, and what is declared of their shapes and strides."""
        first = self[self.declared[0].name]
        for arg, view in self._there:
            shape, strides = view.shape, view.strides
            if view.device != first.device:
                other = f"{self.declared[0].name} is on device {first.device}"
                raise UsageError(f"on device {view.device}, {other}", argument=arg.name)
            if arg.scalar and shape != (1,):
                raise UsageError(f"shape {shape}, expected one element", argument=arg.name)
            # A dimension of size 1 is never stepped over.
            if arg.rows and strides[-1] != 1 and shape[-1] > 1:
                raise UsageError(f"last stride {strides[-1]}, expected 1", argument=arg.name)
            if strides and min(strides) < 0:
                raise UsageError(f"strides {strides}, expected no negative stride", argument=arg.name)
            unit = arg.stride_bytes and arg.stride_bytes // ITEM_BYTES[view.dtype]
            uneven = unit > 1 and gcd(*strides[:-1]) % unit
            if uneven and [s for size, s in zip(shape[:-1], strides, strict=False) if size > 1 and s % unit]:
                raise UsageError(f"strides {strides}, expected multiples of {unit} elements", argument=arg.name)
            if arg.written and _overlap(shape, strides):
                raise UsageError(f"strides {strides}, expected no overlapping elements", argument=arg.name)
            if arg.contiguous and not view.is_contiguous:
                raise UsageError(
                    f"shape {shape} with strides {strides}, expected a contiguous tensor", argument=arg.name
                )

    def check_planned(self, planned: Sequence[TensorSpec | None]) -> None:
        """Raise ``UsageError`` for the first tensor that is not of the form that a plan was made for."""
        for arg, spec, expected in zip(self.declared, self.specs, planned, strict=True):
            name = arg.name
            if spec and expected and spec.device != expected.device:
                raise UsageError(f"on device {spec.device}, planned for device {expected.device}", argument=name)
            if spec != expected:
                words = tuple(spec) if spec else "of no tensor", tuple(expected) if expected else "no tensor"
                raise UsageError(f"dtype, shape, strides, device {words[0]}, planned for {words[1]}", argument=name)


def _overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements share an address, as far as nested dimensions tell: each steps over all of those with
    smaller strides."""
    extent = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one call, and its options as attributes."""

    tensors: CallTensors
    options: Any


class OutputForm(NamedTuple):
    """A tensor to be made: ``like`` one of a call's, of this shape and dtype; None: of the same dtype."""

    like: Any
    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: its declaration, and what is written by hand for it.

    ``tensors`` are in the order in which everything lists them; the first gives the device. ``options`` is the frozen
    class of its options, whose fields have the names of arguments; ``backend`` is among them, and so are ``scales``,
    arguments that are numbers or tensors on the device; one that is left out makes another plan, and 0 is refused
    unless it ``takes_zero``.

    ``call`` makes a call of tensors and options as ``check`` and ``launches`` take it. ``check`` raises for one that
    breaks a rule. ``launches`` plans a checked call for a device with the kernels of a release; ``resizer`` makes a
    function that does so for calls like it of other sizes, in less time. ``output`` is the form of ``out`` for the
    arguments of a call that leaves it out. ``op_options`` are arguments of its torch op that are neither tensors nor
    options, with their kinds. ``former`` are names that arguments had in the last minor version -> their names.
    """

    call: ClassVar[type[Any]] = Call
    name: str
    tensors: tuple[TensorArg, ...]
    options: type[Any]
    check: Callable[[Any], None]
    launches: Callable[[Any, DeviceFacts, NativeRelease], Sequence[NativeLaunch[Any]]]
    resizer: Callable[[Any, DeviceFacts, NativeRelease], Resizer | None] | None = None
    scales: tuple[str, ...] = ()
    takes_zero: bool = False
    output: Callable[[Given], OutputForm] | None = None
    op_options: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)

    @property
    def option_kinds(self) -> Mapping[str, str]:
        """The annotations of the options that are no scales, by name."""
        return _option_kinds(self.options, self.scales)  # type: ignore[arg-type]  # classes are hashable

    def checked(self, options: Any) -> dict[str, Any]:
        """The options that are no scales by name; raises ``UsageError`` for one of another kind."""
        kinds = _option_kinds(self.options, self.scales)  # type: ignore[arg-type]  # classes are hashable
        named = {name: getattr(options, name) for name in kinds}
        check_options(_checks(self.options, self.scales), named)  # type: ignore[arg-type]  # classes are hashable
        return named

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names in launch plans of the numbers that a run takes beside tensors."""
        return self.scales

    @property
    def number_arguments(self) -> tuple[str, ...]:
        """The arguments that give them; those of scales may be tensors too."""
        return self.scales

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the tensors' addresses in launch plans."""
        return tuple(arg.value or arg.name for arg in self.tensors)

    @property
    def resident(self) -> tuple[str, ...]:
        """The names of tensors that stay the same from step to step."""
        return tuple(arg.value or arg.name for arg in self.tensors if arg.resident)

    def read(self, tensors: Given, options: Any, declared: Sequence[TensorArg] | None = None) -> CallTensors:
        """The canonical views of the tensors among a call's arguments, by name; of all, or of the ``declared`` ones.

        Raises:
            UsageError: one is missing, no CUDA tensor, or of no form that has a canonical one.
        """
        views = list[TensorView | None]()
        for arg in self.tensors if declared is None else declared:
            tensor: Any = tensors.get(arg.name)
            view: TensorView | None = None
            if tensor is not None or not arg.optional:
                view = view_of(tensor, arg.name, written=arg.written)
                if arg.scalar:
                    view = flat_scalar(view)
                elif arg.canonical is not None:
                    view = arg.canonical(view, options)
            views.append(view)
        return CallTensors(self.tensors if declared is None else declared, views)

    def split_scales(self, arguments: dict[str, Any]) -> dict[str, float | None]:
        """The numbers among a call's scales by name, None where there is none; in ``arguments`` only tensors are left.

        Raises:
            UsageError: a scale is neither a number nor a tensor, or is a number that this operator does not take.
        """
        numbers = dict[str, float | None]()
        for name in self.scales:
            scale, number = arguments[name], None
            if scale is not None:
                number, arguments[name] = split_scale(scale, name)
            if number == 0 and not self.takes_zero:
                raise UsageError("expected a number other than 0", argument=name, value=number)
            numbers[name] = number
        return numbers

    def with_defaults(self, scales: Mapping[str, float | None], tensors: CallTensors) -> Mapping[str, float | None]:
        """The scales of a call whose plan is made now, or is shared; here none has a default."""
        return scales

    def with_bounds(self, named: dict[str, Any], arguments: Given, runtime: Runtime, stream: int) -> None:
        """Complete the options in ``named`` that are bounds which a call leaves out; here there are none.

        Raises:
            UsageError: one cannot be read from the call's tensors.
        """

    def planned_bounds(self, options: Any) -> tuple[int, int]:
        """The least and the largest bound on lengths that runs of a plan may give; here there are no bounds."""
        return 0, 0

    def planned_options(self, call: Any, kept_bound: int | None) -> Any:
        """The options to plan a checked call with, whose plan calls up to ``kept_bound`` may share; None: its own."""
        return call.options

    def resized_options(self, call: Any, max_q_len: int | None) -> Any:
        """The options of a call like one with other sizes."""
        return call.options

    def launch_numbers(
        self, planned: Any, scales: Mapping[str, float | None], max_seq_len: int | None
    ) -> tuple[Any, ...]:
        """The values of ``numbers`` for a run of a plan with these options.

        Raises:
            UsageError: a number is not one that the plan takes.
        """
        return tuple(1.0 if scales[name] is None else scales[name] for name in self.scales)

    def options_of_run(self, planned: Any, numbers: Sequence[Any]) -> Any:
        """The options of a run of a plan with the options ``planned``, from the values of ``numbers``."""
        scales = zip(self.scales, numbers, strict=True)
        return replace(planned, **{name: number for name, number in scales if getattr(planned, name) is not None})


def shape_of(tensor: Any, name: str) -> tuple[int, ...]:
    """The shape of a caller's tensor, which torch may trace.

    Raises:
        UsageError: it is no CUDA tensor, or is nested; the message begins with ``name``.
    """
    if getattr(tensor, "is_nested", False):
        raise UsageError("a nested tensor, expected one with a single shape", argument=name)
    return tuple(tensor.shape) if is_torch(tensor) else view_of(tensor, name).shape


def dtype_of(tensor: Any, name: str) -> str:
    """As ``shape_of``, the dtype."""
    return dtype_word(tensor.dtype) if is_torch(tensor) else view_of(tensor, name).dtype


@cache
def _option_kinds(options: type[Any], scales: tuple[str, ...]) -> Mapping[str, str]:
    return {member.name: str(member.type) for member in fields(options) if member.name not in scales}


@cache
def _checks(options: type[Any], scales: tuple[str, ...]) -> tuple[OptionCheck, ...]:
    return option_checks(_option_kinds(options, scales))  # type: ignore[arg-type]  # classes are hashable
