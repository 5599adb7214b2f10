"""``explain`` of sparse MLA decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime import cli
from kernels_src.variants import VARIANTS
from tests.cli.native_release import explain_arguments, record, run
from tests.kernels.decode_kernels import HOPPER
from tests.kernels.variant_kernels import kernel_of

KERNELS = tuple(kernel_of(v) for v in VARIANTS if v.operation == "sparse_mla_decode")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [*explain_arguments(tmp_path, (*HOPPER, *KERNELS)), "--backend", "native", "--op", "sparse_mla"]


def test_it_tells_rows_clusters_and_splits(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    sizes = ["--batch", 64, "--kv-len", 2048, "--heads-q", 32, "--head-dim", 576, "--dtype-kv", "e4m3"]
    out = run(capsys, *arguments, *sizes)
    assert "sparse_mla_decode_scaled_e4m3_latent512_rows32_sm90a\n" in out
    assert "64 of 2 CTAs, each with output tiles of its own\n" in out
    assert [line.split() for line in out.splitlines() if line.startswith(("rows", "splits"))] == [
        ["rows", "32", "in", "1", "x", "32"],
        ["splits", "2"],
    ]


def test_it_tells_rows_groups_and_splits(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    sizes = ["--batch", 64, "--kv-len", 2048, "--heads-q", 64, "--head-dim", 576, "--dtype-kv", "e4m3"]
    out = run(capsys, *arguments, *sizes, "--candidates")
    assert "kernel  sparse_mla_decode_scaled_e4m3_latent512_rows64_sm90a\n" in out
    assert "one CTA per row tile of a token\nrows    64 in 1 x 64\n" in out
    assert "splits  stream-K over all output tiles" in out
    assert "sparse_mla_decode_bf16_latent512_sm90a\tcache_rows is bf16\n" in out


def test_batch_invariance_splits_by_the_list(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    sizes = ["--batch", 1, "--kv-len", 4096, "--heads-q", 8, "--head-dim", 512, "--batch-invariant"]
    found = record(capsys, *arguments, *sizes)
    (launch,) = found["launches"]
    assert (found["operator"], launch["kernel"]) == (
        "sparse_mla_decode",
        "sparse_mla_decode_bf16_nope_latent512_sm90a",
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--head-dim", 576, "--dtype-kv", "fp16"], "--head-dim 576: with --dtype-kv fp16"),
        (["--head-dim", 320], "--head-dim 320"),
        (["--head-dim", 576, "--heads-q", 129], "--heads-q 129: expected 1 to 128"),
        (["--head-dim", 576, "--kv-len", 32769], "--kv-len 32769: expected 1 to 32768"),
        (["--head-dim", 576, "--dtype-q", "fp16"], "--dtype-q 'fp16': expected bf16"),
        (["--head-dim", 576, "--heads-kv", 2], "--heads-kv 2: expected 1"),
    ],
)
def test_sizes_that_it_lacks_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: list[object], said: str
) -> None:
    assert cli.main([str(item) for item in [*arguments, *wrong]]) == 2
    assert said in capsys.readouterr().err
