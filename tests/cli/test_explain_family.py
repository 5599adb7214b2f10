"""A family that the command line has never heard of is explained by what its selection says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime import cli
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import explain
from cubin_runtime.attention.call_sizes import CallSizes, Explained
from cubin_runtime.kernels.explanation import Facts
from cubin_runtime.kernels.native.selection import Candidate, Selection
from cubin_runtime.launch.driver import DeviceFacts
from cubin_runtime.values import dataclass
from tests.cli.native_release import explain_arguments, record, run
from tests.kernels.decode_kernels import HOPPER, PORTABLE

CHOSEN, REJECTED = HOPPER[:2]


@dataclass(frozen=True, slots=True)
class PrefillShape:
    q_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSelection(Selection):
    waves: int

    def facts(self, shape: PrefillShape) -> Facts:
        return (("rows", f"{shape.q_len} in {self.row_tiles} tiles"),)


def select_prefill(kernels: Sequence[NativeKernel], shape: Any, device: DeviceFacts) -> Sequence[Selection]:
    candidates = (
        Candidate(kernel=REJECTED, unfit="too narrow"),
        Candidate(kernel=CHOSEN),
        Candidate(kernel=PORTABLE[0], unfit="built for elsewhere"),
    )
    return (
        PrefillSelection(
            kernel=CHOSEN, ctas=5, row_tiles=3, splits=0, explain=lambda: ("because", candidates), waves=2
        ),
    )


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def shape(sizes: CallSizes) -> PrefillShape:
        return PrefillShape(sizes.q_len)

    toy = Explained("paged_prefill", "context", lambda sizes: True, shape, select_prefill)
    others = explain.explained()
    monkeypatch.setattr(explain, "explained", lambda: (toy, *others))
    return [*explain_arguments(tmp_path, (*HOPPER, *PORTABLE)), "--backend", "native", "--op", "context"]


def test_its_facts_and_candidates_are_told(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(capsys, *arguments, "--q-len", 300, "--candidates").splitlines() == [
        f"kernel  {CHOSEN.name}",
        "why     because",
        f"grid    5 CTAs of {CHOSEN.threads} threads, {CHOSEN.dynamic_shared_bytes} bytes shared memory",
        "rows    300 in 3 tiles",
        "L2      no hint",
        "device  H200, 132 multiprocessors",
        "",
        f"other SMs  1 more context kernels for {PORTABLE[0].architecture}",
        "",
        "L2  no hint: no other policy was measured for this kernel",
        "",
        "kernel\twhy not",
        f"{CHOSEN.name}\t",
        f"{REJECTED.name}\ttoo narrow",
    ]


def test_its_fields_are_in_the_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    told = record(capsys, *arguments, "--q-len", 300)
    (launch,) = told["launches"]
    assert (told["operator"], told["shape"]) == ("paged_prefill", {"q_len": 300})
    assert (launch["grid"], launch["waves"], launch["file"]) == ([5, 1, 1], 2, CHOSEN.file)
    assert launch["candidates"] == [
        {"kernel": CHOSEN.name, "traits": dict(CHOSEN.traits), "fits": True},
        {"kernel": REJECTED.name, "traits": dict(REJECTED.traits), "fits": False, "why_not": "too narrow"},
    ]


def test_an_operation_that_no_family_has_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert cli.main([*arguments, "--op", "ragged"]) == 2
    assert (
        "--op 'ragged': the native backend has append, context, decode, draft_mask, merge, mla, sparse_mla"
        in capsys.readouterr().err
    )
