"""What decodes of both kinds have: query tokens, output, log-sum-exp and options, as a caller passes them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from cubin_runtime.attention import TensorView
from cubin_runtime.testing.device import DeviceArrays
from tests.gpu.decode_masks import packed_words
from tests.gpu.decode_values import KINDS


class Queries:
    """What follows from a case's lengths and query tokens."""

    __slots__ = ()

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (self.q_len,) * self.batch if self.q_lens is None else self.q_lens

    @property
    def q_bound(self) -> int:
        """Bound on the query tokens of a request."""
        return self.q_len if self.q_lens is None else self.max_q_len or max(1, *self.q_lens)

    @property
    def tokens(self) -> int:
        return sum(self.query_lens) + self.spare_tokens

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions before the heads, as the caller passes q: a token a request, tokens of each, or all tokens."""
        if self.q_lens is not None:
            return (self.tokens,)
        return (self.batch,) if self.q_len == 1 and self.flat_q else (self.batch, self.q_len)


def with_gaps(case: Any, q: np.ndarray) -> np.ndarray:
    """q with the gaps between tokens that ``strided`` asks for, NaN."""
    if not case.strided:
        return q
    return np.pad(q, ((0, 0), (0, 1), (0, 0)), constant_values=KINDS[case.q_type].nan)


def tokens_view(case: Any, dtype: str, address: int, columns: int) -> TensorView:
    """q or out as the caller passes it: with ``strided``, one head of other content lies between tokens."""
    token = (case.q_heads + case.strided) * columns
    lead = (case.q_len * token, token) if len(case.lead) == 2 else (token,)
    return TensorView(address, dtype, (*case.lead, case.q_heads, columns), (*lead, columns, 1))


def output_view(case: Any, arrays: DeviceArrays, columns: int) -> tuple[TensorView, TensorView]:
    """All memory of an output, and the output."""
    kind = KINDS[case.out_type]
    shape = (case.tokens, case.q_heads + case.strided, columns)
    whole = TensorView.contiguous(arrays.empty(prod(shape) * np.dtype(kind.bits).itemsize), kind.view, shape)
    return whole, tokens_view(case, kind.view, whole.pointer, columns)


def lse_view(case: Any, arrays: DeviceArrays) -> TensorView | None:
    """With ``strided``, heads lie in front of tokens."""
    if not case.with_lse:
        return None
    address, shape = arrays.empty(4 * case.tokens * case.q_heads), (*case.lead, case.q_heads)
    if not case.strided:
        return TensorView.contiguous(address, "float32", shape)
    return TensorView(address, "float32", shape, (*((case.q_len, 1) if len(shape) == 3 else (1,)), case.tokens))


def options_of(case: Any, host: Any, arrays: DeviceArrays, sinks: tuple[int, ...]) -> dict[str, Any]:
    """Arguments by name; ``sinks`` is the shape that those have."""

    def tensor(array: np.ndarray | None, dtype: str, shape: tuple[int, ...]) -> TensorView | None:
        return None if array is None else TensorView.contiguous(arrays.upload(array), dtype, shape)

    def scale(value: float) -> Any:
        return tensor(np.array([value], np.float32), "float32", (1,)) if case.device_scales else value

    lead = (case.tokens,) if case.q_lens is not None else (case.batch, case.q_len)
    words = -(-case.q_bound // 32)
    mask = ("uint16", (*lead, 2 * words)) if case.mask_itemsize == 2 else ("uint32", (*lead, words))
    return {
        "q_cu_seq_lens": tensor(host.q_cu_seq_lens, "uint32" if case.unsigned else "int32", (case.batch + 1,)),
        "mask": tensor(None if host.mask is None else packed_words(host.mask, case.q_bound), *mask),
        "sinks": tensor(host.sinks, "float32", sinks),
        "softmax_scale": scale(case.softmax_scale),
        "output_scale": scale(case.output_scale),
    }
