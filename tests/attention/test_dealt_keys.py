"""Decodes whose keys are divided over ranks: what the kernels are told, what is refused, the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, mla_decode, paged_decode, plan_paged_decode
from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.launch.structs import StructLayout
from cubin_runtime.testing import StandIn
from tests.attention.append_reference import merge_states_reference
from tests.attention.attention_examples import H200, Tensors
from tests.attention.latent_examples import PARAMS, latent_call, view

GLOBAL = view("int32", 4, pointer=0x7F0000006000)
RANK = {"cp_world": 4, "cp_rank": 3, "cp_interleave": 16}
DRAFTS = Tensors().draft(3, global_seq_lens=GLOBAL)
OFF = ({"global_seq_lens": 0, "cp_begin": 0, "cp_interleave": 1}, 1)
ON = ({"global_seq_lens": GLOBAL.pointer, "cp_begin": 48, "cp_interleave": 16}, 64)


def told(standin: StandIn, layout: StructLayout) -> tuple[Mapping[str, Any], int]:
    """What the last launch was told of the keys' ranks, and the keys of a round."""
    seen = layout.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))
    return {name: seen[name] for name in ("global_seq_lens", "cp_begin", "cp_interleave")}, seen["cp_round"].divisor


def decode(runtime: Runtime, tensors: Tensors, **options: Any) -> None:
    given = tensors.by_name
    caches = [given.pop(name) for name in ("q", "k_cache", "v_cache", "page_table", "seq_lens")]
    given |= {"softmax_scale": 0.5, "output_scale": 1.0}
    paged_decode(*caches, **given, **{"max_seq_len": 1024, "runtime": runtime, **options})


def window_of(runtime: Runtime, tensors: Tensors, **options: Any) -> object:
    asked = {"max_seq_len": 256, "window_left": 900, "runtime": runtime, "device_facts": H200, **options}
    return plan_paged_decode(*tensors.positional, **tensors.named, **asked).launch_plans()[0].values["window_left"]


def test_a_decode_tells_which_keys_its_rank_has(runtime: Runtime, standin: StandIn) -> None:
    decode(runtime, DRAFTS, **RANK)
    assert told(standin, PAGED_DECODE_TMA) == ON


def test_a_latent_decode_tells_it_too(stub_runtime: Runtime, standin: StandIn) -> None:
    more = {"max_seq_len": 1000, "softmax_scale": 0.5, "runtime": stub_runtime}
    mla_decode(**latent_call(4, 3, global_seq_lens=GLOBAL), **RANK, **more)
    assert told(standin, PARAMS) == ON


def test_a_rank_with_all_keys_tells_nothing(runtime: Runtime, standin: StandIn) -> None:
    decode(runtime, Tensors())
    assert told(standin, PAGED_DECODE_TMA) == OFF


def test_ranks_have_plans_of_their_own(runtime: Runtime, standin: StandIn) -> None:
    for rank in (0, 3, 0):
        decode(runtime, DRAFTS, **{**RANK, "cp_rank": rank})
        assert told(standin, PAGED_DECODE_TMA)[0]["cp_begin"] == 16 * rank


def test_a_window_wider_than_the_keys_of_one_rank_stays(runtime: Runtime) -> None:
    assert window_of(runtime, DRAFTS, **RANK) == 900
    assert window_of(runtime, Tensors().draft(3)) == 256
    assert window_of(runtime, DRAFTS, **RANK, window_left=5_000) == (256 + 16) * 4


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (Tensors(), RANK, "cp_world=4, cp_rank=3, cp_interleave=16: expected 1, 0 and 1 without global_seq_lens"),
        (DRAFTS, {}, "cp_world=1: expected 2 or more with global_seq_lens"),
        (DRAFTS, {"cp_world": 2, "cp_rank": 2}, "cp_rank=2: expected 0 to 1, below cp_world"),
        (DRAFTS, {"cp_world": 2, "cp_rank": -1}, "cp_rank=-1: expected 0 to 1"),
        (DRAFTS, {"cp_world": 2, "cp_interleave": 0}, "cp_interleave=0: expected 1 or more"),
        (DRAFTS, {"cp_world": 2, "cp_interleave": 1 << 29}, "expected at most 1073741824 keys on all ranks"),
        (DRAFTS, {"cp_world": 2.5}, "cp_world=2.5: expected an integer"),
        (replace(DRAFTS, mask=view("uint16", 4, 3, 2)), RANK, "mask: given with global_seq_lens"),
        (replace(DRAFTS, sinks=view("float32", 64)), RANK, "sinks: given with global_seq_lens"),
        (replace(DRAFTS, global_seq_lens=view("int32", 5)), RANK, r"global_seq_lens: shape \(5,\), expected \(4,\)"),
        (replace(DRAFTS, global_seq_lens=view("float32", 4)), RANK, "global_seq_lens: dtype float32"),
    ],
)
def test_ranks_of_no_sense_are_refused(
    runtime: Runtime, tensors: Tensors, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        decode(runtime, tensors, **options)


@pytest.mark.parametrize("window", [-1, 3, 40])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4), (8, 16)])
def test_references_of_all_ranks_merge_to_that_of_one(window: int, world: int, interleave: int) -> None:
    rng = np.random.default_rng(3)
    lens, q_len, heads, dim = (0, 5, 2, 90), 4, 4, 8
    q = rng.normal(size=(len(lens) * q_len, heads, dim))
    k, v = rng.normal(size=(2, len(lens), 96, 2, dim))
    table, options = np.arange(len(lens))[:, None], {"window_left": window}
    out, lse = paged_decode_reference(q, k, v, table, lens, 0.3, **options)
    parts = []
    for rank in range(world):
        own = np.flatnonzero(np.arange(96) // interleave % world == rank)
        own_lens = [int((own < length).sum()) for length in lens]
        dealing = {"global_seq_lens": lens, "cp_world": world, "cp_rank": rank, "cp_interleave": interleave}
        parts.append(paged_decode_reference(q, k[:, own], v[:, own], table, own_lens, 0.3, **options, **dealing))
    merged = merge_states_reference(*(np.stack(part, axis=1) for part in zip(*parts, strict=True)))
    np.testing.assert_allclose(merged[0], out, atol=1e-12)
    np.testing.assert_allclose(merged[1], lse, atol=1e-12)
