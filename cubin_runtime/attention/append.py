"""KV append: new keys and values into a paged cache. A plan made once for forms and options, and the plain function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..launch.driver import DeviceFacts
from .append_operator import APPEND_KV, SCALES
from .backends import AUTO
from .fast_path import operator_function
from .operator_plan import AnyWorkspace
from .plain_operator import PlainPlan, plain_op, plan_plain, run_plain
from .runtime import Runtime

if TYPE_CHECKING:
    from ..protocols import DecodeBackend, KvLayout, Stream
    from ..tensor import Scale, Tensor


class AppendKvPlan(PlainPlan):
    """A KV append for one set of forms; made by ``plan_append_kv``."""

    @operator_function(owner="self", scales={name: name for name in SCALES})
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
        """Run on tensors of the forms that the plan was made for; see ``append_kv``.

        A tensor that the plan was made without must be left out, and the reverse. A scale that was a number may be
        another one, or None: the plan's. Errors as ``append_kv``.
        """
        self.run_step(locals())


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
    device_facts: DeviceFacts | None = None,
) -> AppendKvPlan:
    """Choose the kernel and grid for tensors like these; arguments and errors as ``append_kv``.

    Nothing is launched or loaded and no tensor is read. ``device_facts`` plans for a described device instead of the
    one that ``key`` is on.
    """
    return plan_plain(AppendKvPlan, APPEND_KV, locals())


@operator_function(scales={name: name for name in SCALES}, op=lambda _: plain_op(APPEND_KV))
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

    Where a token goes is said by lengths: the new tokens of a request are the last ones of ``seq_lens``, in order. Or
    it is said for each token by ``positions`` and ``batch_indices``. Nothing else is written: a token behind the last
    offset, in front of its request's first position, or with a negative position or request is padding and is skipped;
    one whose page is not in the table or the pool is skipped too, and ``plan.check`` reports it.

    Args:
        key: ``[tokens, kv_heads, head_dim]`` with ``cum_seq_lens`` or ``positions``, else ``[batch, new tokens,
            kv_heads, head_dim]``. Like the caches, or bfloat16 or float16 to be quantised into float8_e4m3fn ones. All
            tokens lie at one stride; addresses and strides in multiples of 16 bytes. ``[tokens, head_dim]``: one head.
        value: likewise; its head_dim is that of ``v_cache``.
        k_cache: bfloat16, float16 or float8_e4m3fn ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages,
            kv_heads, page_size, head_dim]`` (HND), of any page size; ``[pages, page_size, head_dim]`` has one head.
            head_dim is a multiple of 16 from 32 to 1024. Strides in multiples of 16 bytes, so K and V may be views of
            one tensor, such as the latent and the rope columns of an MLA cache.
        v_cache: like ``k_cache``; its head_dim may be another.
        page_table: int32 ``[batch, columns]``, the pages of each request in order; with ``page_indptr`` the page ids of
            all requests, one after another.
        seq_lens: int32 or uint32 ``[batch]``, keys of each request, by default with the new ones.
        cum_seq_lens: int32 or uint32 ``[batch + 1]``: where the new tokens of each request begin, and behind them the
            end. A request may have none; tokens of ``key`` behind the end are padding.
        positions, batch_indices: int32 or uint32 ``[tokens]``: the position of each token among its request's keys and
            the request, in the place of ``seq_lens``; in any order.
        page_indptr: int32 or uint32 ``[batch + 1]``: where the page ids of each request begin.
        lengths_include_new: False: ``seq_lens`` are the lengths before the append.
        k_scale, v_scale: what keys and values are divided by where they are quantised (they are multiplied by the
            float32 reciprocal; e4m3 saturates at 448): numbers other than 0, or float32 tensors of one element on the
            device; None: 1.
        kv_layout: "NHD" or "HND".
        workspace: scratch that belongs to ``stream``; None: one that the cached plan keeps for it.
        stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current stream
            where ``key`` is a torch tensor, else the legacy default stream.
        backend: "auto" (a backend measured on this compute capability) or a backend's name.
        enable_pdl: launch with programmatic stream serialization.
        runtime: None: the process's default.

    Raises:
        UsageError: an argument is outside its domain.
        BackendError: nothing runs this on the device.
        WorkspaceError: the workspace does not fit, or the stream captures and has none yet.
        MissingError, SourceError, CorruptError: the kernel cannot be had.
        DeviceError: the driver or the ABI gate refuses.
    """
    run_plain(AppendKvPlan, APPEND_KV, locals())
