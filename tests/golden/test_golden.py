"""Launches recorded from the first version of this package: every call still sends the driver the same ones, and sends
them again when it is repeated, on a fast path.

``record.py`` records them anew, where a launch is meant to change.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from cubin_runtime.testing import StandIn, build_standin
from kernels_src.variants import VARIANTS
from tests.golden.adapter import Session
from tests.golden.launches import FILE, differences, read

PARTS = 4
SHOWN = 8
FAMILIES = (
    "decode",
    "decode elsewhere",
    "decode of many rows",
    "mla",
    "xqa",
    "xqa mla",
    "published decode",
    "published mla",
    "reduced mla",
    "context",
    "ragged",
    "append",
    "merge",
    "context attention",
    "invariant context attention",
    "e4m3 context attention",
    "split context attention",
    "mla columns",
    "mla columns elsewhere",
    "mla elsewhere",
    "mla of separate values",
    "mla of separate rope",
    "xqa mla elsewhere",
    "sparse mla",
)
# What no recorded case takes: a measurement, draft masks (tests/attention/test_draft_mask.py), reductions of outputs
# that no published kernel splits, those for SM90, where no published kernel runs, and there the portable MLA kernels.
_READ_WAYS, _READ_POLICIES = ("streaming_read", "bulk_read", "row_read"), ("evict_first", "evict_unchanged")
NEVER_LAUNCHED = {
    "fmha_paged_decode_bf16_d64_rows16_sm90a",
    *(f"measure_{way}_{policy}_sm90a" for way in _READ_WAYS for policy in _READ_POLICIES),
    *(v.name for v in VARIANTS if v.source == "mla/portable_mla_decode.cu" and v.sm == "90"),
    *(f"pack_draft_mask_sm{sm}" for sm in ("80", "86", "89", "90a", "100", "120")),
    "trtllm_gen_lse_from_statistics_sm90a",
    "trtllm_gen_kv_reduction_bf16_to_bf16_sm90a",
    *(f"trtllm_gen_kv_reduction_fp16_to_{out}_sm{sm}" for out in ("fp16", "e4m3") for sm in ("90a", "100", "103")),
}


@cache
def recorded() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the cases share, and the cases."""
    shared, *cases = read()
    return shared, cases


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("golden")
    return Session(StandIn(build_standin(folder)), folder, recorded()[0]["layouts"], recorded()[0]["sizes"])


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_driver_receives_what_was_recorded(session: Session, family: str, part: int) -> None:
    found = []
    for case in [case for case in recorded()[1] if case["family"] == family][part::PARTS]:
        name = f"{family} {case['number']}"
        try:
            different = list(differences(session.run(case), case["result"]))
        except Exception as error:
            raise AssertionError(f"{name}: {_call(case)}") from error
        if different:
            found.append(f"{name}: {'; '.join(different[:3])}\n  {_call(case)}")
    assert not found, f"{len(found)} cases differ:\n" + "\n".join(found[:SHOWN])


def _call(case: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in case.items() if name != "result"})


def test_every_family_is_compared() -> None:
    assert {case["family"] for case in recorded()[1]} == set(FAMILIES)


def test_every_kernel_that_selection_takes_was_launched() -> None:
    sent = [launch for case in recorded()[1] for step in case["result"].get("sent", ()) for launch in step]
    launched = {launch["kernel"] for launch in sent}
    assert {variant.name for variant in VARIANTS} - launched == NEVER_LAUNCHED


def test_the_kernels_are_those_that_were_recorded() -> None:
    assert {variant.name for variant in VARIANTS} == set(recorded()[0]["sizes"])


def test_the_file_stays_small() -> None:
    assert FILE.stat().st_size < 1_500_000


def test_a_difference_is_named_by_launch_and_field() -> None:
    came = {"sent": [[{"kernel": "a", "values": {"k_map": {"box": [64, 64]}, "batch": 2}}]]}
    kept = {"sent": [[{"kernel": "a", "values": {"k_map": {"box": [64, 32]}, "q_len": 1}}]]}
    assert list(differences(came, kept)) == [
        "sent[0][0].values.batch: 2, recorded 0",
        "sent[0][0].values.k_map.box: [64, 64], recorded [64, 32]",
        "sent[0][0].values.q_len: 0, recorded 1",
    ]
