"""batch_invariant: the bits of a request depend on its own content and options, on nothing around it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import Runtime
from tests.gpu.batch_invariance import (  # noqa: F401
    InvarianceTarget,
    test_bounds_tables_and_pages_do_not_matter,
    test_every_position_of_a_batch_gives_the_same_bits,
    test_ragged_queries_and_their_bound_do_not_matter,
    test_streams_graphs_and_pdl_do_not_matter,
)
from tests.gpu.decode_cases import DecodeCase, assemble, make_request, make_sinks
from tests.gpu.decode_device import decode_kernels, on_device
from tests.gpu.seeds import SEED

pytestmark = pytest.mark.gpu

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
    "bf16 41 segments": DecodeCase((20600,), 20600, kv_heads=1, group=8),
    "fp16 33 segments": DecodeCase((16897,), 16897, group=8, q_len=2, head_dim=64, kv_dtype="fp16", sinks=True),
    "e4m3 and bf16, 20 segments": DecodeCase((10001,), 10001, kv_heads=1, q_len=3, kv_dtype="e4m3", q_dtype="bf16"),
    "e4m3 and fp16, 18 segments": DecodeCase((9216,), 9216, kv_heads=1, head_dim=64, kv_dtype="e4m3", q_dtype="fp16"),
    "one key": DecodeCase((1,), 1),
    "fewer keys than queries": DecodeCase((3,), 3, q_len=5, mask="any", sinks=True),
    "no key": DecodeCase((0,), 64, q_len=2),
}


class Target(InvarianceTarget):
    targets = TARGETS
    request_of = staticmethod(make_request)
    sinks_of = staticmethod(make_sinks)
    assembled = staticmethod(assemble)
    on_device = staticmethod(on_device)

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


@pytest.fixture(params=list(TARGETS))
def target(runtime: Runtime, request: pytest.FixtureRequest) -> Target:
    print(f"seed {SEED}")
    return Target(runtime, request.param)


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
