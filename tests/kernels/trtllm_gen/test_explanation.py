from __future__ import annotations

from cubin_runtime.cli.example_call import Shapes
from cubin_runtime.cli.recorded_cases import occupancy_of, problem_of
from cubin_runtime.kernels.trtllm_gen import explanation
from cubin_runtime.kernels.trtllm_gen.decision import decide
from tests.kernels.example_cases import case_of
from tests.kernels.trtllm_examples import recorded_kernels

MLA = {"heads_q": 128, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512}


def explained(**shapes):
    case = case_of(Shapes(**shapes))
    return decide(problem_of(case), recorded_kernels(), occupancy_of(case))


def test_an_explanation_names_the_kernel_and_the_grid() -> None:
    decision = explained(lse=True)
    assert {"kernel", "because", "tile", "grid", "split", "then"} == set(dict(explanation.choice(decision)))
    more, *tables = explanation.details(decision)
    assert {"asked for", "tile size", "occupancy", "block", "attributes", "workspace"} <= set(dict(more))
    assert len(tables) == 3


def test_an_explanation_shows_each_candidate_with_its_cost() -> None:
    rows = explanation.candidate_rows(explained(heads_kv=4, q_len=6, kv_len=4096))
    assert [row[1] for row in rows[:4]] == [64, 32, 16, 8]
    assert [row[2] for row in rows[:4]] == ["2088.95996", "1863.68005", "1669.12", "1536"]


def test_an_explanation_shows_each_pass() -> None:
    rows = explanation.pass_rows(explained())
    assert [row[3] for row in rows] == ["gmem", "cga"]


def test_an_explanation_gives_each_parameter_its_meaning() -> None:
    rows = explanation.parameter_rows(explained())
    assert all(row[-1] for row in rows)
    assert len(rows) == 61


def test_an_explanation_shows_each_descriptor_that_is_built() -> None:
    assert [row[0] for row in explanation.tensor_map_rows(explained())] == ["tmaQ_", "tmaK_", "tmaV_", "tmaO_"]


def test_a_reduction_and_an_lse_are_said_to_follow() -> None:
    follows = [
        value
        for name, value in explanation.choice(explained(**MLA, lse=True, kv_len=100_000, q_len=4))
        if name == "then"
    ]
    assert [str(text).split()[0] for text in follows] == ["reduction", "LSE"]
