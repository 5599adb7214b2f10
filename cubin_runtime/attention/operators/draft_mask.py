"""Draft masks: which query tokens of its request each query token sees, packed where the tree is: device or host.

Layout, as FlashInfer's XQA functions have it: each query token has ``ceil(bound / 32)`` little-endian words of 32 bits,
where ``bound`` is that on the query tokens of a request. Bit ``j`` is set where the token sees query token ``j`` of its
own request; bits past the request's tokens are 0. Keys in front of the query tokens are always visible and have no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict

from ...errors import UsageError
from ...kernels.native.draft_mask.plan import DraftMaskProblem, draft_mask_launch
from ...kernels.native.draft_mask.select import DraftMaskSelection, DraftMaskShape, select_draft_mask
from ...kernels.native.launches import NativeLaunch
from ...launch.driver import DeviceFacts
from ...launch.workspace import AnyWorkspace
from ...values import dataclass
from ..backends import AUTO
from ..call_sizes import MOST, CallSizes, Explained
from ..checks import check_shape, integer, token_stride
from ..decode_rules import MASK_BITS, MASK_ELEMENTS, mask_words
from ..fast_path.operator_function import operator_function
from ..host_draft_masks import is_on_host, pack_on_host
from ..operator import LENGTHS, Call, Given, Operator, OutputForm, TensorArg, shape_of
from ..paged_cache import MAX_QUERIES
from ..pipeline import plan_call, run_call, torch_op
from ..runtime import NativeRelease, Runtime
from ..step_plan import StepPlan

if TYPE_CHECKING:
    from ...protocols import DecodeBackend, Stream
    from ...tensor import Tensor

_DTYPE = "uint16"


class DraftMaskTensors(TypedDict):
    """The tensors of a packing by name, as ``DRAFT_MASK`` declares them."""

    out: Tensor | None
    parents: Tensor | None
    allowed: Tensor | None
    q_cu_seq_lens: Tensor | None


@dataclass(frozen=True, slots=True)
class DraftMaskOptions:
    """The options of a packing; see ``draft_mask``."""

    backend: str = AUTO
    enable_pdl: bool = False


def _bound(call: Call) -> tuple[int, int]:
    """The bound on the query tokens of a request, and the words of a token's mask."""
    tensors, out = call.tensors, call.tensors["out"]
    elements, ragged = MASK_ELEMENTS[out.dtype], tensors.get("q_cu_seq_lens") is not None
    if len(out.shape) != (2 if ragged else 3) or prod(out.shape) < 1:
        form = "[tokens, words] with" if ragged else "[batch, q_len, words] without"
        raise UsageError(f"shape {out.shape}, expected {form} q_cu_seq_lens, of 1 word or more", argument="out")
    words = out.shape[-1] // elements
    if not ragged:
        q_len = out.shape[1]
        if q_len > MAX_QUERIES:
            raise UsageError(f"{q_len} query tokens per request, expected 1 to {MAX_QUERIES}", argument="out")
        words = mask_words(q_len)
        check_shape("out", out, (*out.shape[:2], words * elements))
        return q_len, words
    if words * elements != out.shape[-1] or not 1 <= words * MASK_BITS <= MAX_QUERIES:
        raise UsageError(
            f"{out.shape[-1]} elements of {out.dtype} per token, expected {elements} for every {MASK_BITS} query "
            f"tokens of a request, of which there are at most {MAX_QUERIES}",
            argument="out",
        )
    allowed = tensors.get("allowed")
    columns = words * MASK_BITS if allowed is None or not allowed.shape else allowed.shape[-1]
    return min(words * MASK_BITS, columns), words


def _check(call: Call) -> None:
    tensors, out = call.tensors, call.tensors["out"]
    parents, allowed, sums = tensors.get("parents"), tensors.get("allowed"), tensors.get("q_cu_seq_lens")
    if parents is not None and allowed is not None:
        raise UsageError("given with parents, expected one of them", argument="allowed")
    tensors.check_dtypes()
    q_len, _ = _bound(call)
    check_shape("parents", parents, out.shape[:-1])
    check_shape("allowed", allowed, (*out.shape[:-1], q_len))
    if sums is not None and (len(sums.shape) != 1 or sums.shape[0] < 2):
        raise UsageError(f"shape {sums.shape}, expected (batch + 1,) of 1 request or more", argument="q_cu_seq_lens")
    tensors.check_memory()
    for name, view, trailing in (("parents", parents, 0), ("allowed", allowed, 1)):
        if view is not None:
            token_stride(name, view, trailing)


def _launches(call: Call, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[DraftMaskSelection]]:
    tensors, out = call.tensors, call.tensors["out"]
    parents, allowed, sums = tensors.get("parents"), tensors.get("allowed"), tensors.get("q_cu_seq_lens")
    q_len, words = _bound(call)
    shape = DraftMaskShape(batch=out.shape[0] if sums is None else sums.shape[0] - 1, q_len=q_len)
    problem = DraftMaskProblem(
        shape=shape,
        tokens=prod(out.shape[:-1]),
        words=words,
        parents_stride=0 if parents is None else token_stride("parents", parents, 0),
        allowed_strides=(0, 0) if allowed is None else (token_stride("allowed", allowed, 1), allowed.strides[-1]),
        programmatic_serialization=call.options.enable_pdl,
    )
    selection = select_draft_mask(release.kernels, shape, device)
    return [draft_mask_launch(selection, problem, release.file_of(selection.kernel))]


def _output(arguments: Given) -> OutputForm:
    """Masks of ``_DTYPE`` for the tree of a call.

    Raises:
        UsageError: there is no tree, or its shape or the bound does not say the output's.
    """
    source = "allowed" if arguments["parents"] is None else "parents"
    tree, ragged, bound = arguments[source], arguments["q_cu_seq_lens"] is not None, arguments["max_q_len"]
    if tree is None:
        raise UsageError("None without parents and allowed, expected a tensor", argument="out")
    shape = shape_of(tree, source)
    tokens = shape[:-1] if source == "allowed" else shape
    if len(tokens) != (1 if ragged else 2):
        form = "[tokens, ...] with" if ragged else "[batch, q_len, ...] without"
        raise UsageError(f"shape {shape}, expected {form} q_cu_seq_lens", argument=source)
    if not ragged or source == "allowed":
        bound = shape[-1]
    if bound is None:
        raise UsageError("None with q_cu_seq_lens and without out, expected the bound", argument="max_q_len")
    if not 1 <= integer("max_q_len", bound) <= MAX_QUERIES:
        raise UsageError(f"expected 1 to {MAX_QUERIES} query tokens per request", argument="max_q_len", value=bound)
    return OutputForm(tree, (*tokens, mask_words(bound) * MASK_ELEMENTS[_DTYPE]), _DTYPE)


DRAFT_MASK = Operator(
    name="draft_mask",
    tensors=(
        TensorArg("out", tuple(MASK_ELEMENTS), contiguous=True, written=True),
        TensorArg("parents", ("int32",), optional=True),
        TensorArg("allowed", ("bool", "uint8"), optional=True, alignment=1),
        TensorArg("q_cu_seq_lens", LENGTHS, optional=True, contiguous=True),
    ),
    options=DraftMaskOptions,
    check=_check,
    launches=_launches,
    output=_output,
    op_options={"max_q_len": "SymInt?"},
)


def _shape_of(sizes: CallSizes) -> DraftMaskShape:
    for name, most in (("batch", MOST), ("q_len", MAX_QUERIES)):
        if not 1 <= getattr(sizes, name) <= most:
            raise UsageError(f"expected 1 to {most}", argument=name, value=getattr(sizes, name))
    return DraftMaskShape(batch=sizes.batch, q_len=sizes.q_len)


EXPLAINED = Explained(
    DRAFT_MASK.name, "draft_mask", lambda _: True, _shape_of, lambda *values: (select_draft_mask(*values),)
)


class DraftMaskPlan(StepPlan):
    """A packing for tensors of one set of shapes, strides and dtypes; made by ``plan_draft_mask``.

    ``check`` reports tokens whose parent does not come before them.
    """

    @operator_function()
    def run(
        self,
        out: Tensor,
        *,
        parents: Tensor | None = None,
        allowed: Tensor | None = None,
        q_cu_seq_lens: Tensor | None = None,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
    ) -> None:
        """Run on tensors with the planned shapes, strides and dtypes; see ``draft_mask``, whose errors it has."""
        self.run_step(
            DraftMaskTensors(out=out, parents=parents, allowed=allowed, q_cu_seq_lens=q_cu_seq_lens), workspace, stream
        )


def plan_draft_mask(
    out: Tensor,
    *,
    parents: Tensor | None = None,
    allowed: Tensor | None = None,
    q_cu_seq_lens: Tensor | None = None,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | str | None = None,
) -> DraftMaskPlan:
    """Choose the kernel and the grid for tensors like these. Arguments and errors are those of ``draft_mask``.

    Planning launches and loads nothing and reads no tensor. ``device_facts`` plans for a described device instead of
    the one that ``out`` is on.
    It is a ``DeviceFacts`` or a name such as ``"H200"``; with it, torch's meta and fake tensors are taken, too.
    """
    tensors = DraftMaskTensors(out=out, parents=parents, allowed=allowed, q_cu_seq_lens=q_cu_seq_lens)
    options = DraftMaskOptions(backend=backend, enable_pdl=enable_pdl)
    return plan_call(DraftMaskPlan, DRAFT_MASK, tensors, options, runtime=runtime, device_facts=device_facts)


@operator_function(op=lambda _: torch_op(DRAFT_MASK))
def draft_mask(
    *,
    parents: Any = None,
    allowed: Any = None,
    q_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    out: Any = None,
    workspace: AnyWorkspace | None = None,
    stream: Stream | None = None,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> Any:
    """Pack the masks of draft tokens as ``paged_decode`` and FlashInfer's functions take them.

    Trees on a device are packed there by one launch, without a synchronisation, so a captured graph packs another tree
    at each replay. Trees on the host are packed by numpy.

    Args:
        parents: the tree: the index of each query token's parent among its request's tokens, which comes before it, or
            -1 for a root. A token sees itself and its ancestors. int32 ``[batch, q_len]`` or, with ``q_cu_seq_lens``,
            ``[tokens]``, one stride between all tokens; on the host a sequence for each request, of any lengths. On a
            device, a parent that does not come before its token counts as -1 and is recorded for ``plan.check``.
        allowed: instead of ``parents``, any pattern: bool or uint8 ``[batch, q_len, q_len]`` or, with
            ``q_cu_seq_lens``, ``[tokens, max_q_len]``, not 0 where the row's token sees the column's token of its own
            request. Neither of the two: causal, and ``out`` states the sizes.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, contiguous: prefix sums of the numbers of query tokens. None:
            all requests have the same number. Only for trees on a device.
        max_q_len: bound on the query tokens of a request, 1 to 64, for an ``out`` to be made for ``parents`` of
            requests of different number; on the host None is the largest number.
        out: uint16 ``[batch, q_len, 2 * words]`` or ``[tokens, 2 * words]``, or uint32 with half as many elements,
            contiguous, 4-byte aligned, words = ceil(bound / 32). None makes uint16 of this shape.
        workspace, stream, backend, enable_pdl, runtime: as for ``append_kv``.

    Returns:
        ``out``; for trees on the host a numpy array of uint16, or a torch tensor where the tree is one.

    Raises:
        as ``append_kv``.
    """
    if is_on_host(parents) or is_on_host(allowed):
        for name, tensor in (("q_cu_seq_lens", q_cu_seq_lens), ("out", out)):
            if tensor is not None:
                raise UsageError("given with a tree on the host, expected None", argument=name)
        return pack_on_host(parents, allowed, max_q_len)
    tensors = DraftMaskTensors(out=out, parents=parents, allowed=allowed, q_cu_seq_lens=q_cu_seq_lens)
    arguments = {**tensors, "max_q_len": max_q_len}  # which the form of an output follows from
    options = DraftMaskOptions(backend=backend, enable_pdl=enable_pdl)
    return run_call(DraftMaskPlan, DRAFT_MASK, arguments, options, workspace=workspace, stream=stream, runtime=runtime)
