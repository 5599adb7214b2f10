"""``explain --family`` on a small release of made-up kernels of ours, used in place from a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime import cli
from tests.cli.native_release import explain_arguments, record, run
from tests.kernels.context_examples import KERNELS
from tests.kernels.decode_kernels import HOPPER


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return explain_arguments(tmp_path, (*HOPPER, *KERNELS))


def test_prefill_tells_its_tiles_its_order_and_its_time(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    out = run(capsys, *arguments, "--sm", 90, "--family", "prefill", "--kv-len", 8192, "--sms", 132)
    assert "\nrow tiles  at most 257 of 128 rows: 32 tokens x 4 heads\n" in out
    assert "\norder      longest request first; 8 of 8 head packs interleaved\n" in out
    assert "\nwork       about 504 key tiles for each CTA, if causal and of equal lengths\n" in out
    assert "\npredicted  887.4 us on an H200: 10.0 + 504.2 x 1.74\n" in out


def test_a_family_is_its_operation(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    sizes = ["--sm", 90, "--q-len", 512, "--kv-len", 8192]
    for family, operation in (("prefill", "context"), ("decode", "decode")):
        some = sizes if family == "prefill" else ["--sm", 90]
        assert record(capsys, *arguments, *some, "--family", family) == record(
            capsys, *arguments, *some, "--op", operation
        )


def test_a_soft_cap_has_a_kernel_of_its_own(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    (launch,) = record(capsys, *arguments, "--sm", 90, "--family", "prefill", "--soft-cap")["launches"]
    chosen = next(c for c in launch["candidates"] if c["kernel"] == launch["kernel"])
    assert chosen["traits"]["soft_cap"] is True


def test_values_of_mla_s_prefill_may_be_stated(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    wide = ["--sm", 90, "--family", "prefill", "--head-dim", 192, "--heads-q", 16, "--heads-kv", 16]
    assert record(capsys, *arguments, *wide) == record(capsys, *arguments, *wide, "--head-dim-v", 128)
    assert cli.main([str(one) for one in (*arguments, *wide, "--head-dim-v", 192)]) == 2
    assert "--head-dim-v 192: expected 128 with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--family", "append"], "--family 'append': expected decode or prefill"),
        (["--family", "prefill", "--op", "decode"], "--family prefill and --op decode: expected one of them"),
    ],
)
def test_what_is_no_family_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: list[str], told: str
) -> None:
    assert cli.main([*arguments, *wrong]) == 2
    assert told in capsys.readouterr().err
