"""Context-parallel decode on GPUs: all ranks in turn on one, a group of one rank, and a rank for each of two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cubin_runtime import Config  # noqa: E402
from cubin_runtime.attention import Runtime, merge_states  # noqa: E402
from cubin_runtime.compat import flashinfer  # noqa: E402
from cubin_runtime.distributed import KvPartition  # noqa: E402
from tests.gpu.divided_keys import DividedDecode, DividedProblem, assert_same  # noqa: E402  (it needs torch)
from tests.gpu.divided_steps import GQA, MLA, check_step, run_rank  # noqa: E402

pytestmark = pytest.mark.gpu
CASES = {
    "one token": GQA,
    "4 drafts": replace(GQA, q_len=4),
    "16 drafts": replace(GQA, q_len=16),
    "128 rows": replace(GQA, q_len=16, heads=64, kv_heads=2),
    "one head each": replace(GQA, q_len=2, heads=4, kv_heads=4),
    "fp16": replace(GQA, q_len=3, dtype=torch.float16, kv_dtype=torch.float16),
    "e4m3 keys": replace(GQA, q_len=3, kv_dtype=torch.float8_e4m3fn),
    "head_dim 64": replace(GQA, q_len=5, head_dim=64),
    "head_dim 256": replace(GQA, q_len=2, head_dim=256),
    "window": replace(GQA, window=100),
    "window of drafts": replace(GQA, window=300, q_len=7),
    "window of many rows": replace(GQA, window=129, q_len=16, heads=64),
    "invariant": replace(GQA, q_len=4, window=500, batch_invariant=True),
    "invariant, one token": replace(GQA, batch_invariant=True),
    "invariant, many rows": replace(GQA, window=129, q_len=16, heads=64, batch_invariant=True),
    "invariant, head_dim 64": replace(GQA, window=700, q_len=2, head_dim=64, batch_invariant=True),
    "invariant, more queries than keys": replace(GQA, lens=(0, 1, 3, 9, 530), q_len=16, batch_invariant=True),
    "latent": MLA,
    "latent drafts": replace(MLA, q_len=5),
    "latent, 128 heads": replace(MLA, q_len=2, heads=128),
    "latent e4m3": replace(MLA, q_len=4, heads=128, kv_dtype=torch.float8_e4m3fn),
}
PARTITIONS = [(2, 1), (3, 16), (8, 1), (8, 64), (4, 1000)]


@pytest.mark.parametrize(("world", "interleave"), PARTITIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decodes_of_all_ranks_merge_to_that_of_one(
    runtime: Runtime, case: DividedDecode, world: int, interleave: int
) -> None:
    problem = DividedProblem(case, "cuda")
    parts = [problem.empty() for _ in range(world)]
    for rank, (out, lse) in enumerate(parts):
        problem.decode(runtime, KvPartition(world, rank, interleave), out, lse)
    v, s = (torch.stack(part, dim=1) for part in zip(*parts, strict=True))
    out, lse = problem.empty()
    merge_states(v, s, out=out, lse=lse, runtime=runtime)
    assert_same((out, lse), problem.whole(runtime))


def decode_by_flashinfer_s_name(
    problem: DividedProblem, rank: KvPartition, given: tuple[Any, ...], out: Any, lse: Any
) -> None:
    """``given``: what ``problem.caches`` gives, and the keys in front of the query tokens on all ranks."""
    case, (pools, table, lens, counts) = problem.case, given
    flashinfer.trtllm_batch_decode_with_kv_cache(
        problem.q,
        tuple(pools),
        torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"),
        table,
        lens,
        table.shape[1] * case.page_size,
        bmm1_scale=0.1,
        window_left=case.window,
        out=out,
        lse=lse,
        kv_layout="NHD",
        q_len_per_req=case.q_len,
        cp_world=rank.world,
        cp_rank=rank.rank,
        causal_seqlens_kv_global=counts,
        batch_invariant=case.batch_invariant,
    )


@pytest.fixture
def as_default(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)


BEHIND = replace(GQA, lens=(16, 17, 90, 700, 3001))  # as many keys as query tokens at least, as all are keys too
FLASHINFER_S = {
    "one token": BEHIND,
    "one token, window": replace(BEHIND, window=100),
    "4 drafts": replace(BEHIND, q_len=4),
    "16 drafts, e4m3 keys": replace(BEHIND, q_len=16, kv_dtype=torch.float8_e4m3fn),
    "window of drafts": replace(BEHIND, q_len=7, window=300),
    "invariant": replace(BEHIND, q_len=4, batch_invariant=True),
}


@pytest.mark.usefixtures("as_default")
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("case", FLASHINFER_S.values(), ids=FLASHINFER_S)
def test_flashinfer_s_function_on_all_ranks_merges_to_one(runtime: Runtime, case: DividedDecode, world: int) -> None:
    problem = DividedProblem(case, "cuda")
    parts = [problem.empty() for _ in range(world)]
    for number, (out, lse) in enumerate(parts):
        rank = KvPartition(world, number)
        decode_by_flashinfer_s_name(problem, rank, (*problem.caches(rank), problem.lens - case.q_len), out, lse)
    v, s = (torch.stack(part, dim=1) for part in zip(*parts, strict=True))
    out, lse = problem.empty()
    merge_states(v, s, out=out, lse=lse, runtime=runtime)
    assert_same((out, lse), problem.whole(runtime))


@pytest.mark.usefixtures("as_default")
def test_a_captured_call_of_flashinfer_s_function_counts_again() -> None:
    problem, rank = DividedProblem(replace(BEHIND, q_len=4), "cuda"), KvPartition(3, 1)
    given = (*problem.caches(rank), problem.lens - 4)
    captured, eager = problem.empty(), problem.empty()
    decode_by_flashinfer_s_name(problem, rank, given, *captured)  # kernels are loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_by_flashinfer_s_name(problem, rank, given, *captured)
    for fewer in (5, 0, 12):
        given[2].copy_(rank.own_lens(problem.lens - fewer))
        given[3].copy_(problem.lens - fewer - 4)
        graph.replay()
        decode_by_flashinfer_s_name(problem, rank, given, *eager)
        assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("exchange", ["all_to_all", "gather_reduce"])
@pytest.mark.parametrize("case", [GQA, MLA], ids=["GQA", "MLA"])
def test_a_captured_step_replays_with_other_parts(runtime: Runtime, case: DividedDecode, exchange: str) -> None:
    check_step(runtime, case, exchange, 0, 1)


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("runtime")
def test_a_rank_for_each_of_two_gpus(runtime_config: Config, tmp_path: Path) -> None:
    given: tuple[Any, ...] = (2, str(tmp_path), str(runtime_config.store), tuple(map(str, runtime_config.sources)))
    torch.multiprocessing.spawn(run_rank, given, nprocs=2)
