from __future__ import annotations

from pathlib import Path

import pytest

from kernels_src import toolchain as module
from kernels_src.toolchain import PACKAGES, Toolchain, ToolchainError, find_toolchain, nvcc_on_path


def fake_nvcc(folder: Path, version: str) -> Path:
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 13.0, {version}'\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "nvcc_of_packages", lambda: (None, "no packages"))


def test_the_build_extra_names_exactly_the_packages_of_the_toolchain() -> None:
    project = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    extra = project.partition("\nbuild = [")[2].partition("]")[0]
    assert sorted(line.strip(' ",') for line in extra.split("\n") if line.strip()) == [
        f"{name}=={version}" for name, version in sorted(PACKAGES.items())
    ]


def test_an_nvcc_on_path_of_the_exact_version_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_packages: None
) -> None:
    nvcc = fake_nvcc(tmp_path, "V13.0.88")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_toolchain() == Toolchain(nvcc, "PATH")


def test_an_nvcc_on_path_of_another_version_is_refused_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path, "V12.9.41")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert nvcc_on_path() == (None, "nvcc on PATH reports 12.9.41, expected 13.0.88")


def test_without_a_toolchain_the_error_holds_the_one_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_packages: None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError) as caught:
        find_toolchain()
    assert str(caught.value).splitlines()[-1].strip() == (
        "python -m pip install nvidia-cuda-cccl==13.0.85 nvidia-cuda-crt==13.0.88 nvidia-cuda-nvcc==13.0.88"
        " nvidia-cuda-runtime==13.0.96 nvidia-nvvm==13.0.88"
    )


def test_a_package_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {**PACKAGES, "nvidia-nvvm": "13.1.80"}
    monkeypatch.setattr(module.metadata, "version", installed.__getitem__)
    assert module.nvcc_of_packages() == (None, "nvidia-nvvm is 13.1.80, expected 13.0.88")


def test_variables_that_change_what_nvcc_does_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/elsewhere")
    assert {"NVCC_APPEND_FLAGS", "CPLUS_INCLUDE_PATH"}.isdisjoint(Toolchain(Path("nvcc"), "PATH").environment())
