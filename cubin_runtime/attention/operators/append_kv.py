"""KV append: the operator's declaration, its rules and launches, its plan and its function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

from ...dtypes import DTYPES, ITEM_BYTES
from ...errors import UsageError
from ...kernels.native.append.plan import UNIT_BYTES, AppendProblem, AppendStrides, append_launch, resized_append
from ...kernels.native.append.select import AppendSelection, AppendShape, select_append
from ...kernels.native.constants import CONSTANTS
from ...kernels.native.launches import NativeLaunch
from ...launch.driver import DeviceFacts
from ...launch.workspace import AnyWorkspace
from ...tensor import TensorView
from ...values import dataclass, replaced
from ..backends import AUTO
from ..call_sizes import CallSizes, Explained
from ..checks import check_shape, token_stride
from ..fast_path.operator_function import operator_function
from ..former_names import takes_former_names
from ..operator import LENGTHS, Call, Operator, Resizer, TensorArg
from ..paged_cache import KV_SCALE_TENSORS, KV_SCALES, Q_DTYPES, cache_view, scale_strides
from ..pipeline import plan_call, run_call, torch_op
from ..runtime import NativeRelease, Runtime
from ..step_plan import StepPlan

if TYPE_CHECKING:
    from ...protocols import DecodeBackend, KvLayout, Stream
    from ...tensor import Scale, Tensor

HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 1024
_MOST_TOKENS = 1 << 30  # the number of a token behind them, where a CTA's next chunk would begin, fits an int32


class AppendTensors(TypedDict):
    """The tensors of an append by name, as ``APPEND_KV`` declares them; its scales may be numbers."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    seq_lens: Tensor | None
    q_cu_seq_lens: Tensor | None
    positions: Tensor | None
    batch_indices: Tensor | None
    page_indptr: Tensor | None
    k_scale: Scale | None
    v_scale: Scale | None


@dataclass(frozen=True, slots=True)
class AppendOptions:
    """The options of an append; see ``append_kv``. A scale on the device is None here."""

    k_scale: float | None = None
    v_scale: float | None = None
    kv_layout: str = "NHD"
    lengths_include_new: bool = True
    backend: str = AUTO
    enable_pdl: bool = False


def _one_head(view: TensorView) -> TensorView:
    """``view`` with a dimension of one head in front of its last one."""
    step = view.strides[-2] if len(view.shape) > 1 else 1
    shape, strides = (*view.shape[:-1], 1, view.shape[-1]), (*view.strides[:-1], step, view.strides[-1])
    return replace(view, shape=shape, strides=strides)


def _cache(view: TensorView, options: AppendOptions, name: str) -> TensorView:
    return cache_view(view, name, options.kv_layout) if len(view.shape) != 3 else _one_head(view)


def _source(view: TensorView, _: AppendOptions) -> TensorView:
    return _one_head(view) if len(view.shape) == 2 else view


def _source_arg(name: str, value: str) -> TensorArg:
    return TensorArg(
        name, Q_DTYPES, "k_cache", alignment=16, stride_bytes=16, rows=True, canonical=_source, value=value
    )


def _cache_arg(name: str, **dtypes: Any) -> TensorArg:
    return TensorArg(
        name,
        alignment=16,
        stride_bytes=16,
        rows=True,
        written=True,
        resident=True,
        canonical=partial(_cache, name=name),
        **dtypes,
    )


def _check(call: Call) -> None:
    tensors, options = call.tensors, call.options
    k, v, k_cache, v_cache = (tensors[name] for name in ("k", "v", "k_cache", "v_cache"))
    tensors.check_dtypes()
    if len(k.shape) not in (3, 4) or prod(k.shape) < 1:
        raise UsageError(
            f"shape {k.shape}, expected [tokens, kv_heads, head_dim] or [batch, tokens, kv_heads, head_dim] "
            "of 1 token or more",
            argument="k",
        )
    if prod(k.shape[:-2]) > _MOST_TOKENS:
        raise UsageError(f"shape {k.shape}, expected at most {_MOST_TOKENS} tokens", argument="k")
    _check_caches(k, v, k_cache, v_cache)
    _check_whose(call)
    if k.dtype != v.dtype:
        raise UsageError(f"dtype {v.dtype}, expected {k.dtype}, like k", argument="v")
    for name in KV_SCALES:
        if k.dtype == k_cache.dtype and (getattr(options, name) is not None or tensors.get(name) is not None):
            raise UsageError(
                f"given with {k.dtype} keys and {k_cache.dtype} caches, which are copied; expected None", argument=name
            )
        if tensors.get(name) is not None:
            check_shape(name, tensors[name], (1,), (k_cache.shape[2],), (_batch(call), k_cache.shape[2]))
    tensors.check_memory()
    for name, source in (("k", k), ("v", v)):
        token_stride(name, source, 2)


def _check_caches(k: TensorView, v: TensorView, k_cache: TensorView, v_cache: TensorView) -> None:
    pages, page_size, kv_heads, dim = k_cache.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if prod(cache.shape[:3]) < 1:
            raise UsageError(f"shape {cache.shape}, expected at least one page, slot and head", argument=name)
        if cache.shape[3] % HEAD_DIM_STEP or not 2 * HEAD_DIM_STEP <= cache.shape[3] <= MAX_HEAD_DIM:
            raise UsageError(
                f"head dimension {cache.shape[3]}, expected a multiple of {HEAD_DIM_STEP} from "
                f"{2 * HEAD_DIM_STEP} to {MAX_HEAD_DIM}",
                argument=name,
            )
    check_shape("v_cache", v_cache, (pages, page_size, kv_heads, v_cache.shape[3]))
    check_shape("k", k, (*k.shape[:-2], kv_heads, dim))
    check_shape("v", v, (*k.shape[:-2], kv_heads, v_cache.shape[3]))
    units = kv_heads * (_units(k_cache) + _units(v_cache))
    if units > CONSTANTS.append_max_units:
        raise UsageError(
            f"{units * UNIT_BYTES} bytes of keys and values per token, expected at most "
            f"{CONSTANTS.append_max_units * UNIT_BYTES}",
            argument="k_cache",
        )


def _check_whose(call: Call) -> None:
    """Check what says where the tokens belong: lengths with or without offsets, or positions."""
    tensors, k = call.tensors, call.tensors["k"]
    lengths, offsets = tensors.get("seq_lens"), tensors.get("q_cu_seq_lens")
    positions, requests = tensors.get("positions"), tensors.get("batch_indices")
    table, bounds = tensors["page_table"], tensors.get("page_indptr")
    if (lengths is None) == (positions is None):
        raise UsageError(
            f"{_presence(lengths)} with positions {_presence(positions)}, expected one of them", argument="seq_lens"
        )
    if (positions is None) != (requests is None):
        raise UsageError(f"{_presence(requests)}, expected exactly when positions is given", argument="batch_indices")
    if positions is not None and offsets is not None:
        raise UsageError("given with positions, expected only with seq_lens", argument="q_cu_seq_lens")
    ragged = positions is not None or offsets is not None
    if ragged != (len(k.shape) == 3):
        form = "[tokens, kv_heads, head_dim]" if ragged else "[batch, tokens, kv_heads, head_dim]"
        raise UsageError(
            f"shape {k.shape}, expected {form} {'with' if ragged else 'without'} offsets or positions", argument="k"
        )
    batch = _batch(call)
    if batch < 1:
        raise UsageError("no requests, expected 1 or more", argument="page_table" if bounds is None else "page_indptr")
    check_shape("seq_lens", lengths, (batch,))
    check_shape("q_cu_seq_lens", offsets, (batch + 1,))
    for name, view in (("positions", positions), ("batch_indices", requests)):
        check_shape(name, view, k.shape[:1])
    if bounds is not None:
        check_shape("page_indptr", bounds, (batch + 1,))
        if len(table.shape) != 1 or table.shape[0] < 1:
            raise UsageError(
                f"shape {table.shape} with page_indptr, expected [page ids] of 1 or more", argument="page_table"
            )
    elif len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] < 1:
        raise UsageError(f"shape {table.shape}, expected [{batch}, columns]", argument="page_table")


def _presence(view: TensorView | None) -> str:
    return "None" if view is None else "given"


def _batch(call: Call) -> int:
    """Requests: of the first tensor that says how many."""
    tensors, k = call.tensors, call.tensors["k"]
    bounds, lengths = tensors.get("page_indptr"), tensors.get("seq_lens")
    if len(k.shape) == 4:
        return k.shape[0]
    if lengths is not None:
        return prod(lengths.shape)
    return tensors["page_table"].shape[0] if bounds is None else prod(bounds.shape) - 1


def _units(cache: TensorView) -> int:
    """16-byte units of one head's row."""
    return cache.shape[3] * ITEM_BYTES[cache.dtype] // UNIT_BYTES


def _strides(source: TensorView, name: str, cache: TensorView) -> AppendStrides:
    source_bytes, cache_bytes = ITEM_BYTES[source.dtype], ITEM_BYTES[cache.dtype]
    page, token, head = (stride * cache_bytes for stride in cache.strides[:3])
    return AppendStrides(
        token_stride(name, source, 2) * source_bytes, source.strides[-2] * source_bytes, page, token, head
    )


def _launches(call: Call, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[AppendSelection]]:
    problem, shape = _problem(call), _shape(call)
    selection = select_append(release.kernels, shape, device)
    return [append_launch(selection, problem, release.file_of(selection.kernel))]


def _resizer(call: Call, device: DeviceFacts, release: NativeRelease) -> Resizer | None:
    """As ``Operator``, where the strides of the call's tensors are those of any size."""
    tensors, planned = call.tensors, call.tensors.sized
    k, table, lens = tensors["k"], tensors["page_table"], tensors.get("seq_lens")
    if k.shape[0] < 2 or table.strides[-1] != 1 or (lens is not None and lens.strides != (1,)):
        return None
    ragged, lists = len(k.shape) == 3, len(table.shape) == 1
    scales = [name for name in KV_SCALES if name in planned and len(tensors[name].shape) == 2]
    least = 2 if any(tensors[name].shape[1] == 1 for name in scales) else 1  # the only scale of a call has no strides
    of_tokens = ("k", "v", "positions", "batch_indices")
    of_requests = ("seq_lens", *scales, *(() if lists else ("page_table",)))
    problem, shape, (like,) = _problem(call), _shape(call), _launches(call, device, release)

    def resized(sizes: Mapping[str, int]) -> Sequence[NativeLaunch[AppendSelection]] | None:
        rows, pages = sizes["k"], sizes["page_table"]
        batch = sizes["page_indptr"] - 1 if lists else pages
        expected = {
            **planned,
            **dict.fromkeys(of_requests, batch),
            **dict.fromkeys(of_tokens, rows if ragged else batch),
        }
        expected |= {"q_cu_seq_lens": batch + 1, "page_indptr": batch + 1}
        if lists:
            expected["page_table"] = pages
        tokens = rows * prod(k.shape[1:-2])
        if any(size != expected[name] for name, size in sizes.items()):
            return None
        if not (1 <= tokens <= _MOST_TOKENS and batch >= least and pages >= 1):
            return None
        selection = select_append(release.kernels, replaced(shape, tokens=tokens), device)
        columns = pages if lists else problem.columns
        return [resized_append(like, selection, replaced(problem, batch=batch, tokens=tokens, columns=columns))]

    return resized


def _shape(call: Call) -> AppendShape:
    k, k_cache = call.tensors["k"], call.tensors["k_cache"]
    return AppendShape(dtype=DTYPES[k.dtype].short, kv_dtype=DTYPES[k_cache.dtype].short, tokens=prod(k.shape[:-2]))


def _problem(call: Call) -> AppendProblem:
    tensors, options = call.tensors, call.options
    k, k_cache, v_cache, table = tensors["k"], tensors["k_cache"], tensors["v_cache"], tensors["page_table"]
    return AppendProblem(
        batch=_batch(call),
        tokens=prod(k.shape[:-2]),
        new_tokens=k.shape[1] if len(k.shape) == 4 else 0,
        lengths_include_new=options.lengths_include_new,
        kv_heads=k_cache.shape[2],
        page_size=k_cache.shape[1],
        num_pages=k_cache.shape[0],
        columns=table.shape[-1],
        table_stride=table.strides[0] if len(table.shape) == 2 else 0,
        k_units=_units(k_cache),
        v_units=_units(v_cache),
        k_strides=_strides(k, "k", k_cache),
        v_strides=_strides(tensors["v"], "v", v_cache),
        k_scale=options.k_scale or 1.0,
        v_scale=options.v_scale or 1.0,
        k_scale_strides=scale_strides(tensors.get("k_scale")),
        v_scale_strides=scale_strides(tensors.get("v_scale")),
        programmatic_serialization=options.enable_pdl,
    )


APPEND_KV = Operator(
    name="append_kv",
    tensors=(
        _source_arg("k", "key"),
        _source_arg("v", "value"),
        _cache_arg("k_cache", dtypes=tuple(Q_DTYPES)),
        _cache_arg("v_cache", dtypes={dtype: (dtype,) for dtype in Q_DTYPES}, dtypes_by="k_cache"),
        TensorArg("page_table", ("int32",), rows=True),
        TensorArg("seq_lens", LENGTHS, optional=True, contiguous=True),
        TensorArg("q_cu_seq_lens", LENGTHS, optional=True, contiguous=True, value="cum_seq_lens"),
        TensorArg("positions", LENGTHS, optional=True, contiguous=True),
        TensorArg("batch_indices", LENGTHS, optional=True, contiguous=True),
        TensorArg("page_indptr", LENGTHS, optional=True, contiguous=True),
        *(replace(arg, value=f"{arg.name}_device") for arg in KV_SCALE_TENSORS),
    ),
    options=AppendOptions,
    scales=KV_SCALES,
    former=MappingProxyType({"key": "k", "value": "v", "cum_seq_lens": "q_cu_seq_lens"}),
    check=_check,
    launches=_launches,
    resizer=_resizer,
)


def _shape_of(sizes: CallSizes) -> AppendShape:
    return AppendShape(dtype=sizes.query_dtype(Q_DTYPES), kv_dtype=sizes.dtype_kv, tokens=sizes.all_tokens())


EXPLAINED = Explained(APPEND_KV.name, "append", lambda _: True, _shape_of, lambda *values: (select_append(*values),))


class AppendKvPlan(StepPlan):
    """A KV append for tensors of one set of shapes, strides and dtypes; made by ``plan_append_kv``."""

    @operator_function(scales=KV_SCALES, former=APPEND_KV.former)
    def run(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor | None = None,
        *,
        q_cu_seq_lens: Tensor | None = None,
        positions: Tensor | None = None,
        batch_indices: Tensor | None = None,
        page_indptr: Tensor | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
    ) -> None:
        """Run on tensors with the planned shapes, strides and dtypes; see ``append_kv``.

        Pass exactly the optional tensors that the plan was made with. A scale that was planned as a number may be
        another number, or None for the plan's. Errors are those of ``append_kv``.
        """
        self.run_step(
            AppendTensors(
                k=k,
                v=v,
                k_cache=k_cache,
                v_cache=v_cache,
                page_table=page_table,
                seq_lens=seq_lens,
                q_cu_seq_lens=q_cu_seq_lens,
                positions=positions,
                batch_indices=batch_indices,
                page_indptr=page_indptr,
                k_scale=k_scale,
                v_scale=v_scale,
            ),
            workspace,
            stream,
        )


@takes_former_names(APPEND_KV.former)
def plan_append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
    positions: Tensor | None = None,
    batch_indices: Tensor | None = None,
    page_indptr: Tensor | None = None,
    lengths_include_new: bool = True,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: KvLayout = "NHD",
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | str | None = None,
) -> AppendKvPlan:
    """Choose the kernel and the grid for tensors like these. Arguments and errors are those of ``append_kv``.

    Planning launches and loads nothing and reads no tensor. ``device_facts`` plans for a described device instead of
    the one that ``k`` is on.
    It is a ``DeviceFacts`` or a name such as ``"H200"``; with it, torch's meta and fake tensors are taken, too.
    """
    tensors = AppendTensors(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        q_cu_seq_lens=q_cu_seq_lens,
        positions=positions,
        batch_indices=batch_indices,
        page_indptr=page_indptr,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = AppendOptions(
        kv_layout=kv_layout, lengths_include_new=lengths_include_new, backend=backend, enable_pdl=enable_pdl
    )
    return plan_call(AppendKvPlan, APPEND_KV, tensors, options, runtime=runtime, device_facts=device_facts)


@operator_function(scales=KV_SCALES, any_size=True, former=APPEND_KV.former, op=lambda _: torch_op(APPEND_KV))
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
    positions: Tensor | None = None,
    batch_indices: Tensor | None = None,
    page_indptr: Tensor | None = None,
    lengths_include_new: bool = True,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: KvLayout = "NHD",
    workspace: AnyWorkspace | None = None,
    stream: Stream | None = None,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> None:
    """Write the keys and values of new tokens into a paged KV cache.

    Either lengths determine where a token is written (the new tokens of a request are the last ones of ``seq_lens``, in
    order), or ``positions`` and ``batch_indices`` state it for each token. Tokens after the last offset, before their
    request's first position, or with a negative position or request are padding and are skipped. A token whose page is
    not in the table or the pool is also skipped, and ``plan.check`` reports it. Nothing else is written.

    Args:
        k: ``[tokens, kv_heads, head_dim]`` with ``q_cu_seq_lens`` or ``positions``, else ``[batch, new tokens,
            kv_heads, head_dim]``. Like the caches, or bfloat16 or float16 to be quantised into float8_e4m3fn ones. One
            stride between all tokens; addresses and strides in multiples of 16 bytes. ``[tokens, head_dim]``: one head.
        v: like ``k``, with the head_dim of ``v_cache``.
        k_cache: bfloat16, float16 or float8_e4m3fn ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages,
            kv_heads, page_size, head_dim]`` (HND), of any page size; ``[pages, page_size, head_dim]`` has one head.
            head_dim is a multiple of 16 from 32 to 1024. Strides in multiples of 16 bytes, so K and V may be views of
            one tensor, such as the latent and the rope columns of an MLA cache.
        v_cache: like ``k_cache``; its head_dim may differ.
        page_table: int32 ``[batch, columns]``, the pages of each request in order; with ``page_indptr`` the page ids of
            all requests, one after another.
        seq_lens: int32 or uint32 ``[batch]``, number of keys of each request, by default including the new ones.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``: prefix sums of the numbers of new tokens. A request may have no
            new token; tokens of ``k`` after the last sum are padding.
        positions, batch_indices: int32 or uint32 ``[tokens]``: the position of each token among its request's keys and
            the request, in the place of ``seq_lens``; in any order.
        page_indptr: int32 or uint32 ``[batch + 1]``: where the page ids of each request begin.
        lengths_include_new: False: ``seq_lens`` are the lengths before the append.
        k_scale, v_scale: what keys and values are divided by where they are quantised (they are multiplied by the
            float32 reciprocal; e4m3 saturates at 448): numbers other than 0, or float32 tensors on the device of one
            element, ``[kv_heads]`` or ``[batch, kv_heads]`` with any strides, 0 too; None: 1.
        kv_layout: "NHD" or "HND".
        workspace: scratch memory that belongs to ``stream``. None: the one that the cached plan keeps for this stream.
        stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current stream
            where ``k`` is a torch tensor, else the legacy default stream.
        backend: "auto" (a backend that was measured on this compute capability) or the name of a backend.
        enable_pdl: launch with programmatic dependent launch (stream serialization).
        runtime: the runtime to use. None: the process's default runtime.

    Raises:
        UsageError: an argument is invalid.
        BackendError: no backend supports the call on this device.
        WorkspaceError: the workspace is too small, or the stream is capturing and has no workspace yet.
        MissingError, SourceError, CorruptError: the kernel is not available.
        DeviceError: the driver or the ABI gate rejects the launch.
    """
    tensors = AppendTensors(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        q_cu_seq_lens=q_cu_seq_lens,
        positions=positions,
        batch_indices=batch_indices,
        page_indptr=page_indptr,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = AppendOptions(
        kv_layout=kv_layout, lengths_include_new=lengths_include_new, backend=backend, enable_pdl=enable_pdl
    )
    run_call(AppendKvPlan, APPEND_KV, tensors, options, workspace=workspace, stream=stream, runtime=runtime)
