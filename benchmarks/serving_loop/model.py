"""A model that is attention alone: projections are tables by token, and the next token follows from the output's bits.

So two runs give a request the same tokens only if all its outputs have the same bits. With a head, the next token is
the one with the largest logit, as in a language model: it is the same wherever outputs are nearly equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Model:
    """The tables of each layer, bf16 ``[vocabulary, heads, head_dim]``, and the weights of the bits of an output.

    ``head`` is None, or float32 ``[heads * head_dim, vocabulary]``.
    """

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    weights: torch.Tensor
    head: torch.Tensor | None = None

    @classmethod
    def at_random(cls, layers: int, seed: int = 0, *, device: str = "cuda", with_head: bool = False) -> Model:
        """Tables of normal numbers."""
        generator = torch.Generator(device).manual_seed(seed)

        def table(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).bfloat16()

        made = [[table(VOCABULARY, heads, HEAD_DIM) for _ in range(layers)] for heads in (HEADS, KV_HEADS, KV_HEADS)]
        size = HEADS * HEAD_DIM
        weights = torch.randint(1, 1 << 20, (size,), generator=generator, device=device, dtype=torch.int32)
        return cls(*made, weights, table(size, VOCABULARY).float() if with_head else None)

    def next_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """int64 ``[rows]`` from ``[rows, heads, head_dim]``; of its bits, as sums of integers have no order."""
        if self.head is not None:
            return (out.flatten(1).float() @ self.head).argmax(1)
        bits = out.reshape(len(out), -1).view(torch.int16).to(torch.int32)
        return (bits * self.weights).sum(1) % VOCABULARY

    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last layer's output at the last of ``tokens``, float64, other outputs rounded as the engine rounds."""
        x, count, group = None, len(tokens), HEADS // KV_HEADS
        mask = torch.ones(count, count, device=tokens.device, dtype=torch.bool).tril()
        for q_table, k_table, v_table in zip(self.q, self.k, self.v, strict=True):
            q = q_table[tokens] if x is None else q_table[tokens] + x.bfloat16()
            k, v = (table[tokens].double().repeat_interleave(group, 1) for table in (k_table, v_table))
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) * HEAD_DIM**-0.5
            x = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
        assert x is not None
        return x[-1]
