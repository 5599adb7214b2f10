"""MLA decodes of requests of different lengths, as engines call them: cases, tensors, our plans, FlashAttention-3."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sequence.timing import Maker

from cubin_runtime.attention import Runtime, plan_mla_decode

from .cases import FA3_SPLITS, ITEM_BYTES, exponential, mixed, same
from .mla_cases import ROPE
from .mla_measuring import SCALE
from .problem import DTYPES, Pool, page_table_of, tables_of
from .timing import Call

LATENT, PAGE = 512, 64
SEED = 5


@dataclass(frozen=True, slots=True)
class MlaLengths:
    """One row: ``heads`` of all requests, and the keys of each."""

    section: str
    label: str
    lengths: tuple[int, ...]
    heads: int
    kv_dtype: str = "bf16"
    page: int = PAGE

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def pages(self) -> int:
        return sum(-(-length // self.page) for length in self.lengths)

    @property
    def page_bytes(self) -> int:
        return self.page * (LATENT + ROPE) * ITEM_BYTES[self.kv_dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache that one call must read."""
        return sum(self.lengths) * (LATENT + ROPE) * ITEM_BYTES[self.kv_dtype]


def cases() -> list[MlaLengths]:
    """DeepSeek V3 whole and as a rank of eight sees it, and its cache in e4m3."""
    draw = random.Random(SEED)
    lengths: dict[str, tuple[int, ...]] = {
        "1 x 4096": same(1, 4096),
        "16 x 7000": same(16, 7000),
        "64 x 1024": same(64, 1024),
        "256 x 200": same(256, 200),
        "16 x 2000, mixed": mixed(draw, 16, 2000),
        "64 x 1024, mixed": mixed(draw, 64, 1024),
        "64 x 1024, exponential": exponential(draw, 64, 1024),
        "128 x 2048, mixed": mixed(draw, 128, 2048),
        "256 x 200, mixed": mixed(draw, 256, 200),
        "256 x 500, exponential": exponential(draw, 256, 500),
        "63 x 100 beside 1 x 8000": (8000, *same(63, 100)),
    }
    kinds = (("128 heads", 128, "bf16"), ("16 heads", 16, "bf16"), ("128 heads, e4m3 cache", 128, "e4m3"))
    return [
        MlaLengths(section, label, each, heads, kv_dtype)
        for section, heads, kv_dtype in kinds
        for label, each in lengths.items()
    ]


class MlaProblem:
    """Tensors of one case: a cache ``[pages, page, columns]`` whose pages are permuted over ``sets`` page tables."""

    def __init__(self, case: MlaLengths, pool: Pool, sets: int) -> None:
        self.case = case
        shape = (case.pages * sets, case.page, LATENT + ROPE)
        self.cache = pool.flat(case.kv_dtype)[: math.prod(shape)].view(shape)
        order = torch.randperm(case.pages * sets, dtype=torch.int32).view(sets, case.pages)
        counts = [-(-length // case.page) for length in case.lengths]
        self.tables = [page_table_of(part, counts) for part in order]
        self.lens = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        rows = (len(case.lengths), case.heads)
        self.q = torch.randn(*rows, LATENT + ROPE, device="cuda", dtype=DTYPES["bf16"])
        self.out = torch.empty(*rows, LATENT, device="cuda", dtype=DTYPES["bf16"])


def ours_of(problem: MlaProblem, runtime: Runtime, bound: int) -> tuple[Any, Maker]:
    """The plan for contexts of ``bound``, and its calls of all page tables."""
    p, tables = problem, tables_of(problem, bound)
    options = {"max_seq_len": bound, "softmax_scale": SCALE, "backend": "native", "runtime": runtime}
    plan = plan_mla_decode(p.q, p.cache, tables[0], p.lens, p.out, **options)

    def make(stream: torch.cuda.Stream) -> list[Call]:
        handle = stream.cuda_stream
        workspace = plan.prepare(handle)

        def call_of(table: torch.Tensor) -> Call:
            return lambda: plan.run(p.q, p.cache, table, p.lens, p.out, workspace=workspace, stream=handle)

        return [call_of(table) for table in tables]

    return plan, make


def _fa3_of(problem: MlaProblem, bound: int) -> list[Call]:
    """FlashAttention-3 as vLLM's FLASH_ATTN_MLA calls it, with the scheduler metadata that it makes once a step.

    Raises:
        ImportError: there is no vLLM.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    p, case = problem, problem.case
    latent, rope = p.cache[..., None, :LATENT], p.cache[..., None, LATENT:]
    q_latent, q_rope = (part.contiguous() for part in p.q.split((LATENT, ROPE), dim=-1))
    starts = torch.arange(len(case.lengths) + 1, device="cuda", dtype=torch.int32)
    common = {"max_seqlen_q": 1, "max_seqlen_k": bound, "cu_seqlens_q": starts, "causal": True}
    heads = {"num_heads_q": case.heads, "num_heads_kv": 1, "headdim": ROPE, "headdim_v": LATENT}
    sizes = {"batch_size": len(case.lengths), "page_size": case.page, "cache_seqlens": p.lens, "qkv_dtype": p.q.dtype}
    metadata = get_scheduler_metadata(**common, **heads, **sizes, num_splits=FA3_SPLITS)
    options = {"softmax_scale": SCALE, "scheduler_metadata": metadata, "fa_version": 3, "num_splits": FA3_SPLITS}
    tensors = {"q": q_rope, "k": rope, "v": latent, "q_v": q_latent, "seqused_k": p.lens}

    def call_of(table: torch.Tensor) -> Call:
        return lambda: flash_attn_varlen_func(**tensors, **common, **options, block_table=table)

    return [call_of(table) for table in tables_of(problem, bound)]


def peers_of(name: str, problem: MlaProblem) -> dict[str, Callable[[], list[Call]]]:
    """Makes the calls of a peer, planned for the lengths; it takes no e4m3 cache."""
    if name != "fa3" or problem.case.kv_dtype != "bf16":
        return {}
    return {"fa3, tight": partial(_fa3_of, problem, problem.case.longest)}
