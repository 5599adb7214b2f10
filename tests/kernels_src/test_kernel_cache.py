from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.launch.structs import Field, StructLayout
from kernels_src.build import BuildStep, build, main
from kernels_src.compiling import BuildError, CompiledKernel, Resources
from kernels_src.kernel_cache import DEFAULT_FOLDER, VARIABLE, KernelCache, cache_key, kernel_cache
from kernels_src.release import Release
from kernels_src.toolchain import Toolchain
from tests.kernels_src.stub_kernels import LAYOUT, SOURCE, stub, write_source

KERNEL = CompiledKernel(stub(), b"\x7fELF\n\ncubin", Resources(128, 32, 0, 256, 0))
KEY = "0" * 64


class Project:
    """The stub's sources with a cache; ``build`` says which kernels were compiled."""

    def __init__(self, root: Path, toolchain: Toolchain) -> None:
        self.root = root
        self.toolchain = toolchain
        self.layout = LAYOUT
        self.cache = KernelCache(root / "cache")
        write_source(root / "sources", SOURCE)

    def build(self, **changes: object) -> tuple[Release, list[str]]:
        steps: list[BuildStep] = []
        release = build(
            self.root / "out",
            (stub(sm="90a"), stub(sm="80", **changes)),
            {LAYOUT.name: self.layout},
            self.toolchain,
            sources=self.root / "sources",
            release="hopper-0.0.1",
            cache=self.cache,
            progress=steps.append,
        )
        assert [(step.number, step.total) for step in steps] == [(1, 2), (2, 2)]
        return release, sorted(step.kernel.variant.sm for step in steps if step.seconds is not None)

    def compiled(self, **changes: object) -> list[str]:
        return self.build(**changes)[1]

    def write(self, name: str, text: str) -> None:
        (self.root / "sources" / "stub" / name).write_text(text)


@pytest.fixture(scope="session")
def built(toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Sources that were built, so that their two kernels are in the cache."""
    made = Project(tmp_path_factory.mktemp("built"), toolchain)
    assert made.compiled() == ["80", "90a"]
    return made


@pytest.fixture
def project(built: Project, tmp_path: Path) -> Project:
    """The same in a folder of the test."""
    shutil.copytree(built.cache.folder, tmp_path / "cache")
    return Project(tmp_path, built.toolchain)


def test_kernels_that_did_not_change_are_not_compiled_and_have_the_same_bytes(
    project: Project, stub_release: Release
) -> None:
    release, compiled = project.build()
    assert (compiled, release.manifest_sha256) == ([], stub_release.manifest_sha256)


def test_a_changed_header_compiles_the_kernels_that_include_it(project: Project) -> None:
    before, _ = project.build()
    project.write("factor.cuh", "#pragma once\nconstexpr float FACTOR = 3.0f;\n")
    changed, compiled = project.build()
    assert compiled == ["80", "90a"]
    assert changed.manifest_sha256 != before.manifest_sha256


def test_a_header_of_a_header_is_seen(project: Project) -> None:
    project.write("factor.cuh", '#pragma once\n#include "deep.cuh"\n')
    project.write("deep.cuh", "constexpr float FACTOR = 2.0f;\n")
    assert project.compiled() == ["80", "90a"]
    project.write("deep.cuh", "constexpr float FACTOR = 4.0f;\n")
    assert project.compiled() == ["80", "90a"]


def test_a_changed_generated_header_compiles_its_kernels(project: Project) -> None:
    fields = (*LAYOUT.fields, Field("more", "int64", ""))
    project.layout = StructLayout.declare(LAYOUT.name, fields)
    assert project.compiled() == ["80", "90a"]


def test_a_changed_define_compiles_its_kernel_alone(project: Project) -> None:
    assert project.compiled(defines={"UNROLL": 2}) == ["80"]


def test_another_compiler_compiles_all(project: Project) -> None:
    nvcc = project.root / "nvcc"
    nvcc.write_text(f'#!/bin/sh\nexec {project.toolchain.nvcc} "$@"\n')
    nvcc.chmod(0o755)
    project.toolchain = Toolchain(nvcc, "PATH")
    assert project.compiled() == ["80", "90a"]


def test_a_forced_build_compiles_all_and_replaces_their_entries(project: Project) -> None:
    entries = {file: file.read_bytes() for file in project.cache.folder.iterdir()}
    for file in entries:
        file.write_bytes(b"another kernel")
    project.cache = replace(project.cache, reuse=False)
    assert project.compiled() == ["80", "90a"]
    assert {file: file.read_bytes() for file in entries} == entries


def test_a_kernel_of_the_cache_is_checked_like_a_compiled_one(project: Project) -> None:
    one, other = (file.name for file in project.cache.folder.iterdir())
    kernel = project.cache.load(one, stub())
    assert kernel is not None
    project.cache.store(other, kernel)
    with pytest.raises(BuildError, match="the cubin is for sm_"):
        project.build()


def test_sources_that_change_while_they_are_compiled_are_not_kept(tmp_path: Path, toolchain: Toolchain) -> None:
    nvcc = tmp_path / "nvcc"
    header = tmp_path / "sources" / "stub" / "factor.cuh"
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --dryrun ] || echo >> {header}\nexec {toolchain.nvcc} "$@"\n')
    nvcc.chmod(0o755)
    project = Project(tmp_path, Toolchain(nvcc, "PATH"))
    with pytest.raises(BuildError, match="its sources changed while it was compiled"):
        project.build()
    assert not project.cache.folder.exists()


def test_a_cache_that_cannot_be_written_stops_no_build(tmp_path: Path, toolchain: Toolchain) -> None:
    (tmp_path / "cache").write_text("no folder")
    project = Project(tmp_path, toolchain)
    assert project.compiled() == ["80", "90a"]
    assert project.compiled() == ["80", "90a"]


def test_an_entry_gives_back_what_was_stored(tmp_path: Path) -> None:
    KernelCache(tmp_path).store(KEY, KERNEL)
    assert KernelCache(tmp_path).load(KEY, KERNEL.variant) == KERNEL
    assert [file.name for file in tmp_path.iterdir()] == [KEY]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1], id="cut short"),
        pytest.param(lambda data: data[:-1] + b"?", id="another last byte"),
        pytest.param(lambda data: b"0" + data[1:], id="another digest"),
        pytest.param(lambda data: b"", id="empty"),
    ],
)
def test_a_damaged_entry_is_none(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    KernelCache(tmp_path).store(KEY, KERNEL)
    (tmp_path / KEY).write_bytes(damage((tmp_path / KEY).read_bytes()))
    assert KernelCache(tmp_path).load(KEY, KERNEL.variant) is None


def test_an_entry_under_another_name_is_none(tmp_path: Path) -> None:
    KernelCache(tmp_path).store(KEY, KERNEL)
    (tmp_path / KEY).rename(tmp_path / "another")
    assert KernelCache(tmp_path).load("another", KERNEL.variant) is None


@pytest.mark.parametrize(
    "changed",
    [
        cache_key(stub(sm="80"), "s", "t"),
        cache_key(stub(symbol="other"), "s", "t"),
        cache_key(stub(defines={"UNROLL": 2}), "s", "t"),
        cache_key(stub(), "other", "t"),
        cache_key(stub(), "s", "other"),
    ],
)
def test_a_key_follows_sm_symbol_defines_sources_and_toolchain(changed: str) -> None:
    assert changed != cache_key(stub(), "s", "t")


def test_a_key_follows_the_options_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key(stub(), "s", "t")
    monkeypatch.setattr("kernels_src.compiling.FLAGS", ("-std=c++17", "-O1"))
    assert cache_key(stub(), "s", "t") != before


def test_the_entries_that_were_used_longest_ago_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    for number, key in enumerate(("first", "second", "third")):
        cache.store(key, KERNEL)
        os.utime(tmp_path / key, (number, number))
    assert cache.load("first", KERNEL.variant) is not None
    cache.prune(2 * (tmp_path / "third").stat().st_size)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "third"]


def test_the_folder_is_in_the_clone_or_what_the_variable_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert kernel_cache() == KernelCache(DEFAULT_FOLDER)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert kernel_cache(reuse=False) == KernelCache(tmp_path, reuse=False)


def test_the_command_says_how_far_it_is_and_what_came_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toolchain: Toolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("kernels_src.build.VARIANTS", (stub(),))
    monkeypatch.setattr("kernels_src.build.LAYOUTS", {LAYOUT.name: LAYOUT})
    monkeypatch.setattr("kernels_src.build.build", lambda *a, **k: build(*a, **k, sources=tmp_path / "sources"))
    write_source(tmp_path / "sources", SOURCE)
    said = []
    for more in ([], [], ["--only", "stub*"], ["--force"]):
        assert main(["--out", str(tmp_path / "out"), *more]) == 0
        said.append(capsys.readouterr().out.splitlines()[1:-1])
    compiled, cached, listed, forced = said
    assert compiled[0].startswith("  1/1 stub_scale_sm90a (")
    assert compiled[0].endswith(" bytes spilled")
    assert cached == ["  1 cached, 0 compiled"]
    assert listed[0].startswith("  1/1 stub_scale_sm90a (cached): ")
    assert forced[1] == "  0 cached, 1 compiled"
