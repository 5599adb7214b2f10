"""A context-parallel step of a rank with its own GPU; importable by the processes of a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, merge_states
from cubin_runtime.distributed import ContextParallelMerge, KvPartition
from tests.gpu.divided_keys import DividedDecode, DividedProblem, assert_same

GQA, MLA = DividedDecode(), DividedDecode(heads=16, kv_heads=0)


def check_step(runtime: Runtime, case: DividedDecode, exchange: str, rank: int, world: int) -> None:
    """Decode and merge of this rank in one CUDA graph, with sinks, against one GPU with all keys.

    The graph replays with other queries, keys and lengths.
    """
    device = f"cuda:{torch.cuda.current_device()}"
    problem, partition = DividedProblem(case, device), KvPartition(world, rank, 16)
    pools, table, lens = problem.caches(partition)
    sinks = torch.linspace(-2, 2, case.heads, device=device)
    step = ContextParallelMerge(
        None,
        tokens=case.tokens,
        heads=case.heads,
        head_dim=case.value_dim,
        dtype=torch.bfloat16,
        device=device,
        exchange=exchange,
        merge=lambda *given, **named: merge_states(*given, **named, runtime=runtime),
    )
    out, lse = problem.empty(step.own_heads)

    def whole_step() -> None:
        problem.decode(runtime, partition, step.out, step.lse, caches=(pools, table, lens))
        step.merge(out, lse, sinks=sinks)

    whole_step()  # kernels, collectives and plans are ready before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        whole_step()
    heads = slice(rank * step.own_heads, (rank + 1) * step.own_heads)
    for seed, lengths in ((2, case.lens), (3, case.lens[::-1]), (4, case.lens[1:] + case.lens[:1])):
        other = DividedProblem(replace(case, lens=lengths), device, seed)
        for tensor, values in zip(
            (*pools, lens), (*other.caches(partition)[0], other.caches(partition)[2]), strict=True
        ):
            tensor.copy_(values)
        problem.q.copy_(other.q)
        problem.lens.copy_(other.lens)
        out.fill_(float("nan"))
        graph.replay()
        expected, expected_lse = other.whole(runtime, sinks)
        assert_same((out, lse), (expected[:, heads], expected_lse[:, heads]))


def run_rank(rank: int, world: int, folder: str, store: str, sources: tuple[str, ...]) -> None:
    torch.cuda.set_device(rank)
    runtime = Runtime(Config(store=Path(store), sources=sources, offline=True))
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        for case in (GQA, replace(GQA, q_len=4), MLA):
            for exchange in ("all_to_all", "gather_reduce"):
                check_step(runtime, case, exchange, rank, world)
    finally:
        dist.destroy_process_group()
