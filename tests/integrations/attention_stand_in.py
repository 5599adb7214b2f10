"""The package's float64 references behind flash-attention's signatures: operators for models on a CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from cubin_runtime.attention.context_reference import context_attention_reference
from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.errors import UsageError
from cubin_runtime.integrations.transformers.operators import Operators
from cubin_runtime.kernels.native.prefill.select import VALUE_DIMS


def array(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().numpy() if tensor.is_floating_point() else tensor.numpy()


class StandIn:
    """Operators that count their calls. Behind every request's keys in a cache they read NaN, as kernels may."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @property
    def operators(self) -> Operators:
        return Operators(self.even, self.ragged, self.cached, self.masked)

    def even(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        batch, q_len = q.shape[:2]
        self.calls["even"] += 1
        flat = (states.flatten(0, 1) for states in (q, k, v))
        return _context(*flat, [q_len] * batch, [k.shape[1]] * batch, **options).view(*q.shape[:3], -1)

    def ragged(
        self, q: Any, k: Any, v: Any, q_sums: Any, k_sums: Any, q_bound: int, k_bound: int, **options: Any
    ) -> Any:
        table, lengths, out = (options.pop(name, None) for name in ("block_table", "seqused_k", "out"))
        self.calls["ragged" if table is None else "ragged pages"] += 1
        q_lens = q_sums.diff()
        k_lens = k_sums.diff() if lengths is None else lengths
        assert int(q_lens.max()) <= q_bound
        assert int(k_lens.max()) <= k_bound
        assert q_sums.dtype == k_lens.dtype == torch.int32
        result = _context(q[: int(q_sums[-1])], k, v, q_lens, k_lens, table=table, **options)
        out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=q.dtype) if out is None else out
        out[: len(result)] = result
        return out

    def cached(self, q: Any, k: Any, v: Any, *, cache_seqlens: Any, block_table: Any = None, **options: Any) -> Any:
        batch, q_len = q.shape[:2]
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.shape == (batch,)
        assert int(cache_seqlens.max()) <= (k.shape[1] if block_table is None else k.shape[1] * block_table.shape[1])
        if block_table is None:
            self.calls["cached"] += 1
            rows = [(k[i, :length], v[i, :length]) for i, length in enumerate(cache_seqlens.tolist())]
            k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
            return _context(q.flatten(0, 1), k, v, [q_len] * batch, cache_seqlens, **options).view(*q.shape[:3], -1)
        assert block_table.dtype == torch.int32
        if q_len > 1 or options["softcap"]:
            self.calls["cached pages"] += 1
            flat = _context(q.flatten(0, 1), k, v, [q_len] * batch, cache_seqlens, table=block_table, **options)
            return flat.view(*q.shape[:3], -1)
        self.calls["decode"] += 1
        sinks = options["s_aux"]
        out, _ = paged_decode_reference(
            array(q.flatten(0, 1)),
            array(k),
            array(v),
            array(block_table),
            array(cache_seqlens),
            options["softmax_scale"],
            sinks=None if sinks is None else array(sinks),
            window_left=options["window_size"][0],
        )
        return torch.from_numpy(out).to(q.dtype).view(*q.shape[:3], -1)

    def masked(self, q: Any, k: Any, v: Any, *, lengths: Any, mask: Any, **options: Any) -> Any:
        self.calls["masked"] += 1
        assert options["softcap"] == 0
        assert (lengths.dtype, mask.dtype) == (torch.int32, torch.uint32)
        batch, q_len = q.shape[:2]
        out, _ = paged_decode_reference(
            array(q.flatten(0, 1)),
            array(k),
            array(v),
            array(torch.arange(batch, dtype=torch.int32)[:, None]),
            array(lengths),
            options["softmax_scale"],
            q_cu_seq_lens=array(torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32)),
            mask=np.pad(array(mask.flatten(0, 1)), ((0, 0), (0, 2 - mask.shape[2]))).view(np.uint64)[:, 0],
            sinks=None if options["s_aux"] is None else array(options["s_aux"]),
        )
        return torch.from_numpy(out).to(q.dtype).view(*q.shape[:3], -1)


def in_domain(operators: Operators) -> Operators:
    """The operators, for the dtypes and head dimensions alone that the kernels have."""

    def limited(inner: Any) -> Any:
        def call(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
            if q.dtype not in (torch.bfloat16, torch.float16):
                raise UsageError(f"q: {q.dtype}, expected bfloat16 or float16")
            if VALUE_DIMS.get(q.shape[-1]) != v.shape[-1]:
                raise UsageError(f"q, v: head dimensions {q.shape[-1]} and {v.shape[-1]}, expected {VALUE_DIMS}")
            return inner(q, k, v, *rest, **options)

        return call

    return Operators(*(limited(function) for function in operators))


def _context(
    q: Any,
    k: Any,
    v: Any,
    q_lens: Any,
    k_lens: Any,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    s_aux: Any,
    table: Any = None,
) -> Any:
    out, _ = context_attention_reference(
        *(array(states) for states in (q, k, v)),
        q_lens,
        k_lens,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        page_table=None if table is None else array(table),
        causal=causal,
        window_left=window_size[0],
        window_right=-1 if causal else window_size[1],
        logit_soft_cap=softcap,
        sinks=None if s_aux is None else array(s_aux),
    )
    return torch.from_numpy(out).to(q.dtype)
