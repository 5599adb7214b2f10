"""Sparse MLA decode with an indexer in torch: rows of 656 bytes, scores, top-k, lists, and all of it in a CUDA graph.

    make install  # in a clone, then the line with which it ends
    python examples/sparse_mla.py

Without a GPU the indexer runs on the CPU, and the decode is planned alone.
"""

from __future__ import annotations

from typing import Any

from cubin_runtime.testing import require_module

require_module("torch", "pip install torch")

import torch

from cubin_runtime import plan_sparse_mla_decode
from cubin_runtime.testing import Device, assert_attention_close, on_first_device

LENGTHS = (3000, 2048, 1, 0, 700)  # keys of each request
MAX_LEN, PAGE, TOPK, HEADS = 4096, 64, 512, 128
LATENT, ROPE, BLOCK, INDEX_HEADS, INDEX_DIM = 512, 64, 128, 8, 128
SCALE = 192**-0.5
BF16, E4M3, MOST = torch.bfloat16, torch.float8_e4m3fn, 448.0


def pack(keys: Any) -> Any:
    """Rows of a cache, bytes ``[rows, 656]``: 512 e4m3, a float32 scale for each 128 of them, 64 bf16 rope columns."""
    blocks = keys[:, :LATENT].float().view(-1, LATENT // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1).clamp(min=1e-4) / MOST
    latent = (blocks / scales[..., None]).to(E4M3).flatten(1)
    return torch.cat([part.contiguous().view(torch.uint8) for part in (latent, scales, keys[:, LATENT:])], dim=1)


def unpack(rows: Any) -> Any:
    """What the kernel reads of such rows, in float64."""
    scales = rows[:, LATENT : LATENT + 16].view(torch.float32).double().repeat_interleave(BLOCK, dim=1)
    return torch.cat([rows[:, :LATENT].view(E4M3).double() * scales, rows[:, LATENT + 16 :].view(BF16).double()], 1)


class Server:
    """Memory of a step that stays where it is, so that a graph can be replayed: caches, page table, lengths."""

    def __init__(self, where: str) -> None:
        requests, pages = len(LENGTHS), len(LENGTHS) * MAX_LEN // PAGE
        torch.manual_seed(0)

        def randn(*shape: int) -> Any:
            return torch.randn(shape, dtype=BF16).to(where)

        self.cache = pack(randn(pages * PAGE, LATENT + ROPE))
        self.index_keys = randn(pages * PAGE, INDEX_DIM)
        self.page_table = torch.randperm(pages).view(requests, -1).to(where)
        self.positions = torch.arange(MAX_LEN, device=where)
        self.lens = torch.tensor(LENGTHS, device=where)
        self.q, self.new_row = randn(requests, HEADS, LATENT + ROPE), randn(requests, LATENT + ROPE)
        self.index_q, self.weights = randn(requests, INDEX_HEADS, INDEX_DIM), randn(requests, INDEX_HEADS)
        self.out = torch.empty(requests, HEADS, LATENT, dtype=BF16, device=where)
        self.lists = torch.full((requests, TOPK), -1, dtype=torch.int32, device=where)

    def slots(self) -> Any:
        """The row of each position of each request."""
        return self.page_table[:, self.positions // PAGE] * PAGE + self.positions % PAGE

    def append(self) -> None:
        """Write each request's new row behind its others, in 656 bytes."""
        self.cache[self.slots().gather(1, self.lens[:, None])[:, 0]] = pack(self.new_row)
        self.lens.add_(1)

    def choose(self) -> None:
        """The indexer: a score of every position, and the slots of the best as lists; -1 where there are fewer."""
        slots = self.slots()
        scores = torch.einsum("rhd,rpd->rhp", self.index_q, self.index_keys[slots]).relu()
        scores = torch.einsum("rhp,rh->rp", scores, self.weights).float()
        scores.masked_fill_(self.positions >= self.lens[:, None], float("-inf"))
        best, positions = scores.topk(TOPK, dim=1)
        self.lists.copy_(slots.gather(1, positions).masked_fill_(best.isneginf(), -1))

    def expected(self) -> Any:
        """The outputs in float64."""
        wanted = torch.zeros(self.out.shape, dtype=torch.float64)
        for request, slots in enumerate(self.lists):
            keys = unpack(self.cache[slots[slots >= 0].long()])
            weights = (self.q[request].double() @ keys.T * SCALE).softmax(dim=1)
            wanted[request] = weights @ keys[:, :LATENT]
        return wanted.numpy()


def main(device: Device) -> None:
    """Choose rows and decode, first call by call and then by a graph while the requests grow."""
    server = Server("cuda" if device.computes else "cpu")
    server.choose()
    counts = (server.lists >= 0).sum(1).tolist()
    print(f"requests  of {LENGTHS} keys; the indexer chose {tuple(counts)} rows of 656 bytes")
    tensors = (server.q, server.cache, server.lists, server.out)
    if not device.computes:
        plan = plan_sparse_mla_decode(*(x.to("meta") for x in tensors), softmax_scale=SCALE, device_facts=device.facts)
        print(f"kernel    {plan.launch_plans()[0].kernel}")
        print("compared  nothing: without a GPU the decode is planned alone")
        return
    plan = plan_sparse_mla_decode(*tensors, softmax_scale=SCALE)
    print(f"kernel    {plan.launch_plans()[0].kernel}")
    print(f"why       {plan.selections[0].reason}")
    plan.run(*tensors)
    compare(server, "a call")

    # A step reads lengths and lists on the device, so that one graph serves while the requests grow.
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    workspace = plan.prepare(stream.cuda_stream, graphs=1)

    def step() -> None:
        server.append()
        server.choose()
        plan.run(*tensors, workspace=workspace, stream=stream.cuda_stream)

    with torch.cuda.stream(stream):
        step()  # what torch loads and allocates at first
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    print(f"graph     3 replays; the requests have {tuple(server.lens.tolist())} keys")
    compare(server, "the last replay")


def compare(server: Server, what: str) -> None:
    """Compare the outputs with float64."""
    error = assert_attention_close(server.out.double().cpu().numpy(), server.expected(), kv_dtype="float8_e4m3fn")
    print(f"compared  {what} with float64: relative error {error:.1e}")


if __name__ == "__main__":
    on_first_device(main)
