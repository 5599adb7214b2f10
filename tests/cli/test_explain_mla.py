"""``explain`` of MLA decodes on a small release of made-up kernels of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cubin_runtime import cli
from tests.cli.native_release import explain_arguments, record, run
from tests.kernels.decode_kernels import HOPPER
from tests.kernels.mla_examples import KERNELS, OTHER_COLUMNS, PORTABLE


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [*explain_arguments(tmp_path, (*HOPPER, *KERNELS)), "--backend", "native"]


@pytest.fixture
def with_portable(tmp_path: Path) -> list[str]:
    return [*explain_arguments(tmp_path, (*KERNELS, *PORTABLE)), "--backend", "native"]


SHAPE = ["--head-dim", 576, "--heads-q", 128, "--batch", 64, "--kv-len", 4096, "--sms", 132]


def test_the_kernel_its_grid_its_cta_groups_and_the_reason_are_told(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    out = run(capsys, *arguments, *SHAPE)
    assert out.startswith("kernel  mla_latent512_rows64_sm90a\n")
    assert out.endswith("\ndevice  H200, 132 multiprocessors\n")
    assert (
        "\nwhy     built for sm_90a; 128 rows per request in 2 tiles of 64; at most 4096 tiles of 64 keys over " in out
    )
    assert "\ngrid    128 CTAs of 384 threads, 223232 bytes shared memory\n" in out
    assert "\ngroups  64 of 2 CTAs, one CTA per row tile of a request\n" in out
    assert "\nrows    128 in 2 x 64\nsplits  stream-K over all output tiles\nL2      no hint\n" in out


def test_every_mla_kernel_is_a_candidate_with_its_row_tiles_or_the_reason_why_not(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    table = [line.split("\t") for line in run(capsys, *arguments, *SHAPE, "--candidates").splitlines() if "\t" in line]
    assert table[1:] == [
        ["mla_latent512_rows64_sm90a", "2 x 64", ""],
        ["mla_latent256_rows64_sm90a", "", "latent is 256"],
        ["mla_latent512_rows16_sm90a", "", "for at most 16 rows per request, and not for batch_invariant"],
        ["mla_latent256_rows16_sm90a", "", "latent is 256"],
    ]


def test_json_tells_the_launch_its_candidates_and_the_shape(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    told = record(capsys, *arguments, *SHAPE, "--q-len", 2, "--batch-invariant")
    (launch,) = told["launches"]
    assert (told["backend"], told["operator"]) == ("native", "mla_decode")
    assert (launch["kernel"], launch["splits"]) == ("mla_latent512_rows64_sm90a", 4)
    assert launch["grid"] == [launch["ctas"], 1, 1]
    assert launch["ctas"] % launch["cta_group_size"] == 0
    candidate = launch["candidates"][1]
    assert (candidate["kernel"], candidate["why_not"]) == ("mla_latent256_rows64_sm90a", "latent is 256")
    assert (launch["candidates"][0]["fits"], launch["candidates"][0]["row_tiles"]) == (True, 4)
    assert (told["shape"]["heads"], told["shape"]["q_len"], told["shape"]["rope"]) == (128, 2, 64)
    assert told["device"]["capability"] == [9, 0]


@pytest.mark.parametrize(("columns", "latent", "rope"), [(512, 512, 0), (288, 256, 32), (160, 128, 32), (576, 512, 64)])
def test_mla_by_its_name_takes_rows_of_every_width(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, columns: int, latent: int, rope: int
) -> None:
    own = [*explain_arguments(tmp_path, (*HOPPER, *KERNELS, *OTHER_COLUMNS)), "--backend", "native"]
    told = record(capsys, *own, "--op", "mla", "--head-dim", columns, "--heads-q", 64)
    assert (told["operator"], told["shape"]["latent"], told["shape"]["rope"]) == ("mla_decode", latent, rope)


def test_keys_of_512_columns_are_no_latent_cache_unless_that_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert cli.main([str(one) for one in (*arguments, "--op", "mla", "--head-dim", 96)]) == 2
    assert "--head-dim 96: expected one of 576, 320, 512, 288 or 160" in capsys.readouterr().err
    assert record(capsys, *arguments, "--head-dim", 512, "--heads-kv", 1)["operator"] == "paged_decode"


@pytest.mark.parametrize("beside", [[], ["--head-dim-v", 256], ["--heads-kv", 1]])
def test_the_narrower_rows_are_mla_too(
    capsys: pytest.CaptureFixture[str], arguments: list[str], beside: list[object]
) -> None:
    shape = record(capsys, *arguments, "--head-dim", 320, *beside)["shape"]
    assert (shape["latent"], shape["rope"], shape["heads"]) == (256, 64, 32)


def test_a_count_of_tokens_means_ragged_requests(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    told = record(capsys, *arguments, "--head-dim", 576, "--batch", 4, "--q-len", 8, "--tokens", 11)
    assert (told["shape"]["ragged"], told["shape"]["q_len"]) == (True, 8)


def test_auto_on_hopper_is_ours(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    told = record(capsys, *arguments, "--backend", "auto", "--sm", 90, "--head-dim", 576)
    assert (told["backend"], told["operator"]) == ("native", "mla_decode")


@pytest.mark.parametrize(("sm", "gpu"), [(120, "RTX PRO 6000"), (121, "GB10")])
def test_the_kernel_for_sm120_is_told_not_to_have_run(
    capsys: pytest.CaptureFixture[str], with_portable: list[str], sm: int, gpu: str
) -> None:
    given = [*with_portable, "--sm", sm, *SHAPE, "--dtype-kv", "e4m3", "--dtype-q", "e4m3"]
    out = run(capsys, *given)
    assert re.search(rf"^device +{gpu}, ", out, re.MULTILINE)
    assert re.search(r"^kernel +mla_portable_latent512_sm120$", out, re.MULTILINE)
    assert re.search(r"^why +built for sm_120, built, not run; .* tiles of 32 keys ", out, re.MULTILINE)
    assert record(capsys, *given)["launches"][0]["status"] == "built, not run"


def test_auto_names_the_backend_for_sm120(capsys: pytest.CaptureFixture[str], with_portable: list[str]) -> None:
    assert (
        cli.main([*with_portable, "--backend", "auto", "--sm", "120", "--head-dim", "576", "--dtype-kv", "e4m3"]) == 9
    )
    assert "backend 'native' has kernels for it that have never been run" in capsys.readouterr().err


def test_sm120_has_no_kernel_for_bf16(capsys: pytest.CaptureFixture[str], with_portable: list[str]) -> None:
    assert cli.main([*with_portable, "--sm", "120", "--head-dim", "576"]) == 2
    assert "mla_portable_latent512_sm120: dtype is e4m3" in capsys.readouterr().err


def test_auto_asks_for_what_runs_mla(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main([*arguments, "--backend", "auto", "--sm", "80", "--head-dim", "576"]) == 9
    assert "mla_decode on A100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--head-dim-v", "576"], "--head-dim-v 576: expected 512 with --head-dim 576, which is MLA"),
        (["--heads-kv", "8"], "--heads-kv 8: expected 1 with --head-dim 576, which is MLA"),
        (["--heads-q", "129"], "--heads-q 129: expected 1 to 128"),
        (["--q-len", "17"], "--q-len 17: expected 1 to 16"),
        (["--page", "8"], "--page 8: expected one of 16, 32, 64, 128, 256, 512, 1024"),
        (["--window", "8"], "--window 8: MLA decode sees all keys, expected 0"),
        (["--tokens", "2"], "--tokens 2: expected 0 to batch x q_len, 1"),
        (["--dtype-kv", "fp16"], "--dtype-kv 'fp16': expected one of bf16, e4m3"),
        (["--dtype-q", "e4m3"], "--dtype-q 'e4m3': expected bf16 with --dtype-kv bf16"),
        (["--lse"], "--lse: has no effect with --backend native"),
        (["--top-k", "64"], "--top-k: not an option of --backend native, only of trtllm-gen"),
        (["--sm", "80"], "mla_latent512_rows64_sm90a: built for sm_90a"),
    ],
)
def test_what_cannot_be_explained_is_refused_with_what_can(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: list[str], said: str
) -> None:
    assert cli.main([*arguments, "--head-dim", "576", *wrong]) == 2
    assert said in capsys.readouterr().err


def test_nothing_of_a_gpu_or_torch_is_loaded(arguments: list[str]) -> None:
    code = (
        "import sys; from cubin_runtime.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'torch', 'numpy', 'cuda'} & set(sys.modules); "
        "assert 'libcuda.so' not in open('/proc/self/maps').read()"
    )
    call = [sys.executable, "-c", code, *arguments, "--head-dim", "576"]
    assert subprocess.run(call, capture_output=True).returncode == 0
