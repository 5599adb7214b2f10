"""From a FlashInfer wheel to a folder that FlashInfer reads: pin, fetch, verify, export, the variables."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cubin_runtime.cli import main
from tests.artifacts.flashinfer_wheel import artifacts_text, make_tree, make_wheel

GROUP = "flashinfer-9.1.0"


@pytest.fixture
def tree(environment: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The tree of a made-up FlashInfer version that is pinned."""
    tree = environment / "tree"
    wheel = make_wheel(environment, artifacts_text(make_tree(tree)))
    assert main(["pin", "--from-flashinfer", str(wheel)]) == 0
    return tree


def files_below(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_pinning_names_what_cannot_be_pinned(tree: Path, environment: Path, run_json) -> None:
    code, shown = run_json("pin", "--from-flashinfer", next(environment.glob("*.whl")))
    assert (code, shown["group"], shown["unpinnable"], shown["written"]) == (0, GROUP, ["aaa6/fmha/cudnn"], 0)
    assert len(shown["pins"]) == 8


def test_all_of_a_version_is_fetched_verified_and_exported(tree: Path, environment: Path) -> None:
    out = environment / "out"
    assert main(["fetch", GROUP, "--source", str(tree)]) == 0
    assert main(["verify", GROUP, "--complete", "--offline"]) == 0
    assert main(["export", GROUP, "--layout", "flashinfer", "--out", str(out)]) == 0
    assert files_below(out) == files_below(tree)


def test_only_what_one_gpu_and_cpu_need_is_fetched(tree: Path, environment: Path) -> None:
    out, wanted = environment / "out", [GROUP, "--sm", "103", "--cpu", "x86_64"]
    assert main(["fetch", *wanted, "--source", str(tree)]) == 0
    assert main(["export", *wanted, "--layout", "flashinfer", "--out", str(out)]) == 0
    kept = {name for name in files_below(out) if not name.endswith("checksums.txt")}
    assert kept == {
        "aaa1/fmha/trtllm-gen/include/flashInferMetaInfo.h",
        "aaa1/fmha/trtllm-gen/fmhaSm100fKernel_Q.cubin",
        "aaa1/fmha/trtllm-gen/fmhaSm103aKernel_Q.cubin",
        "aaa2/batched_gemm-fdba669-16ba8ed/include/flashinferMetaInfo.h",
        "aaa2/batched_gemm-fdba669-16ba8ed/Bmm_t128_sm100f.cubin",
        "aaa2/batched_gemm-fdba669-16ba8ed/Bmm_t128_sm103a.cubin",
        "aaa3/gemm-b738138-25754e6/include/flashinferMetaInfo.h",
        "aaa3/gemm-b738138-25754e6/Gemm_t128_sm100f.cubin",
        "aaa4/deep-gemm/kernel.fp8_gemm.0074.cubin",
        "aaa5/fmha/cute-dsl/x86_64/sm_103a/cute_dsl_x86_64_sm_103a.so",
    }


def test_a_family_is_fetched_alone(tree: Path, run_json) -> None:
    code, shown = run_json("fetch", GROUP, "--family", "deep-gemm", "--source", tree)
    assert (code, [one["pin"] for one in shown["releases"]]) == (0, [f"{GROUP}-deep-gemm"])


def test_the_variables_lead_to_the_folder(tree: Path, environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = environment / "a folder"
    assert main(["fetch", GROUP, "--source", str(tree)]) == 0
    assert main(["export", GROUP, "--layout", "flashinfer", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["flashinfer-env", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"export FLASHINFER_CUBIN_DIR='{out}'",
        f"export FLASHINFER_CUBINS_REPOSITORY='{out}'",
        "export FLASHINFER_NO_DOWNLOAD=1",
        "export VLLM_HAS_FLASHINFER_CUBIN=1",
    ]


@pytest.mark.parametrize("name", ["empty", "nowhere", "with#hash"])
def test_no_variables_lead_to_what_flashinfer_could_not_use(environment: Path, name: str) -> None:
    (environment / "empty").mkdir()
    assert main(["flashinfer-env", str(environment / name)]) == (2 if "#" in name else 4)


@pytest.mark.parametrize("name", ["new\nline", "esc\x1b[2J", os.fsdecode(b"caf\xe9"), "user:x@host"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_folder_whose_name_no_line_of_shell_shows_is_refused(
    environment: Path, capsys: pytest.CaptureFixture[str], name: str, form: list[str]
) -> None:
    folder = environment / name / "release"
    folder.mkdir(parents=True)
    (folder / "checksums.txt").touch()
    assert main(["flashinfer-env", str(environment / name), *form]) == 2
    assert "export" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["it's", 'a "quoted" name', "$HOME `id` \\", "caf\xe9"])
def test_the_lines_give_a_shell_the_very_name(environment: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = environment / name / "release"
    folder.mkdir(parents=True)
    (folder / "checksums.txt").touch()
    assert main(["flashinfer-env", str(environment / name)]) == 0
    script = capsys.readouterr().out + 'printf %s "$FLASHINFER_CUBIN_DIR"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode() == str(folder.parent)


@pytest.mark.parametrize("kind", ["file in a release", "link to a file", "link to a folder", "link in a release"])
def test_what_flashinfer_might_delete_for_others_is_refused(tree: Path, environment: Path, kind: str) -> None:
    out, other = environment / "out", environment / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("dear")
    assert main(["fetch", GROUP, "--source", str(tree)]) == 0
    export = ["export", GROUP, "--layout", "flashinfer", "--out", str(out)]
    assert main(export) == 0
    release = next(out.rglob("checksums.txt")).parent
    if kind == "file in a release":
        (release / "thesis.txt").write_text("dear")
    else:
        target = other if kind == "link to a folder" else other / "thesis.txt"
        (release if kind == "link in a release" else out).joinpath("link").symlink_to(target)
    assert main(export) == 2
    assert (other / "thesis.txt").read_text() == "dear"


def test_a_folder_with_files_of_others_is_refused_and_left(tree: Path, environment: Path) -> None:
    out = environment / "out"
    assert main(["fetch", GROUP, "--source", str(tree)]) == 0
    export = ["export", GROUP, "--layout", "flashinfer", "--out"]
    assert main([*export, str(out)]) == 0
    assert main([*export, str(out)]) == 0  # FlashInfer's own leftovers are no others'
    (out / "thesis.txt").write_text("dear")
    assert main([*export, str(out)]) == 2
    assert (out / "thesis.txt").read_text() == "dear"
    assert main([*export, str(environment / "store")]) == 2
    assert main([*export, str(environment)]) == 2


def test_a_group_is_taken_out_as_one(tree: Path, run_json) -> None:
    code, shown = run_json("unpin", GROUP)
    assert (code, len(shown["pins"])) == (0, 8)
    assert run_json("fetch", GROUP)[0] == 3


def test_each_pin_of_a_group_is_in_the_audit_log(
    tree: Path, environment: Path, monkeypatch: pytest.MonkeyPatch, run_json
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_AUDIT", str(environment / "audit.jsonl"))
    run_json("unpin", GROUP)
    run_json("pin", "--from-flashinfer", next(environment.glob("*.whl")))
    lines = [json.loads(line) for line in (environment / "audit.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["unpin"] * 8 + ["pin"] * 8
    assert {line["release"] for line in lines[:8]} == {line["release"] for line in lines[8:]}


@pytest.mark.parametrize("more", [["some/path"], ["--sha256", "0" * 64], ["--source", "package"]])
def test_a_wheel_comes_with_no_other_description(tree: Path, environment: Path, more: list[str]) -> None:
    wheel = next(environment.glob("*.whl"))
    assert main(["pin", "--from-flashinfer", str(wheel), *more]) == 2


def test_pin_needs_something_to_pin(environment: Path) -> None:
    assert main(["pin"]) == 2
