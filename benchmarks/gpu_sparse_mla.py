"""Sparse MLA decode beside FlashMLA's on the same cache and lists: times, bandwidth, ratios, bars.

Run: ``python benchmarks/gpu_sparse_mla.py --out DIR --flashmla LIBRARY`` on a machine with a Hopper GPU, torch and
triton; ``decode/flash_mla_build.py`` makes the library. Options and figures are those of ``gpu_mla.py``. Every query
token has a list of 2,048 rows of its own, random ones of a cache of 8 GiB; bandwidth counts the bytes of these rows.
FlashMLA computes 64 heads or 128: where a case has fewer, its queries are padded before anything is timed. Two tokens
of each case are compared with a float64 reference, too.
"""

from __future__ import annotations

from decode import flash_mla
from decode.sparse_mla_cases import sparse_mla_cases
from decode.sparse_mla_measuring import RowPool, SparseMlaBench
from gpu_mla import Benchmark, run

SPARSE_MLA = Benchmark(
    name="sparse_mla",
    question="Sparse MLA decode beside FlashMLA",
    peers="flashmla",
    cases=sparse_mla_cases,
    bench=SparseMlaBench,
    pool=RowPool,
    flashmla=flash_mla.sparse_maker,
)

if __name__ == "__main__":
    raise SystemExit(run(SPARSE_MLA))
