"""What batch_invariant promises of either decode: a request's bits in every batch. Test modules import the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.decode_compare import assert_close
from tests.gpu.decode_device import DeviceCase
from tests.gpu.seeds import SEED

Bits = tuple[bytes, bytes]
MOST_REFERENCED = 7
NEIGHBOUR_LENGTHS = (0, 1, 65, 300, 2500)


class InvarianceTarget:
    """A request, its bits when it runs alone, and neighbours of other lengths; subclasses say of which decode.

    ``targets`` are cases of one request each, by name; the functions make a request, its sinks, a batch's tensors, and
    those on the device.
    """

    targets: ClassVar[Mapping[str, Any]]
    request_of: ClassVar[Callable[..., Any]]
    sinks_of: ClassVar[Callable[..., Any]]
    assembled: ClassVar[Callable[..., Any]]
    on_device: ClassVar[Callable[..., Any]]

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime = runtime
        self.rng = np.random.default_rng((SEED, list(self.targets).index(name)))
        self.case = replace(self.targets[name], batch_invariant=True)
        self.request = self.request_of(self.case, self.rng, self.case.lengths[0], self.case.q_len)
        self.sinks = self.sinks_of(self.case, self.rng)
        self.neighbours = [self.request_of(self.case, self.rng, n, self.case.q_len) for n in NEIGHBOUR_LENGTHS]
        self.alone = self.bits(self.case, [self.request])[0]

    def score_error(self, case: Any) -> float:
        """What scores may be off by beyond rounding."""
        return 0.0

    def bits(self, case: Any, requests: Sequence[Any], **how: bool) -> list[Bits]:
        """Output and LSE of each place where the target stands among ``requests``."""
        lengths = tuple(request.kv_len for request in requests)
        case = replace(case, lengths=lengths, max_seq_len=max(case.max_seq_len, *lengths))
        if case.q_lens is not None:
            case = replace(case, q_lens=tuple(len(request.q) for request in requests))
        host = self.assembled(case, requests, self.rng, self.sinks)
        with self.on_device(self.runtime, case, self.rng, host) as device:
            run_as(device, **how)
            out, lse = device.result()
            if len(requests) <= MOST_REFERENCED:
                assert_close(case, (out, lse), device.expected, self.score_error(case))
        begins = np.cumsum([0, *(len(request.q) for request in requests)])
        places = [begins[i] for i, request in enumerate(requests) if request is self.request]
        tokens = [slice(at, at + len(self.request.q)) for at in places]
        return [(out[rows].tobytes(), lse[rows].tobytes()) for rows in tokens]

    def mixed(self, batch: int, parity: int) -> list[Any]:
        """The target at every second place of a batch, neighbours in between."""
        drawn = self.rng.integers(0, len(self.neighbours), size=batch)
        return [self.request if i % 2 == parity else self.neighbours[n] for i, n in enumerate(drawn)]

    def assert_same(self, case: Any, requests: Sequence[Any], **how: bool) -> None:
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


@pytest.mark.parametrize("batch", [2, 3, 7, 32, 128])
def test_every_position_of_a_batch_gives_the_same_bits(target: InvarianceTarget, batch: int) -> None:
    for parity in (0, 1):
        target.assert_same(target.case, target.mixed(batch, parity))


def test_bounds_tables_and_pages_do_not_matter(target: InvarianceTarget) -> None:
    for bound, columns, spare in ((0, 0, 0), (70, 3, 17), (9000, 100, 40)):
        wider = replace(
            target.case, max_seq_len=target.case.max_seq_len + bound, spare_columns=columns, spare_pages=spare
        )
        target.assert_same(wider, [target.request])
        target.assert_same(wider, target.mixed(7, 1))


def test_ragged_queries_and_their_bound_do_not_matter(target: InvarianceTarget) -> None:
    others = [target.request_of(target.case, target.rng, 200, q_len) for q_len in (0, 1, 7, 16)]
    for bound in (max(16, target.case.q_len), target.case.q_len):
        fitting = [other for other in others if len(other.q) <= bound]
        ragged = replace(target.case, q_lens=(), max_q_len=bound, spare_tokens=3)
        target.assert_same(ragged, [target.request])
        target.assert_same(ragged, [*fitting, target.request, *fitting, target.request])


def test_streams_graphs_and_pdl_do_not_matter(target: InvarianceTarget) -> None:
    batch = target.mixed(7, 0)
    target.assert_same(target.case, batch, stream=True)
    target.assert_same(target.case, batch, graph=True)
    target.assert_same(replace(target.case, pdl=True), batch)
    target.assert_same(replace(target.case, pdl=True), batch, graph=True)
