"""Context-parallel decode against one rank with all keys: processes of a gloo group, float64 in place of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.distributed.context_merge import EXCHANGES
from tests.distributed.divided_attention import DividedCase, left_of_a_merge, run_cases
from tests.distributed.parallel_ranks import run_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

WORLDS = (2, 3, 4)
ERRORS = {"float32": 2e-6, "bfloat16": 2.0**-6}  # bf16: partial or scaled outputs and the result are rounded
UNEVEN = (1, 2, 37, 64, 100, 5)
SHAPES = (
    DividedCase("uneven lengths", UNEVEN),
    DividedCase("one request", (77,)),
    DividedCase("one key, so that all ranks but one have none", (1,)),
    DividedCase("a request without keys", (0, 9)),
    DividedCase("64 requests", tuple(range(1, 65))),
    DividedCase("chunks of 16 keys", UNEVEN, interleave=16),
    DividedCase("blocked", UNEVEN, blocked=True),
    DividedCase("sinks", (*UNEVEN, 0), sinks=True),
    DividedCase("natural log-sum-exps", (*UNEVEN, 0), sinks=True, lse_base="e"),
    DividedCase("bf16 parts", UNEVEN, dtype="bfloat16", sinks=True),
    DividedCase("latent attention", UNEVEN, mla=True, head_dim=32, sinks=True),
)
CASES = [
    replace(case, name=f"{case.name}, {exchange}", exchange=exchange)
    for case in SHAPES
    for exchange in ("all_to_all", "gather_reduce")
]
CASES.append(DividedCase("scaled in bf16", UNEVEN, sinks=True, exchange="gather_reduce", reduce_dtype="bfloat16"))


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of each rank, what each case came to: groups are slow to form."""
    ranks: list[Any] = run_ranks(request.param, run_cases, request.param, CASES)
    return ranks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_has_the_output_of_its_heads(found: list[dict[str, Any]], case: DividedCase) -> None:
    errors = [rank[case.name] for rank in found]
    assert max(error["out"] for error in errors) <= ERRORS[case.reduce_dtype or case.dtype]
    assert max(error["lse"] for error in errors) <= 2e-5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_key_is_on_one_rank(found: list[dict[str, Any]], case: DividedCase) -> None:
    assert sum(rank[case.name]["keys"] for rank in found) == sum(case.lens)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_dropped_merge_is_gone_with_its_buffers(exchange: str) -> None:
    assert run_ranks(1, left_of_a_merge, exchange) == [False]


def test_every_rank_receives_the_heads_of_all_in_order(found: list[dict[str, Any]]) -> None:
    assert [rank["heads"] for rank in found] == [list(range(2 * len(found)))] * len(found)
