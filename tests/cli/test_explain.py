"""``explain`` on a small release of made-up trtllm-gen kernels, used in place from a directory."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
from itertools import product
from pathlib import Path

import pytest

from cubin_runtime import cli
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.cli.json_schema import schema_of
from tests.cli.json_shape import misfits

FOLDER = "small-1/fmha/trtllm-gen"
TYPES = ("mDataTypeQ", "mDataTypeKv", "mDataTypeO")
TILES = ("mTileSizeQ", "mTileSizeKv", "mStepQ", "mStepKv", "mHeadDimPerCtaV", "mHeadDimQk", "mHeadDimV")
BINARY = ("mSM", "mCubin", "mCubinSize", "mFuncName", "mSharedMemBytes", "mThreadsPerCTA")
TRAITS = ("mQkvLayout", "mNumTokensPerPage", "mMaskType", "mKernelType", "mTileScheduler", "mMultiCtasKvMode")
SWITCHES = ("mGroupsHeadsQ", "mGroupsTokensHeadsQ", "mReuseSmemKForV", "m2CtaMma", "mSparseMla")
COLUMNS = (*TYPES, *TILES, *BINARY, *TRAITS, *SWITCHES, "mSkipsSoftmaxWhenPossible", "sha256")
BF16 = "DATA_TYPE_BF16"


def kernel_line(tile: int, mode: int) -> str:
    name = f'"fmhaSm100fKernel_Q{tile}Mode{mode}"'
    kind, scheduler = 3 if tile >= 64 else 2, int(mode == 0)
    cells = [BF16, BF16, BF16, tile, 128, tile, 128, 128, 128, 128, "kSM_100f", "nullptr", 0, name, 65536, 384, 2, 32]
    cells += [1, kind, scheduler, mode, "true", "true", "false", "false", "false", "false", '"' + "0" * 64 + '"']
    return "{ " + ", ".join(map(str, cells)) + "},\n"


HEADER = (
    "struct Info\n{\n"
    + "".join(f"    int {name};\n" for name in COLUMNS)
    + "};\nstatic const Info infos[] = {\n"
    + "".join(kernel_line(tile, mode) for tile, mode in product((8, 16, 64, 128), (0, 1, 3)))
    + "};\n"
).encode()


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """What every call takes: the release in place, its pin, and a store that is not there."""
    folder = tmp_path / "tree" / FOLDER
    (folder / "include").mkdir(parents=True)
    (folder / HEADER_PATH).write_bytes(HEADER)
    manifest = f"{hashlib.sha256(HEADER).hexdigest()}  {HEADER_PATH}\n".encode()
    (folder / "checksums.txt").write_bytes(manifest)
    pins = tmp_path / "pins.toml"
    pins.write_text(
        f'[[pin]]\nname = "small"\npath = "{FOLDER}"\nmanifest_sha256 = "{hashlib.sha256(manifest).hexdigest()}"\n'
        f'files = 1\nbytes = {len(HEADER)}\nmax_file_bytes = 65536\nabi = "trtllm-gen-0.6.13"\n'
        'licence = "Apache-2.0"\nsources = []\n'
    )
    where = ["--source", str(tmp_path / "tree"), "--pins", str(pins), "--store", str(tmp_path / "store"), "--offline"]
    return ["explain", "--backend", "trtllm-gen", "--release", "small", *where]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def record(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    return json.loads(run(capsys, *arguments, "--json"))


def test_flags_alone_find_a_kernel_and_say_why(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    out = run(capsys, *arguments, "--candidates")
    assert "fmhaSm100fKernel_Q8Mode3" in out
    assert "32 query heads over 8 KV heads" in out
    assert "mNumHeadsQPerKv\tint32\t4\tquery heads that share a KV head" in out
    assert "tmaQ_\tbfloat16" in out


def test_candidates_come_with_their_cost(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    out = run(capsys, *arguments, "--q-len", 6, "--heads-kv", 4, "--candidates")
    assert "\t32\tno kernel\t" in out
    assert "fmhaSm100fKernel_Q16Mode1" in out


def test_what_no_kernel_can_do_is_an_error_in_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code = cli.main([*arguments, "--q-len", "6", "--heads-kv", "4", "--policy", "reference", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (code, shown["errors"][0]["code"]) == (2, 2)
    assert misfits(shown, schema_of("explain")) == []


def test_the_policy_of_the_reference_refuses_what_ours_passes_over(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    asked = [*arguments, "--q-len", "6", "--heads-kv", "4", "--policy", "reference"]
    assert cli.main(asked) == 2
    assert "the release has no kernel" in capsys.readouterr().err


def test_json_has_the_keys_of_a_record(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    stated = record(capsys, *arguments, "--batch", 300)
    assert (stated["verb"], stated["policy"], stated["errors"]) == ("explain", "best", [])
    assert misfits(stated, schema_of("explain")) == []
    assert {"kernel", "grid", "block", "smem", "attrs", "tma", "params", "params_hex", "reduction", "lse"} <= set(
        stated
    )


def test_a_case_in_a_file_is_explained(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path
) -> None:
    from cubin_runtime.cli.example_call import Shapes
    from tests.kernels.example_cases import case_of

    file = tmp_path / "case.json"
    file.write_text(json.dumps({"case": case_of(Shapes(batch=300))}))
    assert record(capsys, *arguments, file)["grid"] == record(capsys, *arguments, "--batch", 300)["grid"]


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    from cubin_runtime.cli.example_call import Shapes
    from tests.kernels.example_cases import case_of

    file = tmp_path / "cases.jsonl.gz"
    stated = [case_of(Shapes(batch=300)), case_of(Shapes(q_len=6, heads_kv=4))]
    file.write_bytes(gzip.compress(b"".join(json.dumps({"case": case}).encode() + b"\n" for case in stated)))
    return file


def test_a_file_of_cases_gives_a_file_of_decisions(
    capsys: pytest.CaptureFixture[str], arguments: list[str], cases: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    run(capsys, *arguments, "--cases", cases, "--out", out, "--both")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["ok"], r["best"]["ok"]) for r in records] == [(True, True), (False, True)]
    assert records[1]["error_kind"] == "missing_kernel_in_selection"


def test_decisions_may_take_the_place_of_the_cases(
    capsys: pytest.CaptureFixture[str], arguments: list[str], cases: Path
) -> None:
    plain = cases.with_suffix("")
    plain.write_bytes(gzip.decompress(cases.read_bytes()))
    run(capsys, *arguments, "--cases", plain, "--out", plain)
    assert [json.loads(line)["ok"] for line in plain.read_text().splitlines()] == [True, False]


def test_decisions_that_were_not_all_made_leave_the_file_of_before(
    arguments: list[str], cases: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("of before")
    cases.write_bytes(gzip.compress(gzip.decompress(cases.read_bytes()) + b'{"bad": 1}\n'))
    assert cli.main([*arguments, "--cases", str(cases), "--out", str(out)]) == 2
    assert out.read_text() == "of before"
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".tmp")]


def test_decisions_go_to_a_device_as_they_come(
    capsys: pytest.CaptureFixture[str], arguments: list[str], cases: Path
) -> None:
    run(capsys, *arguments, "--cases", cases, "--out", "/dev/null")
    assert not Path("/dev/null").is_file()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["FIFO"], 2, "expected a regular file, or '-'"),
        (["--cases", "FIFO"], 2, "expected a regular file, or '-'"),
        (["--cases", "FIFO.gz"], 2, "expected a regular file, or '-'"),
        (["--cases", "/dev/zero"], 2, "/dev/zero: expected a regular file"),
        (["--cases", "/"], 2, "/: expected a regular file"),
        (["--cases", "CASES", "--out", "FIFO"], 8, "cannot be written: No such device"),
    ],
)
def test_a_fifo_or_a_device_is_an_error_and_never_blocks(
    capsys: pytest.CaptureFixture[str], arguments: list[str], cases: Path, tmp_path: Path, words, code: int, said: str
) -> None:
    places = {"FIFO": tmp_path / "fifo", "FIFO.gz": tmp_path / "fifo.gz", "CASES": cases}
    for name in ("FIFO", "FIFO.gz"):
        os.mkfifo(places[name])
    assert cli.main([*arguments, *(str(places.get(word, word)) for word in words)]) == code
    assert said in capsys.readouterr().err


def test_cases_come_from_the_standard_input(
    capsys: pytest.CaptureFixture[str], arguments: list[str], cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(gzip.decompress(cases.read_bytes()))))
    assert len(run(capsys, *arguments, "--cases", "-").splitlines()) == 2


def test_a_case_of_many_lines_without_end_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[1,\n" * 300_000)))
    assert cli.main([*arguments, "-"]) == 2
    assert "standard input: more than 1048576 bytes, expected one case" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"[" * 100_000], ids=["closed", "no text", "deep"])
def test_a_standard_input_without_a_case_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr("sys.stdin", None if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8"))
    assert cli.main([*arguments, "-"]) == 2
    assert "standard input: " in capsys.readouterr().err


def test_decisions_go_to_the_standard_output_without_a_file(
    capsys: pytest.CaptureFixture[str], arguments: list[str], cases: Path
) -> None:
    assert len(run(capsys, *arguments, "--cases", cases).splitlines()) == 2


def test_columns_that_the_release_does_not_have_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert cli.main(arguments) == 0
    assert "small: missing columns in the metadata: mDataTypeK, mDataTypeV, mNumElts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (["--policy", "mine"], 2),
        (["--out", "x"], 2),
        (["--both"], 2),
        (["--cases", "none.jsonl"], 4),
        (["none.json"], 4),
        (["--page", "48"], 2),
        (["--op", "train"], 2),
        (["--occupancy", "all"], 2),
        (["--occupancy", "const:" + "9" * 5000], 2),
        (["--workspace", "1000"], 9),
        (["--release", "unknown"], 3),
    ],
)
def test_what_cannot_be_explained_has_its_code(arguments: list[str], wrong: list[str], code: int) -> None:
    assert cli.main([*arguments, *wrong]) == code


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--op", "train"], "--op 'train': expected one of decode, context, ragged"),
        (["--q-len", "0"], "--q-len 0: expected 1 or more"),
    ],
)
def test_what_cannot_be_explained_is_named_by_its_flag(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: list[str], said: str
) -> None:
    assert cli.main([*arguments, *wrong]) == 2
    assert said in capsys.readouterr().err


def test_a_release_without_a_known_struct_is_not_explained(arguments: list[str], tmp_path: Path) -> None:
    pins = tmp_path / "pins.toml"
    pins.write_text(pins.read_text().replace('abi = "trtllm-gen-0.6.13"\n', ""))
    assert cli.main(arguments) == 9


def test_a_file_that_cannot_be_written_has_its_code(arguments: list[str], cases: Path, tmp_path: Path) -> None:
    assert cli.main([*arguments, "--cases", str(cases), "--out", str(tmp_path / "no" / "out")]) == 8


def test_nothing_of_a_gpu_or_torch_is_loaded(arguments: list[str]) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from cubin_runtime.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'torch', 'numpy', 'cuda'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True).returncode == 0
