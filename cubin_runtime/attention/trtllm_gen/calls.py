"""The three calls that trtllm-gen kernels serve, as values: tensors as views, options as numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

from ...kernels.trtllm_gen import entries
from ...kernels.trtllm_gen.arguments import (
    NO_OUT_SCALES,
    NO_SAGE,
    Common,
    Device,
    OutScales,
    PagedKv,
    Sage,
    Scale,
)
from ...kernels.trtllm_gen.problem import Problem
from ...tensor import TensorView

SMALLEST_BOUND = 64
LARGEST_BOUND = (1 << 31) - 1
NO_WINDOW = -1
NO_SCALE = Scale()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What all calls take.

    Attributes:
        query: ``[tokens, heads, head_dim]``, fp16, bf16 or e4m3; all requests' tokens in order.
        out: like ``query`` with V's head dimension, contiguous; uint8 with half of it for FP4.
        seq_lens: int32 ``[batch]``, keys of each request.
        max_q: bound on the query tokens of one request; without ``cum_seq_lens_q`` their number.
        max_kv: bound on the keys of one request.
        bmm1: factor of the scores, as a number, or float32 on the device with log2(e) in it.
        bmm2: factor of the output, as a number or float32 on the device.
        cum_seq_lens_q: int32 ``[batch + 1]``, running sum of query tokens; None: ``max_q`` each.
        sinks: float32 ``[heads]``, logits that only enter the denominator.
        lse: float32 ``[tokens, heads]`` to fill with the log-sum-exp, base 2, any strides.
        window_left: keys before a query's own that it sees; -1: all.
        skip_softmax_factor: threshold times length under which blocks of scores are left out; 0: off.
        pdl: let the kernel start before the one in front of it has ended.
        batch_invariant: choose and run so that a request's bits do not depend on its neighbours or bounds.
    """

    operator: ClassVar[str]
    splits_kv: ClassVar[bool]

    query: TensorView
    out: TensorView
    seq_lens: TensorView
    max_q: int
    max_kv: int
    bmm1: Scale = NO_SCALE
    bmm2: Scale = NO_SCALE
    cum_seq_lens_q: TensorView | None = None
    sinks: TensorView | None = None
    lse: TensorView | None = None
    window_left: int = NO_WINDOW
    skip_softmax_factor: float = 0.0
    pdl: bool = False
    batch_invariant: bool = False

    @property
    def batch(self) -> int:
        """Requests."""
        return self.seq_lens.shape[0]

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return self.query.shape[0]

    @property
    def capacity(self) -> int | None:
        """Most keys that a request can have by its tensors; None where they do not tell."""
        return None

    def common(self, device: Device, workspace: tuple[int, int], counters: int) -> Common:
        """The arguments that the planner's entry points share."""
        return Common(
            device=device,
            query=self.query,
            out=self.out,
            seq_lens=self.seq_lens,
            workspace=workspace,
            batch=self.batch,
            max_q=self.max_q,
            bmm1=self.bmm1,
            bmm2=self.bmm2,
            cum_seq_lens_q=self.cum_seq_lens_q,
            sinks=self.sinks,
            lse=self.lse,
            lse_strides=(self.lse.strides[0], self.lse.strides[1]) if self.lse else (0, 0),
            window_left=self.window_left,
            skip_softmax_factor=self.skip_softmax_factor,
            multi_ctas_enabled=not self.batch_invariant,
            pdl=self.pdl,
            counters=counters,
        )

    def problem(self, device: Device, workspace: tuple[int, int], counters: int) -> Problem:
        """The call as the planner takes it; ``counters`` is an address, 0 for none."""
        raise NotImplementedError

    def pointer_pattern(self) -> Hashable:
        """What of the addresses decides about the plan."""
        return None


CallT = TypeVar("CallT", bound=Call)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PagedCall(Call):
    """Keys and values in pages.

    Attributes:
        key: ``[pages, kv_heads, page_size, head_dim]`` by its strides; uint8 with half of head_dim for FP4.
        value: likewise; the same view as ``key`` for MLA.
        block_tables: int32 ``[batch, columns]`` page numbers; ``[batch, 2, columns]`` for K and V apart;
            ``[batch, q_len, top_k]`` key numbers for sparse MLA.
        key_scales, value_scales: e4m3 ``[pages, kv_heads, page_size, head_dim / 16]`` of FP4 keys and values.
        shares_index: one table serves K and V.
        out_scales: block scales of an FP4 output.
    """

    key: TensorView
    value: TensorView
    block_tables: TensorView
    key_scales: TensorView | None = None
    value_scales: TensorView | None = None
    shares_index: bool = True
    out_scales: OutScales = NO_OUT_SCALES

    @property
    def capacity(self) -> int | None:
        """Columns of the table times the page size; None where the shapes make no sense, for the checks to refuse."""
        return self._keys_in_table()

    def _keys_in_table(self) -> int | None:
        if not self.block_tables.shape or len(self.key.shape) != 4:
            return None
        return self.block_tables.shape[-1] * self.key.shape[2] or None

    def pages(self) -> PagedKv:
        """Keys and values as the planner takes them."""
        return PagedKv(
            key=self.key,
            value=self.value,
            table=self.block_tables,
            max_kv=self.max_kv,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
            shares_index=self.shares_index,
        )

    def pointer_pattern(self) -> Hashable:
        """One pool for K and V counts its pages once."""
        return self.key.pointer == self.value.pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall(_PagedCall):
    """Decoding over paged keys; MLA where the head dimensions say so.

    ``top_k`` over 0 is sparse MLA over that many keys a query, ``top_k_lens`` int32 ``[tokens]`` how many each has.
    """

    operator = "trtllm_batch_decode_with_kv_cache"
    splits_kv = True

    top_k: int = 0
    top_k_lens: TensorView | None = None

    @property
    def capacity(self) -> int | None:
        """None for sparse keys, whose table does not tell the length."""
        return None if self.top_k else self._keys_in_table()

    def problem(self, device: Device, workspace: tuple[int, int], counters: int) -> Problem:
        """As ``Call.problem``."""
        common = self.common(device, workspace, counters)
        return entries.decode(common, self.pages(), self.out_scales, top_k=self.top_k, top_k_lens=self.top_k_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCall(_PagedCall):
    """Prefill over paged keys; ``cum_seq_lens_kv`` is int32 ``[batch + 1]``."""

    operator = "trtllm_batch_context_with_kv_cache"
    splits_kv = False

    cum_seq_lens_kv: TensorView
    causal: bool = True

    def problem(self, device: Device, workspace: tuple[int, int], counters: int) -> Problem:
        """As ``Call.problem``."""
        common = self.common(device, workspace, counters)
        return entries.context(common, self.pages(), self.cum_seq_lens_kv, self.out_scales, causal=self.causal)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedCall(Call):
    """Prefill over keys ``[tokens, kv_heads, head_dim]`` and values that are not paged.

    ``cum_seq_lens_kv`` is int32 ``[batch + 1]``; ``out_scale`` the scale of FP4 block scales, -1 where unused.
    """

    operator = "trtllm_ragged_attention_deepseek"
    splits_kv = False

    key: TensorView
    value: TensorView
    cum_seq_lens_kv: TensorView
    causal: bool = True
    sage: Sage = NO_SAGE
    out_scale: float = -1.0

    def problem(self, device: Device, workspace: tuple[int, int], counters: int) -> Problem:
        """As ``Call.problem``."""
        return entries.ragged(
            self.common(device, workspace, counters),
            self.key,
            self.value,
            self.cum_seq_lens_kv,
            self.max_kv,
            causal=self.causal,
            sage=self.sage,
            out_scale=self.out_scale,
        )


def bound_of(call: Call) -> int:
    """The bound on the keys rounded up to a power of two, as far as the call's tensors hold that many.

    Lengths grow step by step; powers of two keep one plan for long.
    """
    if call.max_kv < 1:
        return call.max_kv  # for the checks to refuse
    bound = max(SMALLEST_BOUND, 1 << (call.max_kv - 1).bit_length())
    return min(bound, LARGEST_BOUND if call.capacity is None else call.capacity)


def bounded(call: CallT) -> CallT:
    """``call`` with the bound that a plan is made for."""
    bound = bound_of(call)
    return call if bound == call.max_kv else replace(call, max_kv=bound)


def signature(call: Call, bound: int) -> tuple[object, ...]:
    """All that a plan depends on: shapes, strides, dtypes, options, ``bound``; no address and no scale's value."""
    parts = [_form(getattr(call, name)) for name in _FORM_FIELDS[type(call)]]
    return (type(call), bound, call.pointer_pattern(), *parts)


_FORM_FIELDS: Mapping[type[Call], tuple[str, ...]] = {
    kind: tuple(member.name for member in fields(kind) if member.name != "max_kv")
    for kind in (DecodeCall, ContextCall, RaggedCall)
}


def _form(value: object) -> object:
    if isinstance(value, TensorView):
        return (value.dtype, value.shape, value.strides, value.device)
    if isinstance(value, Scale):
        return value.pointer != 0
    if isinstance(value, OutScales):
        return (_form(value.scales), value.block)
    if isinstance(value, Sage):
        return (tuple(_form(scale) for scale in value.scales), value.blocks)
    return value
