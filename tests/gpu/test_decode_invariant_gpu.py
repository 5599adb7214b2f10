"""batch_invariant: the bits of a request depend on its own content and options, on nothing around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from decode_cases import DecodeCase, Request, assemble, make_request, make_sinks
from decode_compare import assert_close
from decode_device import DeviceCase, decode_kernels, on_device
from seeds import SEED

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import Runtime

pytestmark = pytest.mark.gpu

Bits = tuple[bytes, bytes]
# One request each: its keys, its query tokens, and the options of all.
TARGETS = {
    "bf16": DecodeCase((1000,), 1000),
    "bf16 long": DecodeCase((4000,), 4000, kv_heads=1),
    "bf16 tree, window, sinks": DecodeCase((3000,), 3000, q_len=4, mask="tree", window_left=700, sinks=True),
    "bf16 512 rows": DecodeCase((500,), 500, kv_heads=1, group=32, q_len=16, head_dim=32),
    "bf16 head 256": DecodeCase((700,), 700, group=6, q_len=2, head_dim=256, mask="any"),
    "bf16 head 512": DecodeCase((300,), 300, group=4, q_len=3, head_dim=512, mask="tree"),
    "fp16": DecodeCase((129,), 129, group=5, head_dim=64, kv_dtype="fp16", page_size=16),
    "fp16 many heads": DecodeCase((640,), 640, kv_heads=8, group=12, q_len=2, kv_dtype="fp16", sinks=True),
    "e4m3 and bf16": DecodeCase((2049,), 2049, kv_dtype="e4m3", q_dtype="bf16"),
    "e4m3 and fp16": DecodeCase((640,), 640, kv_heads=1, group=16, head_dim=512, kv_dtype="e4m3", q_dtype="fp16"),
    "e4m3 and e4m3": DecodeCase((1500,), 1500, q_len=8, head_dim=64, kv_dtype="e4m3", mask="tree", out_dtype="fp16"),
    "one key": DecodeCase((1,), 1),
    "fewer keys than queries": DecodeCase((3,), 3, q_len=5, mask="any", sinks=True),
    "no key": DecodeCase((0,), 64, q_len=2),
}
MOST_REFERENCED = 7
NEIGHBOUR_LENGTHS = (0, 1, 65, 300, 2500)


class Target:
    """A request, its bits when it runs alone, and neighbours of other lengths."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime = runtime
        self.rng = np.random.default_rng((SEED, list(TARGETS).index(name)))
        self.case = replace(TARGETS[name], batch_invariant=True)
        self.request = make_request(self.case, self.rng, self.case.lengths[0], self.case.q_len)
        self.sinks = make_sinks(self.case, self.rng)
        self.neighbours = [make_request(self.case, self.rng, n, self.case.q_len) for n in NEIGHBOUR_LENGTHS]
        self.alone = self.bits(self.case, [self.request])[0]

    def bits(self, case: DecodeCase, requests: Sequence[Request], **how: bool) -> list[Bits]:
        """Output and LSE of each place where the target stands among ``requests``."""
        lengths = tuple(len(request.k) for request in requests)
        bound = max(case.max_seq_len, *lengths)
        case = replace(case, lengths=lengths, max_seq_len=bound)
        if case.q_lens is not None:
            case = replace(case, q_lens=tuple(len(request.q) for request in requests))
        host = assemble(case, requests, self.rng, self.sinks)
        with on_device(self.runtime, case, self.rng, host) as device:
            run_as(device, **how)
            out, lse = device.result()
            if len(requests) <= MOST_REFERENCED:
                assert_close(case, (out, lse), device.expected)
        begins = np.cumsum([0, *(len(request.q) for request in requests)])
        places = [begins[i] for i, request in enumerate(requests) if request is self.request]
        tokens = [slice(at, at + len(self.request.q)) for at in places]
        return [(out[rows].tobytes(), lse[rows].tobytes()) for rows in tokens]

    def kernels(self) -> list[NativeKernel]:
        """Those of the device for this dtype and head_dim."""
        return decode_kernels(self.runtime, self.case)

    def arithmetic(self, case: DecodeCase | None = None) -> object:
        """What the launch that takes the request computes with."""
        case = case or self.case
        host = assemble(case, [self.request], self.rng, self.sinks)
        rows = len(self.request.q) * case.group
        with on_device(self.runtime, case, self.rng, host) as device:
            (taking,) = (s for s in device.plan.selections if s.min_rows <= rows <= s.max_rows)
        return taking.kernel.traits["arithmetic"]

    def mixed(self, batch: int, parity: int) -> list[Request]:
        """The target at every second place of a batch, neighbours in between."""
        drawn = self.rng.integers(0, len(self.neighbours), size=batch)
        return [self.request if i % 2 == parity else self.neighbours[n] for i, n in enumerate(drawn)]

    def assert_same(self, case: DecodeCase, requests: Sequence[Request], **how: bool) -> None:
        got = self.bits(case, requests, **how)
        assert got, "the target is not in the batch"
        assert all(bits == self.alone for bits in got), f"{sum(b != self.alone for b in got)} of {len(got)} differ"


def run_as(device: DeviceCase, stream: bool = False, graph: bool = False) -> None:
    """One launch on the default stream, on a new one, or from a graph."""
    driver = device.driver
    handle = driver.create_stream(blocking=True) if stream or graph else 0
    workspace = device.dirty_workspace()
    device.plan.preload()
    if graph:
        driver.begin_capture(handle)
        device.run(handle, workspace)
        executable = driver.instantiate(driver.end_capture(handle))
        driver.launch_graph(executable, handle)
        driver.synchronize(handle)
        driver.destroy_executable(executable)
    else:
        device.run(handle, workspace)
    driver.synchronize(handle)
    if handle:
        driver.destroy_stream(handle)


@pytest.fixture(params=list(TARGETS))
def target(runtime: Runtime, request: pytest.FixtureRequest) -> Target:
    print(f"seed {SEED}")
    return Target(runtime, request.param)


@pytest.mark.parametrize("batch", [2, 3, 7, 32, 128])
def test_every_position_of_a_batch_gives_the_same_bits(target: Target, batch: int) -> None:
    for parity in (0, 1):
        target.assert_same(target.case, target.mixed(batch, parity))


def test_bounds_tables_and_pages_do_not_matter(target: Target) -> None:
    for bound, columns, spare in ((0, 0, 0), (70, 3, 17), (9000, 100, 40)):
        wider = replace(
            target.case, max_seq_len=target.case.max_seq_len + bound, spare_columns=columns, spare_pages=spare
        )
        target.assert_same(wider, [target.request])
        target.assert_same(wider, target.mixed(7, 1))


def test_ragged_queries_and_their_bound_do_not_matter(target: Target) -> None:
    others = [make_request(target.case, target.rng, 200, q_len) for q_len in (0, 1, 7, 16)]
    for bound in (max(16, target.case.q_len), target.case.q_len):
        fitting = [other for other in others if len(other.q) <= bound]
        ragged = replace(target.case, q_lens=(), max_q_len=bound, spare_tokens=3)
        target.assert_same(ragged, [target.request])
        target.assert_same(ragged, [*fitting, target.request, *fitting, target.request])


def test_streams_graphs_and_pdl_do_not_matter(target: Target) -> None:
    batch = target.mixed(7, 0)
    target.assert_same(target.case, batch, stream=True)
    target.assert_same(target.case, batch, graph=True)
    target.assert_same(replace(target.case, pdl=True), batch)
    target.assert_same(replace(target.case, pdl=True), batch, graph=True)


def test_two_launches_do_not_matter_to_streams_graphs_and_pdl(target: Target) -> None:
    others = [make_request(target.case, target.rng, n, q_len) for n, q_len in ((200, 1), (900, 16), (90, 16), (70, 0))]
    ragged = replace(target.case, q_lens=(), max_q_len=16)
    batch = [*others, target.request, *others]
    target.assert_same(ragged, batch, stream=True)
    target.assert_same(ragged, batch, graph=True)
    target.assert_same(replace(ragged, pdl=True), batch)
    target.assert_same(replace(ragged, pdl=True), batch, graph=True)


def test_every_kernel_that_may_be_chosen_gives_the_same_bits(target: Target) -> None:
    """A request's own rows choose the arithmetic; the bounds may choose any kernel that has it."""
    alike = [kernel for kernel in target.kernels() if kernel.traits["arithmetic"] == target.arithmetic()]
    assert alike, "no kernel has the arithmetic that was chosen"
    for kernel in alike:
        asked = replace(target.case, rows=int(kernel.traits["rows"]))
        target.assert_same(asked, [target.request])
        target.assert_same(asked, target.mixed(32, 0))


def test_a_request_has_one_arithmetic_in_every_batch(target: Target) -> None:
    wide = replace(target.case, q_lens=(target.case.q_len,), max_q_len=16, max_seq_len=1 << 17)
    assert target.arithmetic(wide) == target.arithmetic()


def test_without_it_the_batch_can_be_seen(runtime: Runtime) -> None:
    """The comparison above can fail: the default splits a request by what else is in the batch."""
    seen = 0
    for name in ("bf16 long", "fp16 many heads", "e4m3 and bf16"):
        target = Target(runtime, name)
        default = replace(target.case, batch_invariant=False)
        crowded = target.bits(default, target.mixed(128, 0))
        seen += any(bits != target.bits(default, [target.request])[0] for bits in crowded)
    assert seen
