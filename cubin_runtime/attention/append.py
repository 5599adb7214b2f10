"""KV append: new keys and values into a paged cache. A plan made once for forms and options, and the plain function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..launch.driver import DeviceFacts
from ..launch.semaphore_workspace import AnyWorkspace
from .append_operator import APPEND_KV, SCALES, AppendOptions, AppendTensors
from .backends import AUTO
from .fast_path import operator_function
from .plain_operator import PlainPlan, plain_op, plan_plain, run_plain
from .runtime import Runtime

if TYPE_CHECKING:
    from ..protocols import DecodeBackend, KvLayout, Stream
    from ..tensor import Scale, Tensor


class AppendKvPlan(PlainPlan):
    """A KV append for tensors of one set of shapes, strides and dtypes; made by ``plan_append_kv``."""

    @operator_function(scales=SCALES)
    def run(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor | None = None,
        *,
        cum_seq_lens: Tensor | None = None,
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
                key=key,
                value=value,
                k_cache=k_cache,
                v_cache=v_cache,
                page_table=page_table,
                seq_lens=seq_lens,
                cum_seq_lens=cum_seq_lens,
                positions=positions,
                batch_indices=batch_indices,
                page_indptr=page_indptr,
                k_scale=k_scale,
                v_scale=v_scale,
            ),
            workspace,
            stream,
        )


def plan_append_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor | None = None,
    *,
    cum_seq_lens: Tensor | None = None,
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
    the one that ``key`` is on.
    It is a ``DeviceFacts`` or a name such as ``"H200"``; with it, torch's meta and fake tensors are taken, too.
    """
    tensors = AppendTensors(
        key=key,
        value=value,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        cum_seq_lens=cum_seq_lens,
        positions=positions,
        batch_indices=batch_indices,
        page_indptr=page_indptr,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = AppendOptions(
        kv_layout=kv_layout, lengths_include_new=lengths_include_new, backend=backend, enable_pdl=enable_pdl
    )
    return plan_plain(AppendKvPlan, APPEND_KV, tensors, options, runtime=runtime, device_facts=device_facts)


@operator_function(scales=SCALES, any_size=True, op=lambda _: plain_op(APPEND_KV))
def append_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor | None = None,
    *,
    cum_seq_lens: Tensor | None = None,
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
        key: ``[tokens, kv_heads, head_dim]`` with ``cum_seq_lens`` or ``positions``, else ``[batch, new tokens,
            kv_heads, head_dim]``. Like the caches, or bfloat16 or float16 to be quantised into float8_e4m3fn ones. One
            stride between all tokens; addresses and strides in multiples of 16 bytes. ``[tokens, head_dim]``: one head.
        value: like ``key``, with the head_dim of ``v_cache``.
        k_cache: bfloat16, float16 or float8_e4m3fn ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages,
            kv_heads, page_size, head_dim]`` (HND), of any page size; ``[pages, page_size, head_dim]`` has one head.
            head_dim is a multiple of 16 from 32 to 1024. Strides in multiples of 16 bytes, so K and V may be views of
            one tensor, such as the latent and the rope columns of an MLA cache.
        v_cache: like ``k_cache``; its head_dim may differ.
        page_table: int32 ``[batch, columns]``, the pages of each request in order; with ``page_indptr`` the page ids of
            all requests, one after another.
        seq_lens: int32 or uint32 ``[batch]``, number of keys of each request, by default including the new ones.
        cum_seq_lens: int32 or uint32 ``[batch + 1]``: prefix sums of the numbers of new tokens. A request may have no
            new token; tokens of ``key`` after the last sum are padding.
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
            where ``key`` is a torch tensor, else the legacy default stream.
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
        key=key,
        value=value,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        cum_seq_lens=cum_seq_lens,
        positions=positions,
        batch_indices=batch_indices,
        page_indptr=page_indptr,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = AppendOptions(
        kv_layout=kv_layout, lengths_include_new=lengths_include_new, backend=backend, enable_pdl=enable_pdl
    )
    run_plain(AppendKvPlan, APPEND_KV, tensors, options, workspace=workspace, stream=stream, runtime=runtime)
