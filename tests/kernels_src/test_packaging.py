from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cubin_runtime._version import KERNELS_VERSION, __version__
from kernels_src.packaging import build_wheel
from kernels_src.pinning import pin_of, with_pin
from kernels_src.release import Release

ROOT = Path(__file__).parents[2]
COMMAND = "from cubin_runtime.cli import main; raise SystemExit(main())"


@pytest.fixture(scope="module")
def data_wheel(stub_release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(stub_release.folder, tmp_path_factory.mktemp("data-wheel"), isolated=False)


@pytest.fixture(scope="module")
def package_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the package, built from a copy so that the checkout stays clean."""
    root = tmp_path_factory.mktemp("package-wheel")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(lambda name: (ROOT / name).is_file(), files):
        target = root / "copy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(root),
        str(root / "copy"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next(root.glob("*.whl"))


def test_the_data_wheel_carries_the_tree_byte_for_byte(data_wheel: Path, stub_release: Release) -> None:
    with zipfile.ZipFile(data_wheel) as archive:
        prefix = "cubin_runtime_kernels/hopper-0.0.1/"
        carried = {n.removeprefix(prefix): archive.read(n) for n in archive.namelist() if n.startswith(prefix)}
    tree = stub_release.folder
    assert carried == {f.relative_to(tree).as_posix(): f.read_bytes() for f in tree.rglob("*") if f.is_file()}


def test_the_data_wheel_holds_no_code_and_runs_on_any_platform(data_wheel: Path) -> None:
    assert data_wheel.name == f"cubin_runtime_kernels-{KERNELS_VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(data_wheel) as archive:
        code = [name for name in archive.namelist() if name.endswith((".py", ".so"))]
    assert code == ["cubin_runtime_kernels/__init__.py"]


def test_two_builds_of_one_tree_give_the_same_wheel(tmp_path: Path, data_wheel: Path, stub_release: Release) -> None:
    again = build_wheel(stub_release.folder, tmp_path, isolated=False)
    assert again.read_bytes() == data_wheel.read_bytes()


def test_a_folder_that_is_no_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checksums\.txt"):
        build_wheel(tmp_path, tmp_path, isolated=False)


def test_the_extra_asks_for_the_data_wheel_that_is_launched_by_default() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nkernels = ["cubin-runtime-kernels=={KERNELS_VERSION}"]\n' in project


def test_the_package_wheel_is_pure_python_with_its_pins(package_wheel: Path) -> None:
    assert package_wheel.name == f"cubin_runtime-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(package_wheel) as archive:
        names = archive.namelist()
    assert "cubin_runtime/artifacts/pins/pins.toml" in names
    assert "cubin_runtime/py.typed" in names
    assert "cubin_runtime/testing/standin.c" in names
    assert [n for n in names if not n.startswith(("cubin_runtime/", f"cubin_runtime-{__version__}.dist-info/"))] == []
    assert [n for n in names if n.endswith((".so", ".cubin", ".cu"))] == []


def test_both_wheels_installed_the_command_finds_and_verifies_the_tree(
    tmp_path: Path, package_wheel: Path, data_wheel: Path, stub_release: Release
) -> None:
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
    ]
    subprocess.run([*install, str(package_wheel), str(data_wheel)], check=True, capture_output=True)
    pins = tmp_path / "pins.toml"
    pins.write_text(with_pin("", pin_of(stub_release)))
    said = subprocess.run(
        [sys.executable, "-c", COMMAND, "verify", "--complete", "--tree", "package", "hopper-0.0.1"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(site),
            "CUBIN_RUNTIME_PINS": str(pins),
            "CUBIN_RUNTIME_CACHE": str(tmp_path / "store"),
            "CUBIN_RUNTIME_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr


def test_the_data_wheel_installs_beside_any_version_of_the_package(data_wheel: Path) -> None:
    with zipfile.ZipFile(data_wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert "Requires-Dist" not in archive.read(name).decode()
