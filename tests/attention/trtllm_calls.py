"""Tensors at made-up device addresses for the trtllm-gen operators, host memory behind some of them, and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from typing import Any

from cubin_runtime.attention import TensorView
from cubin_runtime.attention.fast_path.notes import note_unrepeatable
from cubin_runtime.dtypes import ITEM_BYTES
from cubin_runtime.errors import UsageError
from cubin_runtime.tensor import view_of

FIRST_ADDRESS = 0x7F00_0000_0000
ADDRESS_STEP = 1 << 33
STREAM = 0x5000


@dataclass
class MadeUpMemory:
    """``TensorMemory`` over made-up addresses; ``host`` holds the integers of tensors that may be read back."""

    host: dict[int, tuple[int, ...]] = field(default_factory=dict)
    made: list[tuple[str, TensorView]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    stream: int = 0
    streams: dict[int, int] = field(default_factory=dict)  # by device; others have `stream`
    _numbers: Any = field(default_factory=lambda: count(1))

    def tensor(self, dtype: str, *shape: int, values: tuple[int, ...] | None = None) -> TensorView:
        """A contiguous tensor at an address of its own."""
        view = TensorView.contiguous(FIRST_ADDRESS + next(self._numbers) * ADDRESS_STEP, dtype, shape)
        if values is not None:
            self.host[view.pointer] = values
        return view

    def empty(self, like: TensorView, shape: tuple[int, ...], dtype: str | None) -> TensorView:
        return self._made("empty", like, self.tensor(dtype or like.dtype, *shape))

    def zeros(self, like: TensorView, shape: tuple[int, ...], dtype: str) -> TensorView:
        return self._made("zeros", like, self.tensor(dtype, *shape))

    def scaled(self, tensor: TensorView, factor: float) -> TensorView:
        return self._made(f"scaled by {factor:.4f}", tensor, self.tensor(tensor.dtype, *tensor.shape))

    def product(self, first: TensorView, second: TensorView) -> TensorView:
        what = f"product of {first.pointer:#x} and {second.pointer:#x}"
        return self._made(what, first, self.tensor(first.dtype, 1))

    def check_scalable(self, name: str, tensor: TensorView) -> None:
        pass

    def scale_in_place(self, tensor: TensorView, factor: float) -> None:
        note_unrepeatable()  # as torch's
        self.made.append((f"scaled in place by {factor:.4f}", tensor))

    def lengthened(self, name: str, lengths: TensorView, by: TensorView | int) -> TensorView:
        what = f"{by} more" if isinstance(by, int) else f"as {by.pointer:#x} says more"
        return self._made(f"{name}, {what}", lengths, self.tensor(lengths.dtype, *lengths.shape))

    def causal(self, name: str, lengths: TensorView, q_lens: TensorView | int, tokens: int) -> TensorView:
        by = f"{q_lens} tokens each" if isinstance(q_lens, int) else f"tokens as {q_lens.pointer:#x} says"
        return self._made(f"{name} of {by}", lengths, self.tensor(lengths.dtype, tokens))

    def to_host(self, tensor: TensorView) -> tuple[int, ...]:
        if tensor.pointer not in self.host:
            raise UsageError(f"nothing was put at {tensor.pointer:#x}")
        self.reads.append(tensor.pointer)
        return self.host[tensor.pointer]

    def current_stream(self, like: TensorView | int) -> int:
        if not self.streams:
            return self.stream
        return self.streams.get(like if isinstance(like, int) else view_of(like, "like").device, self.stream)

    @property
    def stream_query(self) -> Callable[[int], int]:
        return self.current_stream

    def _made(self, what: str, like: TensorView, view: TensorView) -> TensorView:
        there = replace(view, device=view_of(like, "like").device)
        self.made.append((what, there))
        return there


Make = Callable[[MadeUpMemory], Any]


def tensor(dtype: str, *shape: int, **changes: Any) -> Make:
    """Makes a tensor in the test's memory, changed as said."""

    def make(memory: MadeUpMemory) -> TensorView:
        values = changes.pop("values", None)
        return replace(memory.tensor(dtype, *shape, values=values), **changes)

    return make


def made(memory: MadeUpMemory, changes: dict[str, Any]) -> dict[str, Any]:
    return {name: change(memory) if callable(change) else change for name, change in changes.items()}


def nbytes(view: TensorView) -> int:
    return prod(view.shape) * ITEM_BYTES[view.dtype]


def decode_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """GQA decode: 4 requests, 32 heads over 4 KV heads of 128, 64 pages of 32 tokens, bf16, HND."""
    given = {
        "query": memory.tensor("bfloat16", 4, 32, 128),
        "kv_cache": memory.tensor("bfloat16", 64, 2, 4, 32, 128),
        "workspace_buffer": memory.tensor("uint8", 128 << 20),
        "block_tables": memory.tensor("int32", 4, 64),
        "seq_lens": memory.tensor("int32", 4),
        "max_seq_len": 2000,
        "bmm1_scale": 0.0884,
        "bmm2_scale": 1.0,
    }
    return {**given, **changes}


def mla_arguments(memory: MadeUpMemory, heads: int = 128, **changes: Any) -> dict[str, Any]:
    """MLA decode: 4 requests of 2 tokens, 512 + 64, 64 pages of 64 tokens, bf16."""
    given = {
        "query": memory.tensor("bfloat16", 4, 2, heads, 576),
        "kv_cache": memory.tensor("bfloat16", 1024, 64, 576),
        "workspace_buffer": memory.tensor("uint8", 128 << 20),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": memory.tensor("int32", 4, 256),
        "seq_lens": memory.tensor("int32", 4),
        "max_seq_len": 16000,
        "bmm1_scale": 0.07,
        "bmm2_scale": 1.0,
    }
    return {**given, **changes}


def context_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Paged context: 3 requests, 300 tokens, 32 heads over 4 KV heads of 128, bf16, HND."""
    given = {
        "query": memory.tensor("bfloat16", 300, 32, 128),
        "kv_cache": (memory.tensor("bfloat16", 64, 4, 32, 128), memory.tensor("bfloat16", 64, 4, 32, 128)),
        "workspace_buffer": memory.tensor("uint8", 128 << 20),
        "block_tables": memory.tensor("int32", 3, 16),
        "seq_lens": memory.tensor("int32", 3),
        "max_q_len": 128,
        "max_kv_len": 500,
        "bmm1_scale": 0.0884,
        "bmm2_scale": 1.0,
        "batch_size": 3,
        "cum_seq_lens_q": memory.tensor("int32", 4),
        "cum_seq_lens_kv": memory.tensor("int32", 4),
    }
    return {**given, **changes}


def ragged_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Ragged context of DeepSeek: 2 requests, 200 query and 400 KV tokens, 128 heads of 192 and 128, bf16."""
    given = {
        "query": memory.tensor("bfloat16", 200, 128, 192),
        "key": memory.tensor("bfloat16", 400, 128, 192),
        "value": memory.tensor("bfloat16", 400, 128, 128),
        "workspace_buffer": memory.tensor("uint8", 128 << 20),
        "seq_lens": memory.tensor("int32", 2),
        "max_q_len": 128,
        "max_kv_len": 256,
        "bmm1_scale": 0.07,
        "bmm2_scale": 1.0,
        "o_sf_scale": -1.0,
        "batch_size": 2,
        "window_left": -1,
        "cum_seq_lens_q": memory.tensor("int32", 3),
        "cum_seq_lens_kv": memory.tensor("int32", 3),
        "enable_pdl": False,
        "is_causal": True,
        "return_lse": False,
    }
    return {**given, **changes}


def launched(seen: Mapping[str, str]) -> bytes:
    """The parameter struct of a recorded launch."""
    return bytes.fromhex(seen["parameter0"])
