"""Decodes under load, on streams and in graphs at once: the same bits, and replays that follow their tensors."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.launch.workspace import Workspace
from tests.gpu.decode_cases import DecodeCase, HostTensors, assemble, make_request, make_sinks, reference_of
from tests.gpu.decode_compare import assert_close
from tests.gpu.decode_device import DeviceCase, on_device
from tests.gpu.graph_replays import replay_over

pytestmark = pytest.mark.gpu

REPEATS = 200
LOAD = {
    "default": DecodeCase((4000, 3, 999, 64), 4096, kv_heads=8, q_len=4, mask="tree", sinks=True),
    "invariant": DecodeCase((4000, 0, 1500), 4096, kv_heads=8, batch_invariant=True, pdl=True),
    "e4m3": DecodeCase((3000, 65, 2000), 4096, kv_heads=4, kv_dtype="e4m3", q_dtype="bf16", pdl=True),
    "ragged": DecodeCase(
        (900, 2500, 70), 4096, kv_heads=2, q_lens=(3, 0, 16), head_dim=64, kv_dtype="fp16", window_left=500, mask="any"
    ),
}
UNIFORM = DecodeCase((300, 17, 0, 128), 512, q_len=3, mask="tree", sinks=True)
RAGGED = DecodeCase((300, 17, 0, 128), 512, q_lens=(3, 0, 1, 16), max_q_len=16, mask="any", sinks=True, spare_tokens=10)


class Repeated:
    """A case that runs on a stream of its own again and again, each output kept on the device."""

    def __init__(self, device: DeviceCase, graph: bool) -> None:
        self.device, self.driver = device, device.driver
        self.stream = self.driver.create_stream()
        self.workspace: Workspace = device.dirty_workspace()
        self.kept = device.arrays.empty(REPEATS * device.out_bytes)
        self.driver.synchronize(0)
        device.plan.preload()
        self.executable = self._captured() if graph else 0

    def _captured(self) -> int:
        self.driver.begin_capture(self.stream)
        self.device.poison(self.stream)
        self.device.run(self.stream, self.workspace)
        return self.driver.instantiate(self.driver.end_capture(self.stream))

    def step(self, index: int) -> None:
        if self.executable:
            self.driver.launch_graph(self.executable, self.stream)
        else:
            self.device.poison(self.stream)
            self.device.run(self.stream, self.workspace)
        size = self.device.out_bytes
        self.driver.copy_on_device_async(self.kept + index * size, self.device.out_buffer.pointer, size, self.stream)

    def assert_one_answer(self) -> None:
        self.driver.synchronize(self.stream)
        self.device.assert_right()
        self.device.assert_zeroed(self.workspace)
        size = self.device.out_bytes
        outputs = np.empty((REPEATS, size), dtype=np.uint8)
        self.driver.copy_to_host(outputs, self.kept)
        differ = (outputs != outputs[0]).any(axis=1)
        assert not differ.any(), f"repeats {np.flatnonzero(differ)[:10]} of {REPEATS} differ from the first"


def test_200_repeats_under_load_on_streams_and_in_graphs_give_the_same_bits(
    runtime: Runtime, rng: np.random.Generator
) -> None:
    with ExitStack() as stack:
        devices = [stack.enter_context(on_device(runtime, case, rng)) for case in LOAD.values()]
        # Two eager streams and two graphs at once, then the other way round.
        for graphs in ((False, False, True, True), (True, True, False, False)):
            running = [Repeated(device, graph) for device, graph in zip(devices, graphs, strict=True)]
            for index in range(REPEATS):
                for one in running:
                    one.step(index)
            for one in running:
                one.assert_one_answer()


@pytest.mark.parametrize("name", list(LOAD))
def test_200_repeats_alone_give_the_same_bits(runtime: Runtime, rng: np.random.Generator, name: str) -> None:
    with on_device(runtime, LOAD[name], rng) as device:
        repeated = Repeated(device, graph=False)
        for index in range(REPEATS):
            repeated.step(index)
        repeated.assert_one_answer()


def test_a_chain_of_dependent_launches_with_pdl_is_right(runtime: Runtime, rng: np.random.Generator) -> None:
    # Each launch overwrites what the one before it wrote, and uses its counters.
    with on_device(runtime, LOAD["invariant"], rng) as case:
        workspace = case.dirty_workspace()
        for _ in range(50):
            case.run(workspace=workspace)
        case.assert_right()
        case.assert_zeroed(workspace)


def test_pdl_waits_for_the_tensors_that_come_before_it(runtime: Runtime, rng: np.random.Generator) -> None:
    """One case's output is the next one's queries: they must not be read before they are written."""
    wanted = DecodeCase((3000, 700), 3000, kv_heads=4, group=4, pdl=True)
    with on_device(runtime, wanted, rng) as first, on_device(runtime, wanted, rng) as second:
        first.run()
        out, _ = first.result()
        expected = reference_of(wanted, replace(second.host, q=out))
        tensors = (replace(second.tensors[0], pointer=first.tensors[5].pointer), *second.tensors[1:])
        workspaces = first.dirty_workspace(), second.dirty_workspace()
        for _ in range(20):
            first.poison()
            first.run(workspace=workspaces[0])
            second.plan.run(*tensors, workspace=workspaces[1], **second.options)
            assert_close(wanted, second.result(), expected)


CUTS = {"clusters": {"clusters": True}, "evenly": {"clusters": False}, "invariant": {"batch_invariant": True}}
STEPS = {
    "other lengths": ((300, 17, 0, 128), (1, 300, 128, 0), (65, 64, 63, 17)),
    "zero lengths": ((300, 17, 0, 128), (0, 0, 0, 0), (0, 512, 0, 1)),
    "the longest": ((512, 512, 512, 512), (1, 1, 1, 1), (511, 2, 300, 64)),
}


@pytest.mark.parametrize("cut", list(CUTS))
@pytest.mark.parametrize("steps", list(STEPS))
def test_replays_follow_lengths_tables_and_masks(
    runtime: Runtime, rng: np.random.Generator, steps: str, cut: str
) -> None:
    wanted = replace(UNIFORM, **CUTS[cut])
    replay(runtime, wanted, rng, [(lengths, wanted.query_lens) for lengths in STEPS[steps]])


@pytest.mark.parametrize("cut", list(CUTS))
def test_replays_follow_query_lengths(runtime: Runtime, rng: np.random.Generator, cut: str) -> None:
    wanted = replace(RAGGED, **CUTS[cut])
    queries = ((3, 0, 1, 16), (0, 0, 0, 1), (16, 2, 0, 9), (7, 7, 7, 7), (0, 16, 0, 0))
    lengths = ((300, 17, 0, 128), (1, 300, 128, 0), (65, 64, 63, 17), (512, 0, 3, 7), (0, 9, 0, 0))
    replay(runtime, wanted, rng, list(zip(lengths, queries, strict=True)))


def test_replays_follow_windows_whose_pages_are_freed(runtime: Runtime, rng: np.random.Generator) -> None:
    wanted = replace(UNIFORM, window_left=40, page_size=16)
    replay(runtime, wanted, rng, [((n, n + 70, 5, n // 2), wanted.query_lens) for n in range(100, 440, 16)])


def replay(
    runtime: Runtime,
    wanted: DecodeCase,
    rng: np.random.Generator,
    steps: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """Capture one launch, then give it other content step by step."""
    with on_device(runtime, wanted, rng, content(wanted, rng, *steps[0])) as device:
        replay_over(runtime.driver, device, (content(wanted, rng, *step) for step in steps))


def content(
    wanted: DecodeCase, rng: np.random.Generator, lengths: tuple[int, ...], q_lens: tuple[int, ...]
) -> HostTensors:
    """Requests of any lengths within the case's bounds, in a pool that holds the longest of each."""
    requests = [make_request(wanted, rng, *lens) for lens in zip(lengths, q_lens, strict=True)]
    pages = wanted.batch * -(-wanted.max_seq_len // wanted.page_size)
    return assemble(wanted, requests, rng, make_sinks(wanted, rng), pages)
