"""The calls that trtllm-gen kernels serve: decode and prefill over pages, ragged prefill, sparse MLA over two pools."""

from __future__ import annotations

from math import prod
from typing import Any

from ...tensor import TensorView
from ...values import dataclass
from .arguments import (
    NO_OUT_SCALES,
    NO_SAGE,
    Device,
    OutScales,
    Sage,
    check_length,
    check_out_scales,
    check_rank,
    check_sage,
    check_top_k,
    dtype_of,
)
from .arithmetic import float32, int32
from .call import NO_WINDOW, Call, Heads, address_of
from .errors import ArgumentRefused
from .problem import Bindings, Problem, Strides, is_mla
from .traits import KernelType, MaskType, QkvLayout, SparseType

_TWO_POOLS_WINDOW = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCall(Call):
    """A call whose keys and values lie in pages.

    Attributes:
        key: ``[pages, kv_heads, page_size, head_dim]``, any order of strides; FP4: uint8 with half the head_dim.
        value: like ``key``; the same view as ``key`` for MLA.
        block_tables: int32 ``[batch, columns]`` page numbers; ``[batch, 2, columns]`` with separate tables
            for K and V; ``[batch, q_len, top_k]`` key indices for sparse MLA.
        key_scales, value_scales: of FP4 keys and values, e4m3 ``[pages, kv_heads, page_size, head_dim / 16]``.
        shares_index: one table serves K and V.
        out_scales: block scales of an FP4 output.
    """

    layout = QkvLayout.PAGED

    key: TensorView
    value: TensorView
    block_tables: TensorView
    key_scales: TensorView | None = None
    value_scales: TensorView | None = None
    shares_index: bool = True
    out_scales: OutScales = NO_OUT_SCALES

    @property
    def capacity(self) -> int | None:
        """Table columns times page size; None for shapes that the checks refuse later."""
        return self._keys_in_table()

    def _keys_in_table(self) -> int | None:
        if not self.block_tables.shape or len(self.key.shape) != 4:
            return None
        return self.block_tables.shape[-1] * self.key.shape[2] or None

    @property
    def shares_pool(self) -> bool:
        """As ``Call.shares_pool``; the kernels then count the pool's pages once."""
        return self.key.pointer == self.value.pointer

    def _own_bindings(self) -> dict[str, Any]:
        return {
            "key": self.key.pointer,
            "value": self.value.pointer,
            "page_table": self.block_tables.pointer,
            "key_scales": address_of(self.key_scales),
            "value_scales": address_of(self.value_scales),
            "out_scales": address_of(self.out_scales.scales),
            "scale_out_scales": float32(self.out_scales.scale),
            "first_out_scale_token": int32(self.out_scales.first_token),
        }

    def _paged_heads(self, device: Device) -> Heads:
        check_rank("key_cache", self.key, 4)
        check_rank("value_cache", self.value, 4)
        check_rank("block_tables", self.block_tables, 2, 3)
        check_length("max_kv_len", self.max_kv)
        check_length("page size", self.key.shape[-2])
        return self._heads(device, self.key.shape[-3])

    def _paged_problem(self, device: Device, heads: Heads, bindings: Bindings, **of_this_kind: Any) -> Problem:
        key, scales = self.key, self.key_scales
        packed = 2 if key.dtype == "uint8" else 1
        # K's strides serve V too. With V at another address, the pool counts as interleaved pages of K and V.
        strides = int32(key.strides[-2] * packed), int32(key.strides[-3] * packed), int32(key.strides[0] * packed)
        return self._stated(
            device,
            heads,
            bindings=bindings,
            dtype_k=dtype_of("key_cache", key),
            dtype_v=dtype_of("value_cache", self.value),
            page=key.shape[-2],
            pages=int32(key.shape[0] * (1 if self.shares_pool else 2)),
            table_width=int32(self.block_tables.shape[-1]),
            strides=Strides(
                query=_two_strides(self.query),
                key=strides,
                value=strides,
                key_scales=(0, 0) if scales is None else (int32(scales.strides[-3]), int32(scales.strides[0])),
                lse=(0, 0) if self.lse is None else (self.lse.strides[0], self.lse.strides[1]),
            ),
            scale_kv_scales=1.0,
            shares_page_index=self.shares_index,
            **of_this_kind,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall(PagedCall):
    """Decode over paged keys; head dimensions 576/512 and 320/256 mean MLA.

    ``top_k`` > 0 is sparse MLA over that many keys per query, or ``top_k_lens`` of them, int32 ``[tokens]``.
    """

    kernel_type = KernelType.GENERATION

    top_k: int = 0
    top_k_lens: TensorView | None = None

    @property
    def capacity(self) -> int | None:
        """None for sparse MLA, whose table does not tell the length."""
        return None if self.top_k else self._keys_in_table()

    def problem(self, device: Device, workspace: tuple[int, int], counters: int | None = None) -> Problem:
        """As ``Call.problem``."""
        check_out_scales(self.out_scales)
        check_top_k(self.top_k)
        check_length("top_k + 1", max(self.top_k, 0) + 1)
        heads = self._paged_heads(device)
        sparse = SparseType.NONE
        if self.top_k > 0:
            sparse = SparseType.STATIC if self.top_k_lens is None else SparseType.DYNAMIC
        mla = is_mla(heads.head_dim_qk, heads.head_dim_v, sparse != SparseType.NONE)
        if sparse and not mla:
            dims = f"{heads.head_dim_qk}/{heads.head_dim_v}"
            raise ArgumentRefused(f"top_k={self.top_k} with heads {dims}: sparse KV needs MLA heads")
        return self._paged_problem(
            device,
            heads,
            self.bindings(workspace, counters),
            mask=MaskType.DENSE if mla else MaskType.CAUSAL,
            sparse=sparse,
            top_k=max(self.top_k, 0),
        )

    def _own_bindings(self) -> dict[str, Any]:
        return {**PagedCall._own_bindings(self), "top_k_lens": address_of(self.top_k_lens)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCall(PagedCall):
    """Prefill over paged keys; ``cum_seq_lens_kv`` is int32 ``[batch + 1]``."""

    kernel_type = KernelType.CONTEXT

    cum_seq_lens_kv: TensorView
    causal: bool = True

    def problem(self, device: Device, workspace: tuple[int, int], counters: int | None = None) -> Problem:
        """As ``Call.problem``."""
        check_out_scales(self.out_scales)
        heads = self._paged_heads(device)
        if self.window_left != NO_WINDOW and not self.causal:
            raise ArgumentRefused(f"window_left={self.window_left} without causal: paged dense attention has no window")
        mask = MaskType.CAUSAL if self.causal else MaskType.DENSE
        return self._paged_problem(device, heads, self.bindings(workspace, counters), mask=mask)

    def _own_bindings(self) -> dict[str, Any]:
        return {**PagedCall._own_bindings(self), "cum_seq_lens_kv": self.cum_seq_lens_kv.pointer}


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedCall(Call):
    """Prefill over ragged keys and values, ``[tokens, kv_heads, head_dim]`` each.

    ``cum_seq_lens_kv`` is int32 ``[batch + 1]``; ``out_scale`` is the scale of FP4 block scales, -1 if unused. The
    kernels take the query as contiguous, whatever its strides.
    """

    layout = QkvLayout.SEPARATE
    kernel_type = KernelType.CONTEXT

    key: TensorView
    value: TensorView
    cum_seq_lens_kv: TensorView
    causal: bool = True
    sage: Sage = NO_SAGE
    out_scale: float = -1.0

    def problem(self, device: Device, workspace: tuple[int, int], counters: int | None = None) -> Problem:
        """As ``Call.problem``."""
        check_rank("key", self.key, 3)
        check_rank("value", self.value, 3)
        check_length("max_kv_len", self.max_kv)
        check_length("key tokens", self.key.shape[0])
        check_sage(self.sage)
        heads = self._heads(device, self.key.shape[1], self.value.shape[2])
        bindings = self.bindings(workspace, counters)
        lse = (0, 0) if self.lse is None else (self.lse.strides[0], self.lse.strides[1])
        return self._stated(
            device,
            heads,
            bindings=bindings,
            dtype_k=dtype_of("key", self.key),
            dtype_v=dtype_of("value", self.value),
            mask=MaskType.CAUSAL if self.causal else MaskType.DENSE,
            tokens_kv=self.key.shape[0],
            strides=Strides(key=_ragged_strides(self.key), value=_ragged_strides(self.value), lse=lse),
            sage_blocks=self.sage.blocks,
        )

    def _own_bindings(self) -> dict[str, Any]:
        sage_q, sage_k, sage_p, sage_v = map(address_of, self.sage.scales)
        return {
            "key": self.key.pointer,
            "value": self.value.pointer,
            "cum_seq_lens_kv": self.cum_seq_lens_kv.pointer,
            "sage_q": sage_q,
            "sage_k": sage_k,
            "sage_p": sage_p,
            "sage_v": sage_v,
            "scale_out_scales": float32(self.out_scale),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPoolCall(Call):
    """Sparse MLA decode over two pools, ``[pages, 1, page size, 512]`` each (DeepSeek V4).

    ``indices``, ``[tokens, top_k]``, are the KV tokens of each query, of which it reads the first ``top_k_lens``,
    int32 ``[tokens]``. ``max_kv`` is ``top_k``.
    """

    layout = QkvLayout.PAGED
    kernel_type = KernelType.GENERATION

    pool: TensorView
    window_pool: TensorView
    indices: TensorView
    top_k_lens: TensorView | None = None

    def problem(self, device: Device, workspace: tuple[int, int], counters: int | None = None) -> Problem:
        """As ``Call.problem``."""
        pool = self.pool
        check_rank("primary_kv_cache", pool, 4)
        check_rank("sparse_indices", self.indices, 2, 3)
        top_k = self.indices.shape[-1]
        check_top_k(top_k)
        check_length("top_k", top_k)
        heads = self._heads(device, pool.shape[-3])
        bindings = self.bindings(workspace, counters)
        token, head = int32(pool.strides[-2]), int32(pool.strides[-3])
        strides = (token, head, token)
        dtype = dtype_of("primary_kv_cache", pool)
        return self._stated(
            device,
            heads,
            bindings=bindings,
            dtype_k=dtype,
            dtype_v=dtype,
            mask=MaskType.DENSE,
            page=1,
            pages=int32(pool.shape[0] * pool.shape[-2]),
            table_width=top_k,
            strides=Strides(query=_two_strides(self.query), key=strides, value=strides),
            window=_TWO_POOLS_WINDOW,
            sparse=SparseType.DYNAMIC,
            top_k=top_k,
            scale_kv_scales=1.0,
            shares_page_index=True,
        )

    def _own_bindings(self) -> dict[str, Any]:
        return {
            "key": self.pool.pointer,
            "value": self.pool.pointer,
            "page_table": self.indices.pointer,
            "window_pool": self.window_pool.pointer,
            "top_k_lens": address_of(self.top_k_lens),
        }


def _two_strides(tensor: TensorView) -> tuple[int, int]:
    return int32(tensor.strides[0]), int32(tensor.strides[1])


def _ragged_strides(tensor: TensorView) -> tuple[int, int, int]:
    """Strides of tokens, heads and the single "page", which is the whole tensor."""
    return (*_two_strides(tensor), int32(prod(tensor.shape)))
