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


def toolkit(root: Path) -> Toolchain:
    """An nvcc that names the files of a toolkit below ``root``, and a host compiler beside them."""
    for name in (
        "bin/nvcc",
        "bin/nvcc.profile",
        "bin/ptxas",
        "bin/gcc",
        "nvvm/cicc",
        "libdevice/a.bc",
        "include/x/y.h",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "words").write_text(
        f"#$ _HERE_={root}/bin\n#$ CICC_PATH={root}/nvvm\n#$ NVVMIR_LIBRARY_DIR={root}/libdevice\n"
        f'#$ INCLUDES="-I{root}/include"  \n#$ SYSTEM_INCLUDES="-isystem" "{root}/include/x"  \n'
        f"#$ {root}/bin/gcc -E -x c++ /dev/null\n"
    )
    (root / "nvcc").write_text('#!/bin/sh\ncat "$(dirname "$0")/words" >&2\n')
    (root / "nvcc").chmod(0o755)
    return Toolchain(root / "nvcc", "PATH")


@pytest.mark.parametrize(
    "changed", ["nvcc", "bin/nvcc", "bin/ptxas", "bin/gcc", "nvvm/cicc", "libdevice/a.bc", "include/x/y.h"]
)
def test_the_digest_of_a_toolchain_follows_its_files(tmp_path: Path, changed: str) -> None:
    toolchain = toolkit(tmp_path)
    before = toolchain.sha256()
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + " ")
    assert toolchain.sha256() != before


def test_the_digest_of_a_toolchain_is_the_same_in_another_folder(tmp_path: Path) -> None:
    assert toolkit(tmp_path / "one").sha256() == toolkit(tmp_path / "other").sha256()


def test_a_toolchain_whose_files_are_not_there_has_no_digest(tmp_path: Path) -> None:
    toolchain = toolkit(tmp_path)
    (tmp_path / "bin" / "ptxas").unlink()
    with pytest.raises(ToolchainError, match="bin/ptxas"):
        toolchain.sha256()
    (tmp_path / "words").write_text("")
    with pytest.raises(ToolchainError, match="nvcc --dryrun names no CICC_PATH, INCLUDES"):
        toolchain.sha256()
    with pytest.raises(ToolchainError, match="does not say what it would run"):
        Toolchain(Path("no-nvcc"), "PATH").sha256()
