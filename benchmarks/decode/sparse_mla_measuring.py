"""One row of the sparse MLA benchmark: rows of a large pool, lists of them, our call and its float64 reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sequence.timing import Maker

from cubin_runtime.attention import Runtime, plan_sparse_mla_decode

from .measuring import reading
from .mla_cases import MlaCase
from .mla_measuring import SCALE, MlaBench, MlaMaker, MlaProblem
from .problem import DTYPES, Pool, difference
from .reading import Rows
from .rows import Row
from .sparse_mla_cases import ROW_BYTES
from .timing import Call

LATENT, BLOCK, ROPE = 512, 128, 64
HEADS_TOGETHER = 64  # of the peer's kernels, for whose calls fewer heads are padded
REFERENCE_TOKENS = (0, -1)
_SCALES_END = LATENT + LATENT // BLOCK * 4
_CHUNK_ROWS = 1 << 18


class RowPool(Pool):
    """As ``Pool``; of e4m3 the bytes of rows of 656: normal e4m3, a scale for each 128 of them, normal bf16."""

    def _values(self, dtype: str) -> torch.Tensor:
        if dtype != "e4m3":
            return super()._values(dtype)
        rows = torch.empty(self.nbytes // ROW_BYTES[dtype], ROW_BYTES[dtype], device="cuda", dtype=torch.uint8)
        for part in rows.split(_CHUNK_ROWS):
            latent = torch.randn(len(part), LATENT, device="cuda", dtype=torch.bfloat16).to(DTYPES["e4m3"])
            scales = 0.5 + torch.rand(len(part), LATENT // BLOCK, device="cuda")
            rope = torch.randn(len(part), ROPE, device="cuda", dtype=torch.bfloat16)
            torch.cat([values.view(torch.uint8) for values in (latent, scales, rope)], dim=1, out=part)
        return rows.flatten()


class SparseMlaProblem(MlaProblem):
    """Tensors of one case: the whole pool as the cache, and lists of its rows, random ones of each token's own.

    ``tables`` are ``sets`` lists ``[tokens, length]``. The queries are the first heads of ``padded_q``.
    """

    padded_q: torch.Tensor

    def _rows(self, pool: Pool, sets: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        case, flat = self.case, pool.flat(self.case.kv_dtype)
        shape = (case.page, ROW_BYTES[case.kv_dtype] // flat.itemsize)
        pages = len(flat) // (shape[0] * shape[1])
        tokens = case.batch * case.q_len
        order = torch.randperm(pages * case.page, dtype=torch.int32, device="cuda")[: sets * tokens * case.length]
        return flat[: pages * shape[0] * shape[1]].view(pages, *shape), list(order.view(sets, tokens, case.length))

    def _queries(self) -> torch.Tensor:
        case = self.case
        heads = -(-case.heads // HEADS_TOGETHER) * HEADS_TOGETHER
        shape = (case.batch * case.q_len, heads, case.width)
        self.padded_q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return self.padded_q[:, : case.heads]


def sparse_ours_of(problem: MlaProblem, runtime: Runtime, stream: int, batch_invariant: bool) -> tuple[Any, list[Call]]:
    """The plan, and a call for each layer's lists."""
    p = problem
    options = {"softmax_scale": SCALE, "batch_invariant": batch_invariant}
    plan = plan_sparse_mla_decode(p.q, p.cache, p.tables[0], p.out, **options, backend="native", runtime=runtime)
    workspace = plan.prepare(stream)

    def call_of(lists: torch.Tensor) -> Call:
        return lambda: plan.run(p.q, p.cache, lists, p.out, workspace=workspace, stream=stream)

    return plan, [call_of(lists) for lists in p.tables]


def keys_of(rows: torch.Tensor) -> torch.Tensor:
    """The keys in rows of the cache, ``[rows, 576]`` in float64; their first 512 columns are the values."""
    if rows.dtype != torch.uint8:
        return rows.double()
    scales = rows[:, LATENT:_SCALES_END].view(torch.float32).double()
    latent = rows[:, :LATENT].view(DTYPES["e4m3"]).double() * scales.repeat_interleave(BLOCK, dim=1)
    return torch.cat([latent, rows[:, _SCALES_END:].view(torch.bfloat16).double()], dim=1)


def reference(problem: MlaProblem, token: int) -> torch.Tensor:
    """The output of a token in float64."""
    keys = keys_of(problem.cache.flatten(0, 1)[problem.tables[0][token].long()])
    scores = problem.q[token].double() @ keys.T * SCALE
    return scores.softmax(dim=1) @ keys[:, :LATENT]


class SparseMlaBench(MlaBench):
    """As ``MlaBench``; each row says how much our output of some tokens differs from the reference, and what a kernel
    reaches that only reads random rows."""

    problem_type = SparseMlaProblem
    plan_calls = staticmethod(sparse_ours_of)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._limits: dict[str, float] = {}  # of the rows of a type

    def row(self, case: MlaCase, peers: Mapping[str, MlaMaker]) -> Row:
        """As ``MlaBench``."""
        return super().row(case, peers) | {"read_tb_per_s": self._read_limit(case)}

    def _read_makers(self, case: MlaCase, problem: MlaProblem) -> dict[str, Maker]:
        nbytes = ROW_BYTES[case.kv_dtype]
        rows = Rows(problem.cache.data_ptr(), nbytes, case.kv_bytes // nbytes)
        return self.reads.makers_of_rows(rows, [table.data_ptr() for table in problem.tables])

    def _read_limit(self, case: MlaCase) -> float:
        if case.kv_dtype not in self._limits:
            self._limits[case.kv_dtype] = self._random_rows_tb_per_s(case.kv_dtype)
        return self._limits[case.kv_dtype]

    def _random_rows_tb_per_s(self, kv_dtype: str) -> float:
        flat, nbytes, layers = self.pool.flat(kv_dtype), ROW_BYTES[kv_dtype], self.method.layers
        order = torch.randperm(flat.nbytes // nbytes, dtype=torch.int32, device="cuda").tensor_split(layers)
        rows = Rows(flat.data_ptr(), nbytes, min(map(len, order)))
        makers = self.reads.makers_of_rows(rows, [part.data_ptr() for part in order])
        return float(reading(makers, rows.count * nbytes, self.method)["tb_per_s"])

    def _ours(self, case: MlaCase, problem: MlaProblem, row: Row) -> Row:
        found = super()._ours(case, problem, row)
        expected = torch.stack([reference(problem, token) for token in REFERENCE_TOKENS])
        row["reference_difference"] = difference(expected, problem.out[list(REFERENCE_TOKENS)])
        return found
