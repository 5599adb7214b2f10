"""The serving benchmark's trees of drafts, on the CPU with a reference in place of the kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from benchmarks.serving_loop import engine as engine_module  # noqa: E402
from benchmarks.serving_loop.engine import PAGE, Engine  # noqa: E402
from benchmarks.serving_loop.model import HEAD_DIM, HEADS, KV_HEADS, VOCABULARY, Model  # noqa: E402
from benchmarks.serving_loop.schedule import Request, Scheduler, requests_at_random  # noqa: E402
from benchmarks.serving_loop.speculation import LEVELS, NODES, PARENTS, KnownTokens, TreeEngine  # noqa: E402

DRAWN = requests_at_random(4, 0, per_second=1e6, vocabulary=VOCABULARY, longest=90)
REQUESTS = [Request(one.number, 0.0, one.prompt, 10 + 4 * one.number) for one in DRAWN]


class Reference:
    """Append and attention in float64, a request at a time."""

    name = "reference"

    def __init__(self) -> None:
        self.rows: Any = None

    def plan(self, rows: Any) -> None:
        pass

    def places(self, request: int) -> tuple[Any, Any]:
        keys = torch.arange(int(self.rows.lens[request]))
        return self.rows.table[request].long()[keys // PAGE], keys % PAGE

    def append(self, k: Any, v: Any, caches: Any) -> None:
        for request, (first, end) in enumerate(self.spans()):
            page, token = (at[-(end - first) :] for at in self.places(request))
            caches[0][page, token], caches[1][page, token] = k[first:end], v[first:end]

    def attend(self, q: Any, caches: Any) -> Any:
        out = torch.empty_like(q)
        for request, (first, end) in enumerate(self.spans()):
            count, keys = end - first, int(self.rows.lens[request])
            k, v = (cache[self.places(request)].double().repeat_interleave(HEADS // KV_HEADS, 1) for cache in caches)
            seen = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
            if self.rows.mask is not None:
                words = self.rows.mask[request].int()
                drafts = words[:, :1] >> torch.arange(count) & 1
                seen = torch.cat([torch.ones(count, keys - count, dtype=torch.bool), drafts.bool()], 1)
            scores = torch.einsum("qhd,khd->hqk", q[first:end].double(), k) * HEAD_DIM**-0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out

    def spans(self) -> list[tuple[int, int]]:
        offsets = self.rows.offsets.tolist()
        return list(pairwise(offsets))


@pytest.fixture(scope="module", autouse=True)
def small() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "BUCKETS", (1, 2, 4, 8))
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.at_random(2, device="cpu", with_head=True)


def serve(made: Engine) -> Any:
    sizes = {"pages": 30, "page_size": PAGE, "slots": 4, "step_tokens": 128, "ahead": made.ahead}
    return made.serve(Scheduler.of(REQUESTS, **sizes), {request.number for request in REQUESTS})


def sizes() -> dict[str, int]:
    return {"pages": 30, "longest": 256, "most_made": 64}


@pytest.fixture(scope="module")
def plain(model: Model) -> Any:
    return serve(Engine(model, Reference(), **sizes()))


@pytest.mark.parametrize("probability", [0.0, 0.7, 1.0])
def test_trees_give_the_tokens_of_single_steps(model: Model, plain: Any, probability: float) -> None:
    drafter = KnownTokens(plain.tokens, probability, VOCABULARY, np.random.default_rng(0))
    served = serve(TreeEngine(model, Reference(), drafter, **sizes()))
    for request in REQUESTS:
        wanted = plain.tokens[request.number][: request.wanted]
        assert served.tokens[request.number][: request.wanted].tolist() == wanted.tolist()
        assert len(served.token_times[request.number]) == request.wanted
    per_step = served.accepted / served.verified
    assert {0.0: per_step < 1.1, 0.7: 1.3 < per_step < 2.6, 1.0: 2.3 < per_step <= LEVELS + 1}[probability], per_step


def test_outputs_are_those_of_the_model(model: Model, plain: Any) -> None:
    for request in REQUESTS[:2]:
        tokens = torch.from_numpy(np.concatenate([request.prompt, plain.tokens[request.number][:-1]]))
        expected = model.expected(tokens)
        found = plain.outputs[request.number].double()
        assert float((found - expected).abs().max() / expected.abs().max()) < 0.03


def test_the_drafter_is_right_along_one_path(plain: Any) -> None:
    request: Request = REQUESTS[0]
    drafter = KnownTokens(plain.tokens, 1.0, VOCABULARY, np.random.default_rng(1))

    class At:
        made = 1

    At.request = request  # type: ignore[attr-defined]
    right = plain.tokens[request.number][1 : 1 + LEVELS].tolist()
    levels = []
    for _ in range(50):
        tokens = [-1, *drafter.propose(At())]  # type: ignore[arg-type]
        node, level = 0, 0
        while level < LEVELS and right[level] in (kids := {tokens[j]: j for j in range(NODES) if PARENTS[j] == node}):
            node, level = kids[right[level]], level + 1
        levels.append(level)
    assert {min(levels), max(levels)} == {1, LEVELS}
