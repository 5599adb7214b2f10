"""Operators that attend to keys: a call has a bound on them, scales of scores and output, and query tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod, sqrt
from typing import Any, ClassVar

from ..errors import UsageError
from ..kernels.native.problem import LOG2_E, NUMBERS
from ..launch.streams import stream_handle
from ..tensor import TensorView, view_of
from ..values import dataclass
from .backends import AUTO
from .checks import check_dtype, float32_number, integer
from .operator import LENGTHS, CallTensors, Given, Operator, TensorArg
from .runtime import Runtime

SCALES = ("softmax_scale", "output_scale")
SCALE_TENSORS = tuple(
    TensorArg(name, ("float32",), optional=True, scalar=True, value=f"{name}_device") for name in SCALES
)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options that all attention has. A scale on the device is 1 here.

    ``max_q_len`` is given where requests have query tokens of different number, and only there.
    """

    max_seq_len: int
    softmax_scale: float = 1.0
    output_scale: float = 1.0
    max_q_len: int | None = None
    batch_invariant: bool = False
    backend: str = AUTO
    enable_pdl: bool | None = False

    @property
    def factors(self) -> tuple[float, float]:
        """The factors of scores and output."""
        return self.softmax_scale, self.output_scale

    def bounded(self, max_seq_len: int) -> AttentionOptions:
        """The same with another bound, by which a plan of calls with these options may be made."""
        return self if max_seq_len == self.max_seq_len else replace(self, max_seq_len=max_seq_len)


class AttentionCall:
    """The tensors and options of one call, and what follows from them; immutable.

    ``ragged``: its requests have query tokens of different number. ``own_q_len`` are those of each request, None where
    they differ, and ``q_len`` those or their bound. Shapes of a wrong rank give sizes that no rule takes.
    """

    __slots__ = ("batch", "options", "own_q_len", "q", "q_heads", "q_len", "ragged", "tensors", "tokens")

    def __init__(self, tensors: CallTensors, options: Any) -> None:
        self.tensors, self.options = tensors, options
        self.q: TensorView = tensors["q"]
        shape, sums = self.q.shape, tensors.get("q_cu_seq_lens")
        self.ragged = sums is not None
        self.batch = prod(shape[:1]) if sums is None else prod(sums.shape[:1]) - 1
        self.tokens, self.q_heads = prod(shape[:-2]), prod(shape[-2:-1])
        self.own_q_len = None if self.ragged else shape[1] if len(shape) == 4 else 1
        self.q_len: int = self.own_q_len or options.max_q_len or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOperator(Operator):
    """An operator that attends to keys; its options are ``AttentionOptions``.

    ``capacity`` is the most keys that a request can have. ``scale`` is the default softmax scale for the shape of q.
    ``max_queries`` are the most query tokens of a request; None: any number, and their bound is never read back.
    """

    call: ClassVar[type[Any]] = AttentionCall
    scales: tuple[str, ...] = SCALES
    takes_zero: bool = True
    capacity: Callable[[AttentionCall], int]
    scale: Callable[[tuple[int, ...]], float]
    max_queries: int | None = None

    @property
    def numbers(self) -> tuple[str, ...]:
        """As ``Operator``."""
        return NUMBERS

    @property
    def number_arguments(self) -> tuple[str, ...]:
        """As ``Operator``."""
        return *self.scales, "max_seq_len"

    def with_defaults(self, scales: Mapping[str, float | None], tensors: CallTensors) -> Mapping[str, float]:
        """As ``Operator``; a scale on the device is 1."""
        numbers = {name: 1.0 if number is None else number for name, number in scales.items()}
        if scales["softmax_scale"] is None and "softmax_scale" not in tensors:
            numbers["softmax_scale"] = self.scale(tensors["q"].shape)
        return numbers

    def with_bounds(self, named: dict[str, Any], arguments: Given, runtime: Runtime, stream: int) -> None:
        """As ``Operator``; the bound on the query tokens of ragged requests."""
        if self.max_queries is None or named["max_q_len"] is not None or arguments["q_cu_seq_lens"] is None:
            return
        q, sums = arguments["q"], arguments["q_cu_seq_lens"]
        named["max_q_len"] = _longest(runtime, q, sums, stream, self.max_queries)

    def planned_bounds(self, options: AttentionOptions) -> tuple[int, int]:
        """As ``Operator``."""
        return 0, options.max_seq_len

    def planned_options(self, call: AttentionCall, kept_bound: int | None) -> AttentionOptions:
        """As ``Operator``; the bound is raised as far as there is room for keys."""
        options: AttentionOptions = call.options
        return options.bounded(options.max_seq_len if kept_bound is None else min(self.capacity(call), kept_bound))

    def resized_options(self, call: AttentionCall, max_q_len: int | None) -> AttentionOptions:
        """As ``Operator``; the bound is lowered to the room for keys."""
        options: AttentionOptions = call.options
        bound = min(options.max_seq_len, self.capacity(call))
        if (bound, max_q_len) == (options.max_seq_len, options.max_q_len):
            return options
        return replace(options, max_seq_len=bound, max_q_len=max_q_len)

    def launch_numbers(
        self, planned: AttentionOptions, scales: Given, max_seq_len: int | None
    ) -> tuple[int, float, float]:
        """As ``Operator``; without a bound it is the plan's."""
        bound = planned.max_seq_len if max_seq_len is None else integer("max_seq_len", max_seq_len)
        if not 0 <= bound <= planned.max_seq_len:
            raise UsageError(
                f"expected 0 to {planned.max_seq_len}, the plan's bound", argument="max_seq_len", value=bound
            )
        softmax_scale = scales["softmax_scale"] * scales.get("k_scale", 1.0)
        output_scale = scales["output_scale"] * scales.get("v_scale", 1.0)
        for name, product in (("softmax_scale", softmax_scale), ("output_scale", output_scale)):
            float32_number(name, product)
        return bound, softmax_scale * LOG2_E, output_scale

    def options_of_run(self, planned: AttentionOptions, numbers: Sequence[Any]) -> AttentionOptions:
        """As ``Operator``; the scales of keys and values are parts of the other two."""
        bound, scale_log2, output_scale = numbers
        scales = {**dict.fromkeys(self.scales, 1.0), "softmax_scale": scale_log2 / LOG2_E, "output_scale": output_scale}
        return replace(planned, max_seq_len=bound, **scales)


def default_scale(shape: tuple[int, ...]) -> float:
    """1 / sqrt(head_dim); the rules refuse what has no head_dim."""
    return 1 / sqrt(shape[-1]) if shape and shape[-1] else 1.0


def check_query_sums(sums: TensorView) -> None:
    """Check the shape of prefix sums of query tokens."""
    if len(sums.shape) != 1 or sums.shape[0] < 2:
        raise UsageError(f"shape {sums.shape}, expected (batch + 1,) for 1 request or more", argument="q_cu_seq_lens")


def _longest(runtime: Runtime, q: Any, q_cu_seq_lens: Any, stream: int, most: int) -> int:
    """The most query tokens of a request, read back from the device.

    Raises:
        UsageError: q_cu_seq_lens is not what it should be or cannot be read, or a request has too many.
    """
    view, query = view_of(q_cu_seq_lens, "q_cu_seq_lens"), view_of(q, "q")
    tokens = prod(query.shape[:-2])
    if view.device != query.device:
        raise UsageError(f"on device {view.device}, q is on device {query.device}", argument="q_cu_seq_lens")
    check_dtype("q_cu_seq_lens", view, LENGTHS)
    check_query_sums(view)
    driver = runtime.driver
    with driver.using(driver.context_on(view.device)):
        if driver.is_capturing(stream_handle(stream)):
            raise UsageError("None while a stream captures, expected the bound", argument="max_q_len")
    try:
        bounds = runtime.memory.to_host(q_cu_seq_lens)
    except UsageError as error:
        raise UsageError(f"None, expected the bound ({error})", argument="max_q_len") from error
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens:
        ends = f"from {bounds[0]} to {bounds[-1]}" if bounds else "empty"
        raise UsageError(f"{ends}, expected from 0 to q's {tokens} tokens", argument="q_cu_seq_lens")
    for before, after in pairwise(bounds):
        if after < before:
            raise UsageError(f"{before} is followed by {after}, expected none to decrease", argument="q_cu_seq_lens")
        if after - before > most:
            raise UsageError(
                f"a request of {after - before} query tokens, expected at most {most}", argument="q_cu_seq_lens"
            )
    return max((after - before for before, after in pairwise(bounds)), default=0) or 1
