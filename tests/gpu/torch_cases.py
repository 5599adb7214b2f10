"""A decode case as torch tensors, as a serving stack has them. Imported only where torch is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.gpu.decode_cases import DecodeCase, HostTensors
from tests.gpu.decode_masks import packed_words
from tests.gpu.decode_values import KINDS


@dataclass(frozen=True)
class OnTorch:
    """A case's tensors as a serving stack has them."""

    case: DecodeCase
    q: Any
    k: Any
    v: Any
    pool: Any
    table: Any
    lens: Any
    mask: Any
    sinks: Any
    out: Any

    @property
    def combined(self) -> Any:
        return self.pool if self.case.combined else (self.k, self.v)


def device_tensor(name: str, bits: np.ndarray) -> Any:
    """Bits as a tensor of their dtype."""
    integers = np.ascontiguousarray(bits).view(np.uint8 if name == "e4m3" else np.int16)
    return torch.from_numpy(integers).cuda().view(getattr(torch, KINDS[name].view))


def on_torch(case: DecodeCase, host: HostTensors, *, clean: bool) -> OnTorch:
    """``clean``: page 0 for unused table entries and zeros for NaN, for a peer that reads both."""
    pools = [
        np.where(part == KINDS[case.kv_dtype].nan, 0, part).astype(part.dtype) if clean else part for part in host.pool
    ]
    tensors = [device_tensor(case.kv_dtype, part) for part in pools]
    k, v = (tensors[0][:, 0], tensors[0][:, 1]) if case.combined else tensors
    q = device_tensor(case.q_type, host.q)
    return OnTorch(
        case=case,
        q=q,
        k=k,
        v=v,
        pool=tensors[0],
        table=torch.from_numpy(np.maximum(host.page_table, 0) if clean else host.page_table).cuda(),
        lens=torch.from_numpy(host.seq_lens).cuda(),
        mask=None if host.mask is None else mask_tensor(case, host.mask),
        sinks=None if host.sinks is None else torch.from_numpy(host.sinks).cuda(),
        out=device_tensor(case.out_type, np.full(host.q.shape, 0xFFFF).astype(KINDS[case.out_type].bits)),
    )


def mask_tensor(case: DecodeCase, words: np.ndarray) -> Any:
    """uint16 ``[batch, q_len, 2 * words]``, of ragged queries ``[tokens, 2 * words]``."""
    lead = (case.tokens,) if case.q_lens is not None else (case.batch, case.q_len)
    packed = packed_words(words, case.q_bound)
    return torch.from_numpy(packed.view(np.int16)).cuda().view(torch.uint16).view(*lead, 2 * packed.shape[1])


def bits_of_tensor(case: DecodeCase, out: Any) -> np.ndarray:
    kind = KINDS[case.out_type]
    assert str(out.dtype) == f"torch.{kind.view}"
    integers = out.contiguous().view(torch.uint8 if kind.bits is np.uint8 else torch.int16).cpu().numpy()
    return integers.view(kind.bits).reshape(case.tokens, case.q_heads, case.head_dim)
