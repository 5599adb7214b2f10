"""The peers on the same tensors: FlashInfer's XQA and fa2, and cuDNN through it. Everything compiled ahead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from .cases import Case
from .problem import DTYPES, Problem
from .timing import Call

SCRATCH_BYTES = 256 << 20
# Peer -> a function that makes one call for each page table of a problem.
Maker = Callable[[Problem], list[Call]]


def library() -> Any:
    """flashinfer, told for which device to compile.

    Raises:
        ImportError: it is not installed.
    """
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    os.environ.setdefault("FLASHINFER_LOGLEVEL", "0")
    import flashinfer

    return flashinfer


def compile_ahead(cases: Iterable[Case]) -> dict[str, Any]:
    """Compile all that the cases need, side by side; what fails here fails again, and is recorded, in its own row."""
    began = time.perf_counter()
    specs: dict[str, Any] = {}
    errors = []
    wanted = dict.fromkeys(
        (
            peer,
            _peer_dtype(case),
            DTYPES[case.kv_dtype],
            case.page,
            case.head_dim,
            case.q_heads // case.kv_heads,
            case.q_len,
        )
        for case in cases
        for peer in case.peers
    )
    for peer, *traits in wanted:
        try:
            if (made := _spec(peer, *traits)) is not None:
                specs[made.name] = made
        except Exception as failure:  # a peer's failure is a result
            errors.append(describe(failure))
    if specs:
        from flashinfer.jit.core import build_jit_specs

        try:
            build_jit_specs(list(specs.values()))
        except Exception as failure:
            errors.append(describe(failure))
    seconds = round(time.perf_counter() - began, 1)
    return {"modules": sorted(specs), "seconds": seconds, "errors": sorted(set(errors))}


def _spec(peer: str, q: torch.dtype, kv: torch.dtype, page: int, dim: int, group: int, q_len: int) -> Any:
    """What FlashInfer compiles for a call; None for a peer that comes compiled."""
    library()
    if peer == "xqa":
        from flashinfer.jit.xqa import gen_xqa_module

        return gen_xqa_module(q, kv, page, dim, group, False, q, q_len)
    if peer.startswith("fa2"):
        from flashinfer.jit.attention import gen_batch_prefill_module

        return gen_batch_prefill_module("fa2", q, kv, q, torch.int32, dim, dim, 0, False, False, False)
    return None


def describe(failure: BaseException) -> str:
    """The kind and the words of an error, not more of them than a table can hold."""
    return f"{type(failure).__name__}: {failure}"[:600]


def _peer_dtype(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.q_dtype == "e4m3" else DTYPES[case.q_dtype]


@cache
def _scratch(name: str) -> torch.Tensor:
    return torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")


def xqa(problem: Problem) -> list[Call]:
    """XQA, with a causal mask where there are several query tokens."""
    decode = library().decode.xqa_batch_decode_with_kv_cache
    p, case = problem, problem.case
    out = torch.empty_like(p.peer_q)
    options: dict[str, Any] = {"q_len_per_req": case.q_len, "mask": p.causal_mask()} if case.q_len > 1 else {}

    def call_of(table: torch.Tensor) -> Call:
        def call() -> torch.Tensor:
            decode(p.peer_q, p.kv, _scratch("xqa"), table, p.lens, case.longest, p.scale, 1.0, out=out, **options)
            return out

        return call

    return [call_of(table) for table in p.tables]


class _Fa2:
    """A planned fa2 wrapper: decode for one query token, causal prefill for several."""

    def __init__(self, problem: Problem, indices: torch.Tensor) -> None:
        flashinfer = library()
        self.problem, self.indices = problem, indices
        if problem.case.q_len == 1:
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                _scratch("fa2"), "NHD", use_tensor_cores=True, backend="fa2"
            )
        else:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_scratch("fa2"), "NHD", backend="fa2")
        starts = [0]
        for count in problem.counts:
            starts.append(starts[-1] + count)
        self.starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        ends = [(length - 1) % problem.case.page + 1 for length in problem.case.lengths]
        self.last = torch.tensor(ends, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(problem.peer_q)
        self.plan()

    def plan(self) -> None:
        p, case = self.problem, self.problem.case
        pages = (self.starts, self.indices, self.last, case.q_heads, case.kv_heads, case.head_dim, case.page)
        types = {"q_data_type": p.peer_q.dtype, "kv_data_type": p.kv.dtype, "sm_scale": p.scale}
        if case.q_len == 1:
            self.wrapper.plan(*pages, **types)
        else:
            tokens = torch.arange(0, case.batch + 1, dtype=torch.int32, device="cuda") * case.q_len
            self.wrapper.plan(tokens, *pages, causal=True, **types)

    def run(self) -> torch.Tensor:
        self.wrapper.run(self.problem.peer_q, self.problem.kv, out=self.out)
        return self.out

    def plan_and_run(self) -> torch.Tensor:
        self.plan()
        return self.run()


def fa2(problem: Problem) -> list[Call]:
    """fa2's ``run``, planned before."""
    return [_Fa2(problem, indices).run for indices in problem.indices]


def fa2_plan_run(problem: Problem) -> list[Call]:
    """fa2's ``plan`` and ``run``, as each step pays it whose lengths differ from the one before."""
    return [_Fa2(problem, problem.indices[0]).plan_and_run]


@cache
def _cudnn_takes_strides() -> bool:
    """Whether it reads caches whose tokens lie before their heads; else it gets copies."""
    from flashinfer.cudnn.decode import CUDNN_AVAILABLE

    if not CUDNN_AVAILABLE:
        raise ImportError("nvidia-cudnn-frontend is not installed")
    decode = library().decode.cudnn_batch_decode_with_kv_cache
    k, v = torch.randn(2, 3, 64, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    q = torch.randn(1, 64, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(3, device="cuda", dtype=torch.int32).view(1, 3)
    lens = torch.full((1, 1, 1, 1), 192, device="cuda", dtype=torch.int32)
    try:
        decode(q, k, v, 0.1, _scratch("cudnn"), max_sequence_kv=192, actual_seq_lens_kv=lens, block_tables=table)
        torch.cuda.synchronize()
    except Exception:  # whatever it says, it says it again of the copies if they are no better
        return False
    return True


def cudnn(problem: Problem) -> list[Call]:
    """cuDNN's paged decode; it takes the caches as ``[pages, heads, page, dim]``."""
    decode = library().decode.cudnn_batch_decode_with_kv_cache
    p, case = problem, problem.case
    k, v = (p.kv[:, part].transpose(1, 2) for part in (0, 1))
    if not _cudnn_takes_strides():
        k, v = k.contiguous(), v.contiguous()
    out = torch.empty_like(p.peer_q)
    lens = p.lens.view(-1, 1, 1, 1)

    def call_of(table: torch.Tensor) -> Call:
        def call() -> torch.Tensor:
            decode(
                p.peer_q,
                k,
                v,
                p.scale,
                _scratch("cudnn"),
                max_sequence_kv=case.longest,
                actual_seq_lens_kv=lens,
                block_tables=table,
                out=out,
            )
            return out

        return call

    return [call_of(table) for table in p.tables]


MAKERS: dict[str, Maker] = {"xqa": xqa, "fa2": fa2, "fa2_plan_run": fa2_plan_run, "cudnn": cudnn}
