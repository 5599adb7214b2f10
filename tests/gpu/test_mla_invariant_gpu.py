"""batch_invariant MLA decodes, repeats, and graphs: the bits of a request depend on nothing around it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.batch_invariance import (  # noqa: F401
    InvarianceTarget,
    test_bounds_tables_and_pages_do_not_matter,
    test_every_position_of_a_batch_gives_the_same_bits,
    test_ragged_queries_and_their_bound_do_not_matter,
    test_streams_graphs_and_pdl_do_not_matter,
)
from tests.gpu.graph_replays import replay_over
from tests.gpu.mla_cases import MlaCase, MlaHost, assemble_mla, mla_request, mla_sinks
from tests.gpu.mla_device import mla_on_device
from tests.gpu.seeds import SEED
from tests.gpu.test_decode_streams_gpu import REPEATS, Repeated

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mla_backend")]

PORTABLE = {"kv_dtype": "e4m3", "q_dtype": "e4m3", "portable": True}
# One request each: its keys, its query tokens, and the options of all.
TARGETS = {
    "16 heads": MlaCase((1000,), 1000),
    "128 heads": MlaCase((2500,), 2500, heads=128),
    "64 heads, long": MlaCase((6000,), 6000, heads=64),
    "5 heads, tree, sinks": MlaCase((3000,), 3000, heads=5, q_len=4, mask="tree", sinks=True),
    "256 columns": MlaCase((700,), 700, heads=40, latent=256, q_len=3, mask="any", page_size=32),
    "e4m3": MlaCase((2049,), 2049, heads=32, kv_dtype="e4m3", page_size=128),
    "e4m3, 128 heads": MlaCase((5000,), 5000, heads=128, q_len=2, kv_dtype="e4m3", q_dtype="e4m3", mask="tree"),
    "e4m3, 16 tokens": MlaCase((640,), 640, heads=16, q_len=16, kv_dtype="e4m3", q_dtype="e4m3", latent=256),
    "values elsewhere": MlaCase((2300,), 2300, heads=24, kv_dtype="e4m3", q_dtype="e4m3", separate_values=True),
    "rope elsewhere": MlaCase((2300,), 2300, heads=24, q_len=3, separate_rope=True),
    "no rope": MlaCase((2500,), 2500, heads=16, rope=0, q_len=2),
    "256 + 32, e4m3": MlaCase((1700,), 1700, heads=128, latent=256, rope=32, kv_dtype="e4m3", q_dtype="e4m3"),
    "128 + 32": MlaCase((5000,), 5000, heads=40, latent=128, rope=32, q_len=2, sinks=True),
    "portable": MlaCase((4000,), 4000, heads=20, q_len=5, mask="any", **PORTABLE),
    "one key": MlaCase((1,), 1),
    "fewer keys than queries": MlaCase((3,), 3, q_len=5, mask="any", sinks=True),
    "no key": MlaCase((0,), 64, q_len=2),
}
LOAD = {
    "default": MlaCase((4000, 3, 999, 64), 4096, heads=128, q_len=2, mask="tree", sinks=True),
    "invariant": MlaCase((4000, 0, 1500), 4096, heads=64, batch_invariant=True, pdl=True),
    "16 heads": MlaCase((3000, 65, 2000, 700), 4096, pdl=True),
    "ragged": MlaCase((900, 2500, 70), 4096, heads=32, latent=256, q_lens=(3, 0, 16), mask="any"),
}
NARROW_LOAD = {name: replace(case, kv_dtype="e4m3", q_dtype="e4m3") for name, case in LOAD.items()}
PORTABLE_LOAD = {name: replace(case, **PORTABLE) for name, case in LOAD.items()}
LOADS = pytest.mark.parametrize("load", [LOAD, NARROW_LOAD, PORTABLE_LOAD], ids=["bf16", "e4m3", "portable"])
UNIFORM = MlaCase((300, 17, 0, 128), 512, q_len=3, mask="tree", sinks=True)
RAGGED = MlaCase((300, 17, 0, 128), 512, q_lens=(3, 0, 1, 16), max_q_len=16, mask="any", sinks=True, spare_tokens=10)


class Target(InvarianceTarget):
    targets = TARGETS
    request_of = staticmethod(mla_request)
    sinks_of = staticmethod(mla_sinks)
    assembled = staticmethod(assemble_mla)
    on_device = staticmethod(mla_on_device)

    def score_error(self, case: MlaCase) -> float:
        return case.of_scores


@pytest.fixture(params=list(TARGETS))
def target(runtime: Runtime, request: pytest.FixtureRequest) -> Target:
    print(f"seed {SEED}")
    return Target(runtime, request.param)


def test_without_it_the_batch_can_be_seen(runtime: Runtime) -> None:
    """The comparison above can fail: the default splits a request by what else is in the batch."""
    target = Target(runtime, "64 heads, long")
    default = replace(target.case, batch_invariant=False)
    crowded = target.bits(default, target.mixed(128, 0))
    alone = target.bits(default, [target.request])[0]
    assert any(bits != alone for bits in crowded)


@LOADS
def test_200_repeats_under_load_on_streams_and_in_graphs_give_the_same_bits(
    runtime: Runtime, rng: np.random.Generator, load: Mapping[str, MlaCase]
) -> None:
    with ExitStack() as stack:
        devices = [stack.enter_context(mla_on_device(runtime, case, rng)) for case in load.values()]
        # Two eager streams and two graphs at once, then the other way round.
        for graphs in ((False, False, True, True), (True, True, False, False)):
            running = [Repeated(device, graph) for device, graph in zip(devices, graphs, strict=True)]
            for index in range(REPEATS):
                for one in running:
                    one.step(index)
            for one in running:
                one.assert_one_answer()


@LOADS
def test_a_chain_of_dependent_launches_with_pdl_is_right(
    runtime: Runtime, rng: np.random.Generator, load: Mapping[str, MlaCase]
) -> None:
    # Each launch overwrites what the one before it wrote, and uses its counters.
    with mla_on_device(runtime, load["16 heads"], rng) as case:
        workspace = case.dirty_workspace()
        for _ in range(50):
            case.run(workspace=workspace)
        case.assert_right()
        case.assert_zeroed(workspace)


STEPS = {
    "other lengths": ((300, 17, 0, 128), (1, 300, 128, 0), (65, 64, 63, 17)),
    "zero lengths": ((300, 17, 0, 128), (0, 0, 0, 0), (0, 512, 0, 1)),
    "the longest": ((512, 512, 512, 512), (1, 1, 1, 1), (511, 2, 300, 64)),
}


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("steps", list(STEPS))
def test_replays_follow_lengths_tables_and_masks(
    runtime: Runtime, rng: np.random.Generator, steps: str, batch_invariant: bool, portable: bool
) -> None:
    wanted = replace(UNIFORM, batch_invariant=batch_invariant, **(PORTABLE if portable else {}))
    replay(runtime, wanted, rng, [(lengths, wanted.query_lens) for lengths in STEPS[steps]])


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_replays_follow_query_lengths(
    runtime: Runtime, rng: np.random.Generator, batch_invariant: bool, portable: bool
) -> None:
    wanted = replace(RAGGED, batch_invariant=batch_invariant, **(PORTABLE if portable else {}))
    queries = ((3, 0, 1, 16), (0, 0, 0, 1), (16, 2, 0, 9), (7, 7, 7, 7), (0, 16, 0, 0))
    lengths = ((300, 17, 0, 128), (1, 300, 128, 0), (65, 64, 63, 17), (512, 0, 3, 7), (0, 9, 0, 0))
    replay(runtime, wanted, rng, list(zip(lengths, queries, strict=True)))


def replay(
    runtime: Runtime,
    wanted: MlaCase,
    rng: np.random.Generator,
    steps: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """Capture one launch, then give it other content step by step."""
    with mla_on_device(runtime, wanted, rng, content(wanted, rng, *steps[0])) as device:
        replay_over(runtime.driver, device, (content(wanted, rng, *step) for step in steps))


def content(wanted: MlaCase, rng: np.random.Generator, lengths: tuple[int, ...], q_lens: tuple[int, ...]) -> MlaHost:
    """Requests of any lengths within the case's bounds, in a pool that holds the longest of each."""
    requests = [mla_request(wanted, rng, *lens) for lens in zip(lengths, q_lens, strict=True)]
    pages = wanted.batch * -(-wanted.max_seq_len // wanted.page_size)
    return assemble_mla(wanted, requests, rng, mla_sinks(wanted, rng), pages)
