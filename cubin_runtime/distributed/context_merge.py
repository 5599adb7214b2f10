"""Context-parallel decode: partial outputs of all ranks, exchanged and merged by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..attention import merge_states
from ..attention.checks import check_lse_base, integer, listed
from ..attention.operators.merge_states import DTYPES_OF_V
from ..errors import UsageError
from ..tensor import check_needs_no_grad, dtype_word
from ..values import dataclass
from .collectives import all_gather, all_to_all, reduce_scatter, world_and_rank

ALL_TO_ALL, GATHER_REDUCE = "all_to_all", "gather_reduce"
EXCHANGES = (ALL_TO_ALL, GATHER_REDUCE)
_NARROW = 8  # the fewest columns of an output
_ROW_BYTES = 16  # the merge reads so much at a time; the log-sum-exp of a row has as much to itself


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a merge: ``kind`` is "communication" or "merge"."""

    kind: str
    run: Callable[[], object]


class ContextParallelMerge:
    """The merge of one decode over the ranks of a group that each hold a part of the keys.

    A rank decodes all ``heads`` on its own keys, without sinks, into ``out`` and ``lse`` of this object. ``merge`` then
    gives each rank the finished output of its share of the heads: rank r has heads ``r * heads / world`` and following.
    All buffers are made here, once. A merge only enqueues work and never waits, so it can be captured in a CUDA graph
    (with NCCL). An object serves one stream at a time.

    ``out`` and ``lse`` lie in memory as the exchange sends them, so nothing is packed: heads before tokens, and for
    "all_to_all" each row of the output with its log-sum-exp behind it.

    Args:
        group: a ``torch.distributed`` process group; None: the default one.
        tokens: query tokens of a step, of all requests.
        heads: query heads that every rank decodes; a multiple of the ranks.
        head_dim: of the output, a multiple of 8; for MLA the latent dimension.
        dtype: torch dtype of the partial outputs: bfloat16, float16 or float32.
        device: where the buffers are made.
        exchange: "all_to_all": each rank receives the partial outputs of its heads with their log-sum-exps, and merges
            them in the order of the ranks. "gather_reduce": log-sum-exps are gathered, each rank scales its partial
            output by its weight, and the scaled outputs are added by a reduce-scatter.
        lse_base: base of ``lse``: "2", as decode operators write it, or "e".
        reduce_dtype: torch dtype of the scaled outputs of "gather_reduce", one of these; None: float32.
        merge: what merges parts, called as ``merge_states``.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self,
        group: Any,
        *,
        tokens: int,
        heads: int,
        head_dim: int,
        dtype: Any,
        device: Any,
        exchange: str = ALL_TO_ALL,
        lse_base: str = "2",
        reduce_dtype: Any = None,
        merge: Callable[..., Any] = merge_states,
    ) -> None:
        self._world, self._rank = world_and_rank(group)
        tokens, heads = integer("tokens", tokens), integer("heads", heads)
        head_dim = integer("head_dim", head_dim)
        if tokens < 1:
            raise UsageError("expected 1 or more", argument="tokens", value=tokens)
        if heads < 1 or heads % self._world:
            raise UsageError(f"expected a multiple of the group's {self._world} ranks", argument="heads", value=heads)
        if head_dim < 8 or head_dim % 8:
            raise UsageError("expected a multiple of 8", argument="head_dim", value=head_dim)
        if exchange not in EXCHANGES:
            raise UsageError(f"expected {' or '.join(map(repr, EXCHANGES))}", argument="exchange", value=repr(exchange))
        check_lse_base(lse_base)
        for name, kind in (("dtype", dtype), ("reduce_dtype", reduce_dtype)):
            if dtype_word(kind) not in DTYPES_OF_V and (kind is not None or name == "dtype"):
                raise UsageError(f"expected {listed(DTYPES_OF_V)}", argument=name, value=dtype_word(kind))
        self.tokens, self.heads, self.head_dim = tokens, heads, head_dim
        self.own_heads = heads // self._world
        self._group, self._lse_base, self._merge_states = group, lse_base, merge
        self._buffers: _Packed | _Gathered
        if exchange == ALL_TO_ALL:
            self._buffers = _Packed(self._world, tokens, heads, head_dim, dtype, device)
        else:
            self._buffers = _Gathered(self._world, tokens, heads, head_dim, dtype, device, reduce_dtype)

    @property
    def out(self) -> Any:
        """``[tokens, heads, head_dim]``: the ``out`` of this rank's decode."""
        return self._buffers.out

    @property
    def lse(self) -> Any:
        """Float32 ``[tokens, heads]``: the ``lse`` of this rank's decode, without sinks."""
        return self._buffers.lse

    def merge(self, out: Any, lse: Any = None, *, sinks: Any = None) -> Any:
        """Exchange and merge what the ranks' decodes wrote to ``out`` and ``lse`` of their objects.

        Every rank of the group calls it, on the stream of its decode.

        Args:
            out: ``[tokens, heads / world, head_dim]``, receives the output of this rank's heads; bfloat16, float16 or
                float32, rows at multiples of 16 bytes.
            lse: float32 ``[tokens, heads / world]``, receives its log-sum-exp, the sink included. None: not wanted.
            sinks: float32 ``[heads]``, contiguous: the logits of all heads of the group, which enter once. None: none.

        Returns:
            ``out``.

        Raises:
            UsageError: a tensor has another shape, dtype or device, or requires grad, or sinks are not contiguous.
        """
        for step in self.steps(out, lse, sinks=sinks):
            step.run()
        return out

    def steps(self, out: Any, lse: Any = None, *, sinks: Any = None) -> tuple[Step, ...]:
        """The steps that ``merge`` runs, in order, for whoever times or overlaps its parts."""
        self._check("out", out, (self.tokens, self.own_heads, self.head_dim), DTYPES_OF_V)
        self._check("lse", lse, (self.tokens, self.own_heads))
        self._check("sinks", sinks, (self.heads,))
        if sinks is not None and not sinks.is_contiguous():
            raise UsageError(f"strides {tuple(sinks.stride())}, expected a contiguous tensor", argument="sinks")
        if isinstance(self._buffers, _Packed):
            return self._packed_steps(self._buffers, out, lse, sinks)
        return self._gathered_steps(self._buffers, out, lse, sinks)

    def _packed_steps(self, buffers: _Packed, out: Any, lse: Any, sinks: Any) -> tuple[Step, ...]:
        own_sinks = None if sinks is None else sinks[self._rank * self.own_heads :][: self.own_heads]

        def merge_parts() -> None:
            arguments = {"out": out, "lse": lse, "sinks": own_sinks, "lse_base": self._lse_base}
            self._merge_states(buffers.parts, buffers.part_lses, **arguments)

        return (
            Step("communication", lambda: all_to_all(buffers.received_bytes, buffers.sent_bytes, self._group)),
            Step("merge", merge_parts),
        )

    def _gathered_steps(self, buffers: _Gathered, out: Any, lse: Any, sinks: Any) -> tuple[Step, ...]:
        def weigh() -> None:
            # Of the other ranks only the log-sum-exps count, which become one with narrow zeros as their outputs.
            # Merged with that, the own part is what it adds to the sum.
            base = {"lse_base": self._lse_base}
            buffers.gathered[self._rank].fill_(float("-inf"))
            self._merge_states(buffers.zeros, buffers.part_lses, out=buffers.zero, lse=buffers.other_lse, **base)
            arguments = {"other": buffers.out, "other_lse": buffers.lse, "sinks": sinks, **base}
            results = {"out": buffers.weighed, "lse": buffers.total_lse}
            self._merge_states(buffers.zero_part, buffers.other_lse[:, None], **arguments, **results)

        def finish() -> None:
            out.copy_(buffers.reduced.transpose(0, 1))
            if lse is not None:
                lse.copy_(buffers.total_lse[:, self._rank * self.own_heads :][:, : self.own_heads])

        return (
            Step("communication", lambda: all_gather(buffers.received_lse, buffers.sent_lse, self._group)),
            Step("merge", weigh),
            Step("communication", lambda: reduce_scatter(buffers.reduced, buffers.sent, self._group)),
            Step("merge", finish),
        )

    def _check(self, name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[str, ...] = ("float32",)) -> None:
        # Between two exchanges the merge would refuse it, while the other ranks wait for this one.
        if tensor is None:
            return
        if tuple(tensor.shape) != shape:
            raise UsageError(f"shape {tuple(tensor.shape)}, expected {shape}", argument=name)
        if dtype_word(tensor.dtype) not in dtypes:
            raise UsageError(f"dtype {dtype_word(tensor.dtype)}, expected {listed(dtypes)}", argument=name)
        if tensor.device != self.out.device:
            raise UsageError(f"on {tensor.device}, expected {self.out.device}", argument=name)
        check_needs_no_grad(tensor, name)


class _Packed:
    """Buffers of the all-to-all: rows of an output and its log-sum-exp, ``[heads, tokens]`` of them."""

    def __init__(self, world: int, tokens: int, heads: int, head_dim: int, dtype: Any, device: Any) -> None:
        import torch

        row = head_dim + _ROW_BYTES // dtype.itemsize
        # Zeros: the bytes behind a log-sum-exp are sent, but never written.
        sent = torch.zeros(heads, tokens, row, dtype=dtype, device=device)
        received = torch.zeros_like(sent)
        self.sent_bytes, self.received_bytes = sent.view(torch.uint8), received.view(torch.uint8)
        place = head_dim * dtype.itemsize // 4
        self.out = sent[..., :head_dim].transpose(0, 1)
        self.lse = sent.view(torch.float32)[..., place].transpose(0, 1)
        # [tokens, parts, own heads]
        parts = received.view(world, heads // world, tokens, row)
        self.parts = parts[..., :head_dim].permute(2, 0, 1, 3)
        self.part_lses = parts.view(torch.float32)[..., place].permute(2, 0, 1)


class _Gathered:
    """Buffers of all-gather and reduce-scatter."""

    def __init__(
        self, world: int, tokens: int, heads: int, head_dim: int, dtype: Any, device: Any, reduce_dtype: Any
    ) -> None:
        import torch

        def empty(*shape: int, of: Any = torch.float32) -> Any:
            return torch.empty(shape, dtype=of, device=device)

        self.out = empty(heads, tokens, head_dim, of=dtype).transpose(0, 1)
        self.sent_lse = empty(heads, tokens)
        self.lse = self.sent_lse.transpose(0, 1)
        self.received_lse = empty(world * heads, tokens)
        self.gathered = self.received_lse.view(world, heads, tokens)
        self.part_lses = self.gathered.permute(2, 0, 1)
        zeros = torch.zeros(head_dim, dtype=dtype, device=device)
        self.zeros = zeros[:_NARROW].expand(tokens, world, heads, _NARROW)
        self.zero_part = zeros.expand(tokens, 1, heads, head_dim)
        self.zero, self.other_lse = empty(tokens, heads, _NARROW, of=dtype), empty(tokens, heads)
        self.sent = empty(heads, tokens, head_dim, of=reduce_dtype or torch.float32)
        self.weighed = self.sent.transpose(0, 1)
        self.total_lse = empty(tokens, heads)
        self.reduced = empty(heads // world, tokens, head_dim, of=reduce_dtype or torch.float32)
