"""``explain`` of appends, merges and the packing of draft masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime import cli
from tests.cli.native_release import explain_arguments, record, run
from tests.kernels.copying_kernels import KERNELS
from tests.kernels.decode_kernels import HOPPER


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [*explain_arguments(tmp_path, (*HOPPER, *KERNELS)), "--backend", "native"]


def test_an_append_tells_its_tokens_and_what_it_converts(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    out = run(capsys, *arguments, "--op", "append", "--batch", 64, "--q-len", 512, "--dtype-kv", "e4m3", "--candidates")
    assert "kernel      append_kv_bf16_to_e4m3_sm90a\n" in out
    assert "tokens      32768, about 42 of a CTA\nconversion  bf16 to e4m3\n" in out
    assert "append_kv_copy_sm90a\tquantise is none\n" in out


def test_a_merge_tells_its_rows_and_lanes(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = record(capsys, *arguments, "--op", "merge", "--batch", 7, "--heads-q", 32, "--head-dim", 192)
    (launch,) = found["launches"]
    assert (found["operator"], launch["kernel"], launch["grid"]) == (
        "merge_states",
        "merge_states_bf16_sm90a",
        [7, 1, 1],
    )


def test_a_draft_mask_tells_its_requests(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = record(capsys, *arguments, "--op", "draft_mask", "--batch", 7, "--q-len", 33)
    (launch,) = found["launches"]
    assert (found["operator"], launch["kernel"], launch["grid"]) == ("draft_mask", "pack_draft_mask_sm90a", [7, 1, 1])
    assert launch["reason"] == "a CTA for each request"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            ["--op", "append", "--dtype-q", "bf16", "--dtype-kv", "fp16"],
            "--dtype-q 'bf16': expected fp16 with --dtype-kv fp16",
        ),
        (["--op", "append", "--batch", "0"], "--batch 0: expected 1 to"),
        (["--op", "draft_mask", "--q-len", "65"], "--q-len 65: expected 1 to 64"),
        (["--op", "draft_mask", "--batch", "0"], "--batch 0: expected 1 to"),
        (["--op", "merge", "--head-dim", "12"], "--head-dim 12: expected a multiple of 8"),
    ],
)
def test_sizes_outside_the_rules_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: list[str], said: str
) -> None:
    assert cli.main([*arguments, *wrong]) == 2
    assert said in capsys.readouterr().err
