"""Merging partial attention results: the operator's declaration, its rules and launches, its plan and its function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

from ...dtypes import DTYPES
from ...errors import UsageError
from ...kernels.native.constants import CONSTANTS
from ...kernels.native.launches import NativeLaunch
from ...kernels.native.merge.plan import MergeProblem, merge_launch
from ...kernels.native.merge.select import MergeSelection, MergeShape, select_merge
from ...launch.driver import DeviceFacts
from ...launch.workspace import AnyWorkspace
from ...tensor import TensorView
from ...values import dataclass
from ..backends import AUTO
from ..call_sizes import CallSizes, Explained
from ..checks import check_dtype, check_lse_base, check_shape
from ..fast_path.operator_function import operator_function
from ..former_names import takes_former_names
from ..operator import Call, Given, Operator, OutputForm, TensorArg, shape_of
from ..pipeline import plan_call, run_call, torch_op
from ..runtime import NativeRelease, Runtime
from ..step_plan import StepPlan

if TYPE_CHECKING:
    from ...protocols import DecodeBackend, LseBase, Stream
    from ...tensor import OutT, QueryT, Tensor

DTYPES_OF_V = ("bfloat16", "float16", "float32")
MAX_HEAD_DIM = 4096
_MAX_ROWS = 1 << 31


class MergeTensors(TypedDict):
    """The tensors of a merge by name, as ``MERGE_STATES`` declares them."""

    parts: Tensor
    part_lses: Tensor
    other: Tensor | None
    other_lse: Tensor | None
    out: Tensor | None
    lse: Tensor | None
    sinks: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The options of a merge; see ``merge_states``."""

    lse_base: str = "2"
    backend: str = AUTO
    enable_pdl: bool = False


def _with_part(trailing: int) -> Any:
    """``[tokens, ...]`` of one part as ``[tokens, 1, ...]``."""

    def canonical(view: TensorView, _: MergeOptions) -> TensorView:
        if len(view.shape) != trailing + 1:
            return view
        shape, strides = (view.shape[0], 1, *view.shape[1:]), (view.strides[0], 0, *view.strides[1:])
        return replace(view, shape=shape, strides=strides)

    return canonical


def _check(call: Call) -> None:
    tensors, parts = call.tensors, call.tensors["parts"]
    if len(parts.shape) != 4 or prod(parts.shape) < 1:
        raise UsageError(
            f"shape {parts.shape}, expected [tokens, parts, heads, head_dim] or [tokens, heads, head_dim] with "
            "elements",
            argument="parts",
        )
    tokens, count, heads, dim = parts.shape
    if dim % CONSTANTS.merge_values or dim > MAX_HEAD_DIM:
        raise UsageError(
            f"head dimension {dim}, expected a multiple of {CONSTANTS.merge_values} up to {MAX_HEAD_DIM}",
            argument="parts",
        )
    if tokens * heads >= _MAX_ROWS:
        raise UsageError(f"{tokens} tokens of {heads} heads, expected fewer than {_MAX_ROWS} rows", argument="parts")
    check_lse_base(call.options.lse_base)
    other, its_lse = tensors.get("other"), tensors.get("other_lse")
    if (other is None) != (its_lse is None):
        raise UsageError(
            f"{'None' if its_lse is None else 'given'}, expected exactly when other is given", argument="other_lse"
        )
    tensors.check_dtypes()
    check_shape("part_lses", tensors["part_lses"], (tokens, count, heads))
    check_shape("other", other, (tokens, heads, dim))
    check_dtype("other", other, (parts.dtype,), ", like parts")
    check_shape("other_lse", its_lse, (tokens, heads))
    check_shape("out", tensors["out"], (tokens, heads, dim))
    check_shape("lse", tensors.get("lse"), (tokens, heads))
    check_shape("sinks", tensors.get("sinks"), (heads,))
    check_shape("mask", tensors.get("mask"), (tokens,))
    tensors.check_memory()


def _launches(call: Call, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[MergeSelection]]:
    tensors, options, parts, lses = call.tensors, call.options, call.tensors["parts"], call.tensors["part_lses"]
    tokens, count, heads, dim = parts.shape
    shape = MergeShape(dtype=DTYPES[parts.dtype].short, tokens=tokens, heads=heads, head_dim=dim)

    def pair(name: str) -> tuple[int, int]:
        view = tensors.get(name)
        return (view.strides[0], view.strides[1]) if view else (0, 0)

    problem = MergeProblem(
        shape=shape,
        parts=count,
        out_dtype=DTYPES[tensors["out"].dtype].short,
        v_strides=(parts.strides[0], parts.strides[1], parts.strides[2]),
        s_strides=(lses.strides[0], lses.strides[1], lses.strides[2]),
        v_other_strides=pair("other"),
        s_other_strides=pair("other_lse"),
        out_strides=pair("out"),
        lse_strides=pair("lse"),
        lse_base_e=options.lse_base == "e",
        programmatic_serialization=options.enable_pdl,
    )
    selection = select_merge(release.kernels, shape, device)
    return [merge_launch(selection, problem, release.file_of(selection.kernel))]


def _output(arguments: Given) -> OutputForm:
    parts = arguments["parts"]
    shape = shape_of(parts, "parts")
    if len(shape) not in (3, 4):
        raise UsageError(f"shape {shape}, expected 3 or 4 dimensions", argument="parts")
    return OutputForm(parts, (shape[0], *shape[-2:]))


def _values(name: str, **more: Any) -> TensorArg:
    return TensorArg(name, DTYPES_OF_V, alignment=16, stride_bytes=16, rows=True, **more)


MERGE_STATES = Operator(
    name="merge_states",
    tensors=(
        _values("parts", value="v", canonical=_with_part(2)),
        TensorArg("part_lses", ("float32",), value="s", canonical=_with_part(1)),
        _values("other", value="v_other", optional=True),
        TensorArg("other_lse", ("float32",), value="s_other", optional=True),
        _values("out", written=True),
        TensorArg("lse", ("float32",), optional=True, written=True),
        TensorArg("sinks", ("float32",), optional=True, contiguous=True),
        TensorArg("mask", ("bool", "uint8"), optional=True, alignment=1, contiguous=True),
    ),
    options=MergeOptions,
    former=MappingProxyType({"v": "parts", "s": "part_lses", "v_other": "other", "s_other": "other_lse"}),
    check=_check,
    launches=_launches,
    output=_output,
)


def _shape_of(sizes: CallSizes) -> MergeShape:
    if sizes.heads_q < 1 or sizes.head_dim < 1 or sizes.head_dim % CONSTANTS.merge_values:
        raise UsageError(
            f"expected a multiple of {CONSTANTS.merge_values}, of 1 head or more",
            argument="head_dim",
            value=sizes.head_dim,
        )
    tokens = sizes.all_tokens()
    return MergeShape(dtype=sizes.dtype_q or "bf16", tokens=tokens, heads=sizes.heads_q, head_dim=sizes.head_dim)


EXPLAINED = Explained(MERGE_STATES.name, "merge", lambda _: True, _shape_of, lambda *values: (select_merge(*values),))


class MergeStatesPlan(StepPlan):
    """A merge for tensors of one set of shapes, strides and dtypes; made by ``plan_merge_states``."""

    @operator_function(former=MERGE_STATES.former)
    def run(
        self,
        parts: Tensor,
        part_lses: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        other: Tensor | None = None,
        other_lse: Tensor | None = None,
        sinks: Tensor | None = None,
        mask: Tensor | None = None,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
    ) -> None:
        """Run on tensors with the planned shapes, strides and dtypes; see ``merge_states``, whose errors it has.

        Pass exactly the optional tensors that the plan was made with.
        """
        self.run_step(
            MergeTensors(
                parts=parts,
                part_lses=part_lses,
                other=other,
                other_lse=other_lse,
                out=out,
                lse=lse,
                sinks=sinks,
                mask=mask,
            ),
            workspace,
            stream,
        )


@takes_former_names(MERGE_STATES.former)
def plan_merge_states(
    parts: Tensor,
    part_lses: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    other: Tensor | None = None,
    other_lse: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    lse_base: LseBase = "2",
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | str | None = None,
) -> MergeStatesPlan:
    """Choose the kernel and the grid for tensors like these. Arguments and errors are those of ``merge_states``.

    Planning launches and loads nothing and reads no tensor. ``device_facts`` plans for a described device instead of
    the one that ``parts`` is on.
    It is a ``DeviceFacts`` or a name such as ``"H200"``; with it, torch's meta and fake tensors are taken, too.
    """
    tensors = MergeTensors(
        parts=parts,
        part_lses=part_lses,
        other=other,
        other_lse=other_lse,
        out=out,
        lse=lse,
        sinks=sinks,
        mask=mask,
    )
    options = MergeOptions(lse_base=lse_base, backend=backend, enable_pdl=enable_pdl)
    return plan_call(MergeStatesPlan, MERGE_STATES, tensors, options, runtime=runtime, device_facts=device_facts)


@operator_function(former=MERGE_STATES.former, op=lambda _: torch_op(MERGE_STATES))
def merge_states(
    parts: QueryT,
    part_lses: Tensor,
    *,
    other: Tensor | None = None,
    other_lse: Tensor | None = None,
    out: OutT | None = None,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    lse_base: LseBase = "2",
    workspace: AnyWorkspace | None = None,
    stream: Stream | None = None,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> QueryT | OutT:
    """Merge attention results over disjoint sets of keys into the result over all of them, by their log-sum-exp.

    The parts are added in order, ``other`` last, in float32, so the same parts give bitwise identical results. A part
    whose log-sum-exp is -inf saw no key and is ignored, whatever its values are. If all parts are ignored, the output
    is 0 and its log-sum-exp is -inf (or that of the sink).

    Args:
        parts: partial outputs, each normalised: ``[tokens, parts, heads, head_dim]``, or ``[tokens, heads, head_dim]``
            of one part; bfloat16, float16 or float32, head_dim a multiple of 8 up to 4096. Addresses and strides in
            multiples of 16 bytes.
        part_lses: float32, shaped like ``parts`` without head_dim, any strides: the log-sum-exp of each part, without a
            sink.
        other, other_lse: one more part, ``[tokens, heads, head_dim]`` and ``[tokens, heads]``, of its dtype.
        out: ``[tokens, heads, head_dim]``, bfloat16, float16 or float32, addresses and strides in multiples of 16
            bytes; it may be ``parts`` of one part. None allocates one like ``parts`` if ``parts`` is a torch tensor.
        lse: float32 ``[tokens, heads]``, any strides, receives the log-sum-exp of the output; it may be ``part_lses``
            of one part. None: not computed.
        sinks: float32 ``[heads]``, contiguous: one logit per head (natural exponent) that is added once to the
            denominator and the log-sum-exp. None: no sinks.
        mask: bool or uint8 ``[tokens]``, contiguous: tokens with 0 are left unchanged in ``out`` and ``lse``. None: all
            tokens are merged.
        lse_base: base of all log-sum-exps: "2" or "e".
        workspace, stream, backend, enable_pdl, runtime: as for ``append_kv``.

    Returns:
        ``out``.

    Raises:
        as ``append_kv``.
    """
    tensors = MergeTensors(
        parts=parts,
        part_lses=part_lses,
        other=other,
        other_lse=other_lse,
        out=out,
        lse=lse,
        sinks=sinks,
        mask=mask,
    )
    options = MergeOptions(lse_base=lse_base, backend=backend, enable_pdl=enable_pdl)
    result: QueryT | OutT = run_call(
        MergeStatesPlan, MERGE_STATES, tensors, options, workspace=workspace, stream=stream, runtime=runtime
    )
    return result
