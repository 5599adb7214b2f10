from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cubin_runtime.artifacts.tables.native_kernels import parse_native_kernels
from kernels_src.build import BuildError, build
from kernels_src.release import Release, read_release, write_release
from kernels_src.toolchain import Toolchain
from tests.kernels_src.stub_kernels import LAYOUT, SOURCE, stub, write_source


def build_stub(root: Path, toolchain: Toolchain, text: str = SOURCE) -> Release:
    write_source(root / "sources", text)
    return build(
        root / "out",
        (stub(sm="90a"), stub(sm="80")),
        {LAYOUT.name: LAYOUT},
        toolchain,
        sources=root / "sources",
        release="hopper-0.0.1",
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_two_directories_give_the_same_bytes(tmp_path: Path, toolchain: Toolchain, stub_release: Release) -> None:
    other = build_stub(tmp_path / "another place", toolchain)
    assert contents(other.folder) == contents(stub_release.folder)
    assert other.manifest_sha256 == stub_release.manifest_sha256


def test_the_tree_holds_the_manifest_the_index_and_a_cubin_each(stub_release: Release) -> None:
    assert sorted(contents(stub_release.folder)) == [
        "checksums.txt",
        "kernels.json",
        "stub/stub_scale_sm80.cubin",
        "stub/stub_scale_sm90a.cubin",
    ]


def test_sha256sum_agrees_with_the_manifest(stub_release: Release) -> None:
    command = ["sha256sum", "--check", "--strict", "--quiet", "checksums.txt"]
    assert subprocess.run(command, cwd=stub_release.folder, check=False).returncode == 0


def test_files_can_be_read_by_everyone(stub_release: Release) -> None:
    assert stub_release.folder.stat().st_mode & 0o555 == 0o555


def test_the_index_states_what_the_variant_and_the_layout_say(stub_release: Release) -> None:
    kernels = parse_native_kernels((stub_release.folder / "kernels.json").read_bytes(), "kernels.json")
    hopper = {kernel.sm: kernel for kernel in kernels}["90a"]
    assert hopper.file == "stub/stub_scale_sm90a.cubin"
    assert hopper.symbol == "stub_scale"
    assert (hopper.struct, hopper.struct_bytes, hopper.struct_fingerprint) == (
        "ScaleParams",
        LAYOUT.size,
        LAYOUT.fingerprint,
    )
    assert hopper.traits == {"dtype": "fp32"}
    assert hopper.status == "measured"
    assert (hopper.threads, hopper.static_shared_bytes, hopper.dynamic_shared_bytes) == (128, 256, 0)
    assert hopper.registers > 0


def test_the_index_has_sorted_keys_and_names_the_toolchain(stub_release: Release) -> None:
    text = (stub_release.folder / "kernels.json").read_text()
    document = json.loads(text)
    assert text == json.dumps(document, indent=1, sort_keys=True) + "\n"
    assert document["release"] == "hopper-0.0.1"
    assert document["toolchain"]["nvidia-cuda-nvcc"] == "13.0.88"


def test_a_tree_that_is_read_back_describes_itself_as_when_it_was_written(stub_release: Release) -> None:
    assert read_release(stub_release.folder) == stub_release


def test_a_failed_build_leaves_the_tree_of_before(tmp_path: Path, toolchain: Toolchain) -> None:
    before = contents(build_stub(tmp_path, toolchain).folder)
    with pytest.raises(BuildError):
        build_stub(tmp_path, toolchain, "nonsense")
    assert contents(tmp_path / "out" / "hopper-0.0.1") == before


def test_a_new_tree_replaces_the_old_one_whole(tmp_path: Path) -> None:
    write_release(tmp_path, "hopper-0.0.1", {"a/old.cubin": b"old"}, [])
    write_release(tmp_path, "hopper-0.0.1", {"a/new.cubin": b"new"}, [])
    assert sorted(contents(tmp_path)) == [
        "hopper-0.0.1/a/new.cubin",
        "hopper-0.0.1/checksums.txt",
        "hopper-0.0.1/kernels.json",
    ]


def test_an_unknown_struct_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="unknown structs ScaleParams"):
        build(tmp_path, (stub(),), {}, Toolchain(Path("no-nvcc"), "PATH"), sources=tmp_path)
