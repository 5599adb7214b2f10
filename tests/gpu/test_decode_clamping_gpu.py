"""Lengths, page ids and query sums outside their bounds: never followed, clamped, reported once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cubin_runtime.attention import ClampedInputError, Runtime
from tests.gpu.decode_cases import DecodeCase, make_host, reference_of
from tests.gpu.decode_compare import assert_close
from tests.gpu.decode_device import on_device
from tests.gpu.device_checks import assert_reported

pytestmark = pytest.mark.gpu

SMALL = DecodeCase((300, 17, 0, 128), 512, q_len=2)
RAGGED = DecodeCase((300, 17, 64, 128), 512, q_lens=(2, 1, 3, 2), max_q_len=4)
MODES = {"default": False, "invariant": True}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ((513, 17, 0, 128), "over max_seq_len"),
        ((2**31 - 1, 17, 0, 128), "over max_seq_len"),
        ((300, -5, 0, 128), "negative"),
        ((300, -(2**31), 0, 128), "negative"),
        ((513, -1, 0, 128), "over max_seq_len.* and a negative"),
    ],
)
def test_lengths_are_clamped_and_reported(
    runtime: Runtime, rng: np.random.Generator, lengths: tuple[int, ...], words: str, mode: str
) -> None:
    clamped = tuple(min(max(n, 0), SMALL.max_seq_len) for n in lengths)
    wanted = replace(SMALL, lengths=clamped, batch_invariant=MODES[mode])
    with on_device(runtime, wanted, rng) as case:
        case.driver.copy_to_device(case.tensors[4].pointer, np.asarray(lengths, dtype=np.int32))
        assert_reported(case, words)
        case.assert_right()


def test_unsigned_lengths_past_int32_are_reported(runtime: Runtime, rng: np.random.Generator) -> None:
    wanted = replace(SMALL, unsigned=True)
    with on_device(runtime, wanted, rng) as case:
        case.driver.copy_to_device(case.tensors[4].pointer, np.array([300, 2**32 - 5, 0, 128], dtype=np.uint32))
        assert_reported(case, "negative|over max_seq_len")


def test_a_step_s_own_bound_clamps(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, SMALL, rng) as case:
        workspace = case.dirty_workspace()
        case.run(workspace=workspace, max_seq_len=299)
        with pytest.raises(ClampedInputError, match="over max_seq_len"):
            case.plan.check(workspace)
        case.run(workspace=workspace, max_seq_len=300)
        case.plan.check(workspace)
        case.assert_right()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("page", [1 << 30, -7, -1, 2**31 - 1, -(2**31), "past the last"])
def test_page_ids_outside_the_pool_are_never_followed(
    runtime: Runtime, rng: np.random.Generator, page: int | str, mode: str
) -> None:
    wanted = replace(SMALL, batch_invariant=MODES[mode])
    with on_device(runtime, wanted, rng) as case:
        table = case.host.page_table.copy()
        table[0, 1] = table[1, 0] = len(case.host.k) if isinstance(page, str) else page
        case.driver.copy_to_device(case.tensors[3].pointer, table)
        assert_reported(case, "page id")
        # The other requests are what they are.
        out, lse = case.result()
        want, want_lse = case.expected
        assert_close(wanted, (out[4:], lse[4:]), (want[4:], want_lse[4:]))


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "sums",
    [
        (0, 2, 1, 6, 8),  # decreasing
        (0, 5, 5, 6, 8),  # more than the bound
        (-3, 2, 3, 6, 8),  # before the first token
        (0, 2, 3, 6, 9),  # past the last token
        (0, 2, 3, 6, 2**31 - 1),
        (0, 2, 3, -(2**31), 8),
        (7, 100, 200, 300, 400),
    ],
)
def test_query_sums_are_clamped_and_reported(
    runtime: Runtime, rng: np.random.Generator, sums: tuple[int, ...], mode: str
) -> None:
    wanted = replace(RAGGED, batch_invariant=MODES[mode])
    with on_device(runtime, wanted, rng) as case:
        cu = case.options["q_cu_seq_lens"].pointer
        case.driver.copy_to_device(cu, np.asarray(sums, dtype=np.int32))
        assert_reported(case, "q_cu_seq_lens|quer")
        # What was wrong leaves no trace.
        case.driver.copy_to_device(cu, case.host.q_cu_seq_lens)
        case.poison()
        case.run()
        case.plan.check(case.plan.prepare(0))
        case.assert_right()


def test_good_input_is_not_reported(runtime: Runtime, rng: np.random.Generator) -> None:
    for wanted in (SMALL, RAGGED, replace(RAGGED, window_left=20, page_size=16)):
        host = make_host(wanted, rng)
        with on_device(runtime, wanted, rng, host) as case:
            workspace = case.dirty_workspace()
            case.run(workspace=workspace)
            case.plan.check(workspace)
            assert_close(wanted, case.result(), reference_of(wanted, host))
