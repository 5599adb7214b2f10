"""Steps recorded from vLLM's and SGLang's metadata, with random values, against float64 references."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from cubin_runtime import Runtime  # noqa: E402
from cubin_runtime.integrations.paged_batch import PagedBatch, Part, attend  # noqa: E402
from tests.integrations.step_records import RECORDS, array, expected, made_again  # noqa: E402  (it needs torch)

STEPS = [
    pytest.param(record, id=f"{engine}: {name}")
    for engine, steps in json.loads(RECORDS.read_text()).items()
    for name, record in steps.items()
]
ATOL, RTOL = 8e-3, 1.6e-2  # of bf16 outputs


@pytest.mark.gpu
@pytest.mark.parametrize("record", STEPS)
def test_a_recorded_step(record: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    *given, out = made_again(record, "cuda")
    attend(*given, out)
    np.testing.assert_allclose(array(out), expected(*given), ATOL, RTOL)


def alone(part: Part, request: int) -> Part:
    """One request of a part."""
    first, end = (request, request + 1) if part.sums is None else part.sums[request : request + 2].tolist()
    here = slice(request, request + 1)
    sums = None if part.sums is None else part.sums[request : request + 2] - first
    return part._replace(
        first_row=part.first_row + first,
        rows=end - first,
        table=part.table[here],
        lengths=part.lengths[here],
        sums=sums,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("record", STEPS)
def test_a_recorded_step_with_batch_invariance(record: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    *given, batch, options, out = made_again(record, "cuda")
    options = options._replace(batch_invariant=True)
    attend(*given, batch, options, out)
    np.testing.assert_allclose(array(out), expected(*given, batch, options), ATOL, RTOL)
    singly = torch.zeros_like(out)
    for kind, part in vars(batch).items():
        for request in range(0 if part is None else len(part.lengths)):
            single = PagedBatch(**{"decodes": None, "prefills": None, kind: alone(part, request)})
            attend(*given, single, options, singly)
    assert torch.equal(out, singly)


@pytest.mark.gpu
@pytest.mark.parametrize("record", [step for step in STEPS if step.values[0]["parts"][1] is None])
def test_a_recorded_decode_replayed_from_a_graph(
    record: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    *given, out = made_again(record, "cuda")
    attend(*given, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(*given, out)
    for fewer in (0, 1):
        given[4].decodes.lengths.sub_(fewer * (given[4].decodes.lengths > 1))
        out.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        np.testing.assert_allclose(array(out), expected(*given), ATOL, RTOL)
