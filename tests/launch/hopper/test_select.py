from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from examples import H100, device

from cubin_runtime.artifacts.own_kernels import BUILT_NOT_RUN, MEASURED, OwnKernel
from cubin_runtime.errors import UsageError
from cubin_runtime.launch.hopper.select import DecodeShape, select_decode

SHAPE = DecodeShape("bf16", 128, group=8, kv_heads=8, batch=64, max_seq_len=8192)


def kernel(sm: str, rows: int = 8, **changes: Any) -> OwnKernel:
    made = OwnKernel(
        name=f"decode_rows{rows}_sm{sm}",
        symbol=f"decode_rows{rows}",
        file=f"fmha/decode_rows{rows}_sm{sm}.cubin",
        sm=sm,
        family="fmha",
        operation="paged_decode",
        traits={"dtype": "bf16", "head_dim": 128, "rows": rows, "tile_tokens": 64, "ctas_per_multiprocessor": 2},
        struct="PagedDecodeTmaParams",
        struct_bytes=448,
        struct_fingerprint="0" * 64,
        threads=160,
        dynamic_shared_bytes=103424,
        static_shared_bytes=0,
        registers=128,
        spill_bytes=0,
        flags=(),
        sources_sha256="0" * 64,
        status=MEASURED if sm == "90a" else BUILT_NOT_RUN,
    )
    return replace(made, **changes)


ALL = tuple(kernel(sm, rows) for sm in ("80", "86", "89", "90a", "100", "120") for rows in (16, 8))


@pytest.mark.parametrize(
    ("capability", "sm"),
    [
        ((8, 0), "80"),
        ((8, 6), "86"),
        ((8, 7), "86"),
        ((8, 9), "89"),
        ((9, 0), "90a"),
        ((10, 3), "100"),
        ((12, 1), "120"),
    ],
)
def test_the_closest_target_that_runs_is_chosen(capability: tuple[int, int], sm: str) -> None:
    assert select_decode(ALL, SHAPE, device(*capability)).kernel.sm == sm


@pytest.mark.parametrize(("group", "rows"), [(1, 8), (8, 8), (9, 16), (16, 16)])
def test_the_least_padding_is_chosen(group: int, rows: int) -> None:
    assert select_decode(ALL, replace(SHAPE, group=group), H100).kernel.traits["rows"] == rows


def test_the_order_of_the_list_does_not_matter() -> None:
    assert select_decode(ALL, SHAPE, H100).kernel == select_decode(ALL[::-1], SHAPE, H100).kernel


def test_a_large_problem_gets_two_ctas_a_multiprocessor() -> None:
    assert select_decode(ALL, SHAPE, H100).ctas == 264


def test_a_problem_of_medium_size_gets_one() -> None:
    assert select_decode(ALL, replace(SHAPE, batch=8, max_seq_len=4096), H100).ctas == 128


@pytest.mark.parametrize(
    ("kv_heads", "together"), [(1, 1), (2, 2), (3, 3), (5, 5), (7, 7), (8, 8), (12, 6), (16, 8), (11, 1)]
)
def test_heads_are_read_side_by_side_in_divisors_up_to_eight(kv_heads: int, together: int) -> None:
    chosen = select_decode(ALL, replace(SHAPE, kv_heads=kv_heads), H100)
    assert (chosen.heads_together, chosen.ctas % together) == (together, 0)


def test_heads_are_not_read_side_by_side_where_too_many_ctas_would_idle() -> None:
    few = replace(SHAPE, kv_heads=7, batch=1, max_seq_len=64 * 40)
    small = replace(H100, multiprocessors=13)
    assert select_decode(ALL, few, small).heads_together == 1


def test_a_small_problem_gets_one_cta_a_tile() -> None:
    assert select_decode(ALL, replace(SHAPE, batch=1, max_seq_len=65), H100).ctas == 16


def test_a_bound_of_zero_still_gets_the_ctas_that_write_the_outputs() -> None:
    assert select_decode(ALL, replace(SHAPE, batch=2, max_seq_len=0), H100).ctas == 16


def test_shared_memory_limits_the_ctas_of_a_multiprocessor() -> None:
    large = tuple(replace(k, dynamic_shared_bytes=200 << 10) for k in ALL)
    assert select_decode(large, SHAPE, H100).ctas == 128


def test_a_kernel_that_was_not_run_says_so() -> None:
    assert "built, not run" in select_decode(ALL, SHAPE, device(8, 0)).reason


def test_every_candidate_is_told_with_a_word() -> None:
    words = dict(select_decode(ALL, replace(SHAPE, group=9), H100).candidates)
    assert words["decode_rows8_sm90a"] == "fits, pads 9 rows to 8"
    assert words["decode_rows16_sm90a"] == "fits, pads 9 rows to 16"
    assert words["decode_rows8_sm80"] == "built for sm_80"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"dtype": "fp16"}, "dtype is bf16"), ({"head_dim": 64}, "head_dim is 128")],
)
def test_what_no_kernel_does_is_refused_with_what_they_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        select_decode(ALL, replace(SHAPE, **changes), H100)


def test_kernels_of_another_operation_are_not_looked_at() -> None:
    with pytest.raises(UsageError, match="the release has no decode kernel"):
        select_decode((kernel("90a", operation="prefill"),), SHAPE, H100)
