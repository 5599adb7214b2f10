"""``explain`` on a small release of made-up decode kernels of ours, used in place from a directory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cubin_runtime import cli
from tests.cli.native_release import explain_arguments, record, run
from tests.kernels.decode_kernels import HOPPER, PORTABLE


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return explain_arguments(tmp_path, (*PORTABLE, *HOPPER))


SHAPE = ["--batch", "8", "--q-len", "4", "--kv-len", "16384", "--heads-q", "64", "--heads-kv", "8", "--sms", "132"]


def test_the_kernel_its_grid_and_its_time_are_told(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    out = run(capsys, *arguments, *SHAPE, "--backend", "native", "--sm", 90)
    assert "kernel     decode_bf16_d128_rows64_sm90a\n" in out
    assert "4 query tokens x 8 query heads per KV head in 1 row tile of 64" in out
    assert "\nsplits     " in out
    assert re.search(r"\npredicted  [\d.]+ us on H200, limited by ", out)


def test_details_come_with_the_candidates(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    out = run(capsys, *arguments, *SHAPE, "--backend", "native", "--candidates")
    assert "\nrows  32 in 1 x 64\n" in out
    assert re.search(r"\ntime  [\d.]+ us: [\d.]+ to the first byte \+ ", out)


@pytest.mark.parametrize(
    ("kv_len", "said"), [("2048", "a cluster of 8 CTAs per output tile"), ("64", "one CTA per output tile")]
)
def test_clusters_are_told(capsys: pytest.CaptureFixture[str], arguments: list[str], kv_len: str, said: str) -> None:
    out = run(capsys, *arguments, "--backend", "native", "--sm", 90, "--kv-len", kv_len)
    assert f"\nsplits     {said}\n" in out


def test_every_kernel_of_the_device_is_in_the_table_by_time(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    out = run(capsys, *arguments, *SHAPE, "--backend", "native", "--candidates")
    table = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert [cells[0] for cells in table[1:5]] == [f"decode_bf16_d128_rows{rows}_sm90a" for rows in (64, 16, 128, 8)]
    assert ["decode_fp16_d64_rows8_sm90a", "dtype is fp16"] in [[cells[0], cells[-1]] for cells in table]
    assert len(table) == 1 + len(HOPPER)


def test_kernels_for_other_devices_are_counted(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    out = run(capsys, *arguments, "--backend", "native", "--candidates")
    assert f"other SMs  {len(PORTABLE)} more decode kernels for sm_100, sm_120, sm_80, sm_86, sm_89" in out


def test_json_tells_the_choice_its_candidates_and_the_constants(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    told = record(capsys, *arguments, *SHAPE, "--backend", "native")
    (launch,) = told["launches"]
    best = launch["candidates"][0]
    assert (told["verb"], told["backend"], told["operator"]) == ("explain", "native", "paged_decode")
    assert launch["kernel"] == "decode_bf16_d128_rows64_sm90a"
    assert (best["kernel"], best["microseconds"]) == (launch["kernel"], told["microseconds"])
    assert best["terms"].keys() == {"fixed_us", "dram_us", "l2_us", "tiles_us", "merge_us"}
    assert (best["grid"]["ctas"], launch["grid"]) == (128, [1, 8, 16])
    assert (told["costs"]["gpu"], told["costs"]["launch_us"]) == ("H200", 2.0)
    assert told["device"]["capability"] == [9, 0]


def test_the_calibration_of_the_predictions_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    told = record(capsys, *arguments, "--sm", 90, "--gpu", "NVIDIA H200")["costs"]["calibration"]
    out = run(capsys, *arguments, "--sm", 90, "--gpu", "NVIDIA H200", "--candidates")
    assert (told["device"], told["file"]) == ("NVIDIA H200", "benchmarks/results/launch_choice_h200.json")
    said = f"launches on NVIDIA H200, {told['date']} ({told['file']}, SHA-256 {told['sha256'][:12]})"
    assert said in " ".join(out.split())


def test_a_gpu_that_was_not_calibrated_says_whose_constants_it_has(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    out = " ".join(run(capsys, *arguments, "--sm", 90, "--gpu", "NVIDIA H100 80GB HBM3", "--candidates").split())
    assert "launches on NVIDIA H200" in out
    assert "here with 3 TB/s, as none on an H100 is in the fit" in out


def test_why_a_kernel_does_not_fit_is_in_the_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    last = record(capsys, *arguments, "--backend", "native")["launches"][0]["candidates"][-1]
    assert (last["fits"], last["why_not"]) == (False, "dtype is e4m3")


def test_without_options_the_gpu_is_the_measured_one(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    told = record(capsys, *arguments)
    assert (told["backend"], told["device"]["name"]) == ("native", "H200")


def test_auto_takes_it_where_it_was_measured(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert record(capsys, *arguments, "--sm", 90)["backend"] == "native"


def test_auto_names_the_backend_that_was_built_but_not_run(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert cli.main([*arguments, "--sm", "80"]) == 9
    assert "backend 'native' has kernels for it that have never been run" in capsys.readouterr().err


def test_the_former_name_of_the_native_backend_is_taken_with_a_note(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert cli.main([*arguments, "--backend", "hopper", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["backend"] == "native"
    assert "--backend hopper is now called native" in told.err


def test_a_kernel_that_was_not_run_is_explained_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    told = record(capsys, *arguments, "--sm", 80, "--backend", "native")
    assert told["launches"][0]["status"] == "built, not run"
    assert (told["device"]["name"], told["costs"]["gpu"]) == ("A100", "any other GPU")


def test_a_named_gpu_has_its_own_constants(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    told = record(capsys, *arguments, "--sm", 90, "--gpu", "NVIDIA H100 80GB HBM3")
    assert (told["costs"]["gpu"], told["costs"]["read_tb_per_s"]) == ("H100", 3.0)


def test_batch_invariant_states_its_splits(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    told = record(capsys, *arguments, "--sm", 90, "--kv-len", 16384, "--batch-invariant")
    assert (told["launches"][0]["splits"], told["shape"]["batch_invariant"]) == (16, True)


RAGGED = ["--sm", 90, "--batch", 8, "--q-len", 4, "--tokens", 20, "--heads-q", 64, "--heads-kv", 8, "--batch-invariant"]


def test_batch_invariant_ragged_requests_show_both_launches(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    out = run(capsys, *arguments, *RAGGED, "--candidates")
    assert out.startswith("launches   2\nkernel     ")
    assert "warps for requests of up to 16 rows, at most " in out
    assert "warpgroups of 64 rows for requests of at least 17 rows, at most " in out
    assert "\nrows    16 in 2 x 8\n" in out
    assert "\nrows    32 in 1 x 64\n" in out


def test_the_json_of_two_launches_has_the_rows_and_the_time_of_each(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    told = record(capsys, *arguments, *RAGGED)
    few, many = told["launches"]
    assert (few["min_rows"], few["max_rows"], many["min_rows"]) == (0, 16, 17)
    assert told["microseconds"] == pytest.approx(few["microseconds"] + many["microseconds"])


@pytest.mark.parametrize(("window", "left"), [(0, -1), (1, 0), (128, 127)])
def test_a_window_counts_the_tokens_that_are_seen(
    capsys: pytest.CaptureFixture[str], arguments: list[str], window: int, left: int
) -> None:
    assert record(capsys, *arguments, "--sm", 90, "--window", window)["shape"]["window_left"] == left


def test_a_programmatic_launch_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert "\nattributes  programmatic dependent launch" in run(capsys, *arguments, "--sm", 90, "--pdl", "--candidates")
    assert record(capsys, *arguments, "--sm", 90, "--pdl")["pdl"] is True


def test_a_count_of_tokens_means_ragged_requests(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    shape = record(capsys, *arguments, "--sm", 90, "--batch", 4, "--q-len", 8, "--tokens", 11)["shape"]
    assert (shape["ragged"], shape["tokens"], shape["q_len"]) == (True, 11, 8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--backend", "mine"], "--backend 'mine': expected one of auto, native, trtllm-gen"),
        (["--backend", "native", "--sm", "95"], "--sm 95: expected one of 80, 86"),
        (["--sm", "95"], "--sm 95: expected one of 80, 86"),
        (["--sm", "90", "--policy", "best"], "--policy: not an option of --backend native, only of trtllm-gen"),
        (["--sm", "90", "--no-causal"], "--causal: not an option of --backend native"),
        (
            ["--sm", "90", "--lse"],
            "--lse: has no effect with --backend native",
        ),
        (["--sm", "90", "--soft-cap"], "--soft-cap True: paged_decode has none, expected --op context"),
        (["--backend", "native", "--head-dim-v", "64"], "--head-dim-v 64: expected 128, like --head-dim"),
        (["--backend", "native", "case.json"], "CASE.json: not an option of --backend native"),
        (["--sm", "100", "--soft-cap"], "--soft-cap: not an option of --backend trtllm-gen, only of native"),
        (["--top-k", "8"], "--top-k: not an option of --backend native, only of trtllm-gen"),
        (
            ["--sm", "90", "--op", "ragged"],
            "--op 'ragged': the native backend has append, context, decode, draft_mask, merge, mla, sparse_mla",
        ),
        (["--sm", "90", "--q-len", "65"], "--q-len 65: expected 1 to 64"),
        (["--sm", "90", "--batch", "0"], "--batch 0: expected 1 to"),
        (["--sm", "90", "--heads-kv", "0"], "--heads-kv 0: expected 1 to"),
        (["--sm", "90", "--heads-q", "12"], "--heads-q 12: expected a multiple of --heads-kv 8"),
        (["--sm", "90", "--heads-q", "264"], "--heads-q 264: expected at most 32 for each of --heads-kv"),
        (["--sm", "90", "--page", "48"], "--page 48: expected one of 16, 32, 64, 128, 256"),
        (["--sm", "90", "--window", "-1"], "--window -1: expected at least 0"),
        (["--sm", "90", "--tokens", "2"], "--tokens 2: expected 0 to batch x q_len, 1"),
        (["--sm", "90", "--dtype-kv", "int8"], "--dtype-kv 'int8': expected one of bf16, fp16, e4m3"),
        (["--sm", "90", "--dtype-q", "fp16"], "--dtype-q 'fp16': expected bf16 with --dtype-kv bf16"),
        (["--sm", "90", "--dtype-out", "e2m1"], "--dtype-out 'e2m1': expected one of bf16, fp16, e4m3"),
        (["--sm", "90", "--head-dim", "96"], "its kernels take bf16 with head_dim 32, 64, 128, 256, 512; fp16 with"),
        (["--sm", "90", "--sms", "0"], "--sms 0: expected at least 1"),
    ],
)
def test_what_cannot_be_explained_is_refused_with_what_can(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: list[str], said: str
) -> None:
    assert cli.main([*arguments, *wrong]) == 2
    assert said in capsys.readouterr().err


def test_nothing_of_a_gpu_or_torch_is_loaded(arguments: list[str]) -> None:
    code = (
        "import sys; from cubin_runtime.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'torch', 'numpy', 'cuda'} & set(sys.modules); "
        "assert 'libcuda.so' not in open('/proc/self/maps').read()"
    )
    assert subprocess.run([sys.executable, "-c", code, *arguments, "--sm", "90"], capture_output=True).returncode == 0
