"""Made-up kernels and problems for the trtllm-gen planner, and the data of its recorded cases."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from cubin_runtime.artifacts.tables.metadata import KernelMeta, KernelTable
from cubin_runtime.artifacts.tables.metadata_index import MetadataIndex, build_index
from cubin_runtime.kernels.trtllm_gen.arithmetic import INT32_MAX
from cubin_runtime.kernels.trtllm_gen.kernel_finder import KernelFinder
from cubin_runtime.kernels.trtllm_gen.problem import Bindings, Problem, Strides
from cubin_runtime.kernels.trtllm_gen.traits import (
    KernelType,
    MaskType,
    MultiCtasMode,
    QkvLayout,
    SparseType,
    TileScheduler,
)

DATA = Path(__file__).parents[1] / "data"
BLACKWELL = 148

ROW = KernelMeta(
    symbol="fmhaSm100fKernel_",
    sha256="0" * 64,
    row=0,
    sm="100f",
    dtype_q="bf16",
    dtype_kv="bf16",
    dtype_k="bf16",
    dtype_v="bf16",
    dtype_o="bf16",
    tile_q=16,
    tile_kv=128,
    step_q=16,
    step_kv=128,
    head_dim_per_cta_v=128,
    head_dim_qk=128,
    head_dim_v=128,
    shared_bytes=100_000,
    threads=384,
    qkv_layout=QkvLayout.PAGED,
    tokens_per_page=32,
    mask_type=MaskType.CAUSAL,
    kernel_type=KernelType.SWAPS_AB,
    tile_scheduler=TileScheduler.STATIC,
    multi_ctas_kv_mode=MultiCtasMode.GMEM,
    sage_block_q=0,
    sage_block_k=0,
    sage_block_p=0,
    sage_block_v=0,
    groups_heads_q=True,
    groups_tokens_heads_q=True,
    reuses_smem_k_for_v=False,
    two_cta_mma=False,
    sparse_attention=0,
    skips_softmax=False,
)

PROBLEM = Problem(
    sm=100,
    multiprocessors=BLACKWELL,
    layout=QkvLayout.PAGED,
    mask=MaskType.CAUSAL,
    kernel_type=KernelType.GENERATION,
    multi_ctas=True,
    dtype_q="bf16",
    dtype_k="bf16",
    dtype_v="bf16",
    dtype_o="bf16",
    heads_q=32,
    heads_kv=8,
    head_dim_qk=128,
    head_dim_v=128,
    batch=1,
    max_q=1,
    max_kv=4096,
    tokens_q=1,
    tokens_kv=0,
    page=32,
    pages=1000,
    table_width=128,
    window=INT32_MAX,
    bindings=Bindings(query=0x1000, key=0x2000, value=0x3000, out=0x4000, counters=0x5000, scratch=0x6000),
    strides=Strides(query=(4096, 128), key=(128, 4096, 32768), value=(128, 4096, 32768)),
    scale_kv_scales=1.0,
    shares_page_index=True,
)
MLA = replace(
    PROBLEM,
    mask=MaskType.DENSE,
    heads_q=16,
    heads_kv=1,
    head_dim_qk=576,
    head_dim_v=512,
    strides=Strides(query=(9216, 576), key=(576, 18432, 18432), value=(576, 18432, 18432)),
)
SPARSE_MLA = replace(MLA, sparse=SparseType.STATIC, top_k=2048)


def named(rows: Iterable[KernelMeta]) -> list[KernelMeta]:
    """Rows with symbols and places of their own."""
    return [replace(row, symbol=f"{row.symbol}{place:05}", row=place) for place, row in enumerate(rows)]


def finder(*rows: KernelMeta) -> KernelFinder:
    """A release of just these rows."""
    return KernelFinder(MetadataIndex(build_index(KernelTable(tuple(rows), (), "f" * 64))))


def decode_rows(tiles: Iterable[int] = (8, 16, 32, 64, 128), **changes: Any) -> list[KernelMeta]:
    """Grouped-query decoding in all tiles, masks and ways to split KV; tiles of 64 and more keep the operands."""
    rows = []
    for tile, mask, mode in product(tiles, MaskType, (0, 1, 3)):
        kind = KernelType.KEEPS_AB if tile >= 64 else KernelType.SWAPS_AB
        row = replace(
            ROW,
            tile_q=tile,
            step_q=tile,
            mask_type=mask,
            kernel_type=kind,
            multi_ctas_kv_mode=mode,
            tile_scheduler=TileScheduler.STATIC if mode else TileScheduler.PERSISTENT,
        )
        rows.append(replace(row, **changes))
    return named(rows)


def never_asked(meta: KernelMeta, cluster: int, grid: tuple[int, int, int]) -> int:
    """An occupancy for tests in which nobody asks."""
    raise AssertionError("occupancy was asked")


def room_for(clusters: int) -> Callable[[KernelMeta, int, tuple[int, int, int]], int]:
    """An occupancy that always holds so many clusters."""
    return lambda meta, cluster, grid: clusters


@cache
def recorded_kernels() -> KernelFinder:
    """The published release's kernels as far as planning looks at them; digests are made up."""
    columns = json.loads(lzma.decompress((DATA / "trtllm_gen_kernels.json.xz").read_bytes()))
    names = [f.name for f in fields(KernelMeta) if f.name not in ("sha256", "row")]
    cells = zip(*(columns[name] for name in names), strict=True)
    return finder(
        *(
            KernelMeta(sha256=f"{place:064x}", row=place, **dict(zip(names, row, strict=True)))
            for place, row in enumerate(cells)
        )
    )


def recorded_cases() -> Iterator[dict[str, Any]]:
    """Recorded decisions of the reference launcher, with what is compared."""
    with lzma.open(DATA / "trtllm_gen_cases.jsonl.xz") as opened:
        yield from map(json.loads, opened)
