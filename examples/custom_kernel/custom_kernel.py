"""A kernel of your own: compile it, make a release of it, pin the release, fetch and verify it, launch it.

    make install  # in a clone, then the line with which it ends
    python examples/custom_kernel/custom_kernel.py

It takes the nvcc of NVCC=/path/to/nvcc, of PATH, or of pip install 'cubin-runtime[build]'.
A host that serves needs the last three steps alone: no compiler, and only bytes whose digest is pinned.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from cubin_runtime.testing import require_module

require_module("numpy", "pip install numpy")

import numpy as np

from cubin_runtime import Config, MissingError
from cubin_runtime.artifacts.library import Library
from cubin_runtime.launch import Field, StructLayout
from cubin_runtime.testing import CubinUnderTest, Device, on_first_device

SOURCE = Path(__file__).with_name("rms_norm.cu")
RELEASE, FILE = "my-kernels-1.0", "rms_norm.cubin"
RMS_NORM = StructLayout.declare(
    "RmsNormParams",
    (
        Field("x", "ptr", "fp32 [rows, columns]"),
        Field("weight", "ptr", "fp32 [columns]"),
        Field("out", "ptr", "fp32 [rows, columns]"),
        Field("columns", "int32", "columns of a row"),
        Field("epsilon", "float", "added to the mean of squares"),
    ),
)


def nvcc() -> str:
    """The compiler of CUDA; an error says what installs it."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")  # of pip install 'cubin-runtime[build]'
    found = shutil.which(os.environ.get("NVCC", "nvcc"), path=f"{os.environ.get('PATH', '')}{os.pathsep}{wheels}")
    if found is None:
        raise MissingError(
            "no nvcc: put nvcc on PATH, or set NVCC=/path/to/nvcc, or pip install 'cubin-runtime[build]'"
        )
    return found


def compile_release(folder: Path, architecture: str) -> Path:
    """Compile the kernel and write ``checksums.txt`` beside it: that is a release. Its folder."""
    release = folder / RELEASE
    release.mkdir(parents=True)
    subprocess.run([nvcc(), f"-arch={architecture}", "-cubin", "-o", str(release / FILE), str(SOURCE)], check=True)
    digest = hashlib.sha256((release / FILE).read_bytes()).hexdigest()
    (release / "checksums.txt").write_text(f"{digest}  {FILE}\n")
    return release


def pin(release: Path, file: Path) -> None:
    """Trust this release: the digest of its list goes into a pin file, which travels apart from the files.

    ``cubin-runtime pin my-kernels-1.0 --sha256 HEX --source PLACE`` writes the same into your own pins.
    """
    manifest = hashlib.sha256((release / "checksums.txt").read_bytes()).hexdigest()
    size = (release / FILE).stat().st_size
    file.write_text(
        f'[[pin]]\nname = "{RELEASE}"\npath = "{RELEASE}"\nmanifest_sha256 = "{manifest}"\n'
        f'files = 1\nbytes = {size}\nmax_file_bytes = 8388608\nlicence = "none"\nsources = []\n'
    )


def main(device: Device) -> None:
    """All steps, in a temporary folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        major, minor = device.facts.capability
        release = compile_release(folder / "built", f"sm_{major}{minor}{'a' if major >= 9 else ''}")
        print(f"compiled  {SOURCE.name} for sm_{major}{minor}: {(release / FILE).stat().st_size} bytes")
        pin(release, folder / "pins.toml")
        print(f"pinned    {RELEASE} in a file of its own")

        # From here on, what a serving host does.
        config = Config(store=folder / "store", sources=(str(folder / "built"),), pin_files=(folder / "pins.toml",))
        library = Library(config)
        report = library.fetch(library.pins.get(RELEASE))
        artifact = library.load(f"{RELEASE}/{FILE}", fetch=False)
        print(f"fetched   {report.fetched} file, sha256 {artifact.sha256[:16]}..., from {artifact.origin}")
        kernel = CubinUnderTest(FILE, RMS_NORM, data=artifact.data)
        print(
            f"checked   {RMS_NORM.size} bytes of parameters, {kernel.facts.registers} registers, {kernel.architecture}"
        )
        launch(device, kernel)


def launch(device: Device, kernel: CubinUnderTest, rows: int = 64, columns: int = 4096) -> None:
    """Launch it on random rows and compare with float64."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape, dtype=np.float32) for shape in ((rows, columns), (columns,)))
    tensors = {"x": device.array(x), "weight": device.array(weight), "out": device.poisoned(x.shape, "float32")}
    device.launch(kernel, grid=rows, block=256, **tensors, columns=columns, epsilon=1e-6)
    print(f"launched  {rows} blocks on {device.facts.name}")
    if device.computes:
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight
        error = np.abs(device.numpy(tensors["out"]) - expected).max()
        assert error < 1e-4, f"off by {error}"
        print(f"compared  with float64: off by at most {error:.1e}")


if __name__ == "__main__":
    on_first_device(main)
