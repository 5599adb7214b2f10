"""The common part of all calls of trtllm-gen kernels."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from ...errors import UsageError
from ...tensor import TensorView
from ...values import dataclass
from .arguments import Device, Scale, check_length, dtype_of
from .arithmetic import INT32_MAX, float32, int32
from .errors import PlanRefused
from .problem import Bindings, Problem
from .traits import KernelType, QkvLayout
from .workspace_layout import place_regions

LOG2_E = 1.4426950408889634  # the double nearest to log2(e)
NO_WINDOW = -1
NO_SCALE = Scale()


class Heads(NamedTuple):
    """Head counts and head dimensions of a call, named as in ``Problem``."""

    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments that all calls take.

    Attributes:
        query: ``[tokens, heads, head_dim]``, fp16, bf16 or e4m3; all requests' tokens in order.
        out: like ``query`` with V's head dimension, contiguous; uint8 with half of it for FP4.
        seq_lens: int32 ``[batch]``, keys of each request.
        max_q: bound on the query tokens of one request; without ``cum_seq_lens_q`` their number.
        max_kv: bound on the keys of one request.
        bmm1: factor of the scores, as a number, or float32 on the device with log2(e) in it.
        bmm2: factor of the output, as a number or float32 on the device.
        cum_seq_lens_q: int32 ``[batch + 1]``, running sum of query tokens; None: ``max_q`` each.
        sinks: float32 ``[heads]``, logits that enter the softmax denominator only.
        lse: float32 ``[tokens, heads]`` to fill with the log-sum-exp, base 2, any strides.
        window_left: number of keys before its own position that a query sees; -1: all.
        skip_softmax_factor: blocks of scores below this threshold times the length are skipped; 0: off.
        pdl: programmatic dependent launch: the kernel may start before the previous one has ended.
        batch_invariant: a request's bits do not depend on its neighbours or on bounds. One CTA reads all keys of a
            query tile; ``attention.trtllm_gen`` also selects the kernel without looking at the batch. That the bits
            are then equal has not been tested on a GPU.
    """

    layout: ClassVar[QkvLayout]
    kernel_type: ClassVar[KernelType]

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
        """Number of requests."""
        return self.seq_lens.shape[0]

    @property
    def tokens(self) -> int:
        """Number of query tokens of all requests."""
        return self.query.shape[0]

    @property
    def capacity(self) -> int | None:
        """The most keys that the call's tensors can hold for one request; None if their shapes do not tell."""
        return None

    @property
    def shares_pool(self) -> bool:
        """Return whether K and V are one page pool, that is, begin at one address."""
        return False

    def problem(self, device: Device, workspace: tuple[int, int], counters: int | None = None) -> Problem:
        """Validate the call and reduce it to a ``Problem``.

        Args:
            device: the GPU.
            workspace: address and size in bytes.
            counters: address of zeroed counters outside the workspace, 0 if none are needed; None places the
                counters in the workspace.

        Raises:
            ArgumentRefused, PlanRefused: no kernel takes an argument.
            WorkspaceRefused: the workspace is too small for counters and statistics.
            UsageError: a dtype, rank or size is outside what any launch can have.
        """
        raise NotImplementedError

    def bindings(self, workspace: tuple[int, int], counters: int | None = None) -> Bindings:
        """The addresses and scales of the call; arguments as for ``problem``.

        Raises:
            WorkspaceRefused: the workspace is too small for counters and statistics.
        """
        may_merge = self.kernel_type != KernelType.CONTEXT or self.layout != QkvLayout.PAGED
        regions = place_regions(
            *workspace,
            counters=may_merge and counters is None,
            stats_rows=None if self.lse is None else (self.query.shape[1], self.batch, self.max_q),
            scratch=may_merge,
        )
        return Bindings(
            query=self.query.pointer,
            out=self.out.pointer,
            seq_lens=self.seq_lens.pointer,
            cum_seq_lens_q=address_of(self.cum_seq_lens_q),
            sinks=address_of(self.sinks),
            device_softmax_scale_log2=self.bmm1.pointer,
            device_output_scale=self.bmm2.pointer,
            lse=address_of(self.lse),
            counters=regions.counters if counters is None else counters,
            softmax_stats=regions.softmax_stats,
            scratch=regions.scratch,
            softmax_scale_log2=float32((1.0 if self.bmm1.pointer else self.bmm1.value) * LOG2_E),
            output_scale=float32(1.0 if self.bmm2.pointer else self.bmm2.value),
            **self._own_bindings(),
        )

    def _own_bindings(self) -> dict[str, Any]:
        """The bindings that only this kind of call has."""
        raise NotImplementedError

    def _heads(self, device: Device, heads_kv: int, dim_v: int | None = None) -> Heads:
        """Check the sizes that all calls have; ``dim_v`` defaults to the head dimension of the output."""
        query, out = self.query, self.out
        if len(query.shape) != 3:
            raise UsageError(f"query of shape {query.shape}: expected [tokens, heads, head_dim]")
        heads_q, dim_qk = query.shape[1], query.shape[2]
        if dim_v is None:
            dim_v = out.shape[-1] * (2 if out.dtype == "uint8" else 1)
        sizes = {"query heads": heads_q, "KV heads": heads_kv, "head_dim_qk": dim_qk, "head_dim_v": dim_v}
        sizes |= {"batch": self.batch, "max_q_len": self.max_q, "query tokens": self.tokens}
        for name, size in {**sizes, "multiprocessors": device.multiprocessors}.items():
            check_length(name, size)
        if heads_q % heads_kv:
            raise PlanRefused(f"{heads_q} query heads over {heads_kv} KV heads: expected a multiple")
        return Heads(heads_q, heads_kv, dim_qk, dim_v)

    def _stated(self, device: Device, heads: Heads, *, window: int | None = None, **of_this_kind: Any) -> Problem:
        """The problem, with the fields that all calls fill alike; ``of_this_kind`` are the others."""
        if window is None:
            window = INT32_MAX if self.window_left == NO_WINDOW else int32(self.window_left + 1)
        return Problem(
            **heads._asdict(),
            sm=device.sm,
            multiprocessors=device.multiprocessors,
            layout=self.layout,
            kernel_type=self.kernel_type,
            multi_ctas=not self.batch_invariant and self.kernel_type != KernelType.CONTEXT,
            dtype_q=dtype_of("query", self.query),
            dtype_o=dtype_of("out", self.out),
            batch=self.batch,
            max_q=self.max_q,
            max_kv=self.max_kv,
            tokens_q=self.tokens,
            window=window,
            skip_softmax_factor=float32(self.skip_softmax_factor),
            pdl=self.pdl,
            **of_this_kind,
        )


def address_of(tensor: TensorView | None) -> int:
    """The address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.pointer
