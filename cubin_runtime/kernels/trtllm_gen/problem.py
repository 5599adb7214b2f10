"""One attention call, reduced to what the planner decides about."""

from __future__ import annotations

from typing import NamedTuple

from ...values import dataclass
from .traits import KernelType, MaskType, QkvLayout, SparseType, TileScheduler

_MLA_HEADS = ((576, 512), (320, 256))
_SPARSE_MLA_HEADS = (512, 512)
_ADDRESSES = 1 << 64


def is_mla(head_dim_qk: int, head_dim_v: int, sparse: bool) -> bool:
    """Return whether the head dimensions are those of multi-head latent attention."""
    heads = (head_dim_qk, head_dim_v)
    return heads in _MLA_HEADS or (sparse and heads == _SPARSE_MLA_HEADS)


# The bindings that are not addresses.
NUMBERS = ("softmax_scale_log2", "output_scale", "scale_out_scales", "first_out_scale_token")


class Bindings(NamedTuple):
    """The values that may differ between calls that share a plan: device addresses (0: absent) and scales.

    ``counters``, ``softmax_stats`` and ``scratch`` are addresses in the workspace, ``partial_out`` lies in the scratch.
    ``device_softmax_scale_log2`` and ``device_output_scale`` are addresses of numbers that replace
    ``softmax_scale_log2`` and ``output_scale``.
    """

    query: int
    key: int
    value: int
    out: int
    seq_lens: int = 0
    cum_seq_lens_q: int = 0
    cum_seq_lens_kv: int = 0
    page_table: int = 0
    window_pool: int = 0
    key_scales: int = 0
    value_scales: int = 0
    out_scales: int = 0
    sinks: int = 0
    device_softmax_scale_log2: int = 0
    device_output_scale: int = 0
    sage_q: int = 0
    sage_k: int = 0
    sage_p: int = 0
    sage_v: int = 0
    top_k_lens: int = 0
    lse: int = 0
    counters: int = 0
    softmax_stats: int = 0
    scratch: int = 0
    partial_out: int = 0
    softmax_scale_log2: float = 0.0
    output_scale: float = 1.0
    scale_out_scales: float = -1.0
    first_out_scale_token: int = 0

    def with_partial_out(self, offset: int) -> Bindings:
        """The same bindings with partial outputs at ``offset`` in the scratch.

        Without scratch the result is a small number and no address; kernels without scratch do not read it.
        """
        end = self.scratch + offset
        return self._replace(partial_out=end if end < _ADDRESSES else end % _ADDRESSES)


@dataclass(frozen=True, slots=True)
class Strides:
    """Strides in elements (FP4: in FP4 numbers), narrowed to int32; for scales in elements of the scales.

    Tuples are ordered (tokens, heads, pages). Zeros in ``query`` mean a contiguous tensor.
    """

    query: tuple[int, int] = (0, 0)
    key: tuple[int, int, int] = (0, 0, 0)
    value: tuple[int, int, int] = (0, 0, 0)
    key_scales: tuple[int, int] = (0, 0)
    lse: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One call. Lengths are in tokens; ``max_q`` and ``max_kv`` are bounds, ``tokens_q`` and ``tokens_kv`` sums.

    Dtypes are in the metadata's words. ``page`` is 0 for KV that is not paged; ``window`` is the number of tokens that
    a query sees, its own included, INT32_MAX for all. ``multi_ctas`` lets several CTAs share a sequence's KV.
    ``sage_blocks`` are the numbers of elements that share a SageAttention scale in Q, K, P and V (0: none).
    ``allows_tile_kv_64`` is an experimental switch of the reference launcher for MLA. Of ``bindings``, decisions depend
    only on the presence of an LSE and of a window pool.
    """

    sm: int
    multiprocessors: int
    layout: QkvLayout
    mask: MaskType
    kernel_type: KernelType
    multi_ctas: bool
    dtype_q: str
    dtype_k: str
    dtype_v: str
    dtype_o: str
    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    batch: int
    max_q: int
    max_kv: int
    tokens_q: int
    window: int
    strides: Strides
    bindings: Bindings
    tokens_kv: int = 0
    page: int = 0
    pages: int = 0
    table_width: int = 0
    sparse: SparseType = SparseType.NONE
    top_k: int = 0
    skip_softmax_factor: float = 0.0
    sage_blocks: tuple[int, int, int, int] = (0, 0, 0, 0)
    scale_kv_scales: float = 0.0
    shares_page_index: bool = False
    pdl: bool = False
    allows_tile_kv_64: bool = False

    @property
    def scheduler(self) -> TileScheduler:
        """Kernels whose CTAs may share KV are static, others persistent."""
        return TileScheduler.STATIC if self.multi_ctas else TileScheduler.PERSISTENT

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.heads_q // self.heads_kv

    @property
    def is_mla(self) -> bool:
        """Return whether the head dimensions are those of multi-head latent attention."""
        return is_mla(self.head_dim_qk, self.head_dim_v, self.sparse != SparseType.NONE)

    @property
    def is_generation(self) -> bool:
        """Return whether this is decode, as opposed to context (prefill)."""
        return self.kernel_type != KernelType.CONTEXT

    @property
    def has_lse(self) -> bool:
        """Return whether the call wants the log-sum-exp."""
        return self.bindings.lse != 0

    @property
    def skips_softmax(self) -> bool:
        """Return whether blocks of scores below a threshold may be skipped."""
        return self.skip_softmax_factor != 0.0

    @property
    def dtypes(self) -> str:
        """The dtypes as text: Q/K/V/O."""
        return f"{self.dtype_q}/{self.dtype_k}/{self.dtype_v}/{self.dtype_o}"
