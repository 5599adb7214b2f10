"""``make demo``: from an artifact path to a kernel that ran, one step after the other, said plainly.

Needs the CUDA toolchain of the build; a GPU only for the last part of the launch.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo_launch import plan_and_launch  # noqa: E402
from demo_release import check_published_release  # noqa: E402
from demo_text import detail, heading  # noqa: E402

from cubin_runtime import Config, CubinRuntimeError  # noqa: E402
from cubin_runtime.artifacts.cubins.cubin import parse_cubin  # noqa: E402
from cubin_runtime.artifacts.library import Library  # noqa: E402
from cubin_runtime.artifacts.path import ArtifactPath  # noqa: E402
from cubin_runtime.artifacts.pins.pin import Pin  # noqa: E402
from cubin_runtime.kernels.native.layouts import LAYOUTS  # noqa: E402
from kernels_src.build import build, select  # noqa: E402
from kernels_src.pinning import pin_of, with_pin  # noqa: E402
from kernels_src.publishing import publish, serve  # noqa: E402
from kernels_src.release import Release  # noqa: E402
from kernels_src.toolchain import find_toolchain  # noqa: E402
from kernels_src.variants import VARIANTS  # noqa: E402

RELEASE = "hopper-demo"
KERNELS = "fmha_*_sm90a"
Result = TypeVar("Result")


def build_small_set(folder: Path) -> Release:
    """Compile the sm_90a variants into a release tree of its own name."""
    toolchain = find_toolchain()
    chosen = select(VARIANTS, KERNELS)
    detail(f"{len(chosen)} of {len(VARIANTS)} kernels with {toolchain.nvcc}")
    release = build(
        folder,
        chosen,
        LAYOUTS,
        toolchain,
        release=RELEASE,
        progress=lambda kernel, seconds: detail(
            f"{kernel.variant.name}: {len(kernel.cubin)} bytes, {kernel.resources.registers} registers,"
            f" {kernel.resources.spill_bytes} bytes spilled, {seconds:.1f} s"
        ),
    )
    detail(f"checksums.txt lists {release.files} files; its SHA-256 is {release.manifest_sha256}")
    return release


def pin_release(release: Release, folder: Path) -> Path:
    """Write a user's pins file: the only thing that will be trusted about the release."""
    file = folder / "pins.toml"
    file.write_text(with_pin("", pin_of(release)))
    detail(f"{file} pins {RELEASE} to that digest")
    return file


def fetch_over_http(library: Library, pin: Pin, url: str) -> ArtifactPath:
    """Fetch the whole release by artifact path into the empty store and verify it; the path of one cubin."""
    detail(f"from {url}, whatever it serves, into {library.store.root}")
    report = library.fetch(pin)
    detail(f"{report.fetched} files, {report.bytes} bytes in {report.seconds:.2f} s, each checked by its digest")
    verified = library.verify(pin, complete=True)
    detail(f"verify: {verified.ok} ok, {len(verified.corrupt)} corrupt, {len(verified.missing)} missing")
    return next(path for path in library.select(pin) if path.name.endswith(".cubin"))


def refuse_damaged(release: Release, path: ArtifactPath, folder: Path, pins: Path) -> None:
    """Serve a copy with one bit turned over and show what becomes of fetching it."""
    mirror = folder / "damaged"
    mirror.mkdir()
    shutil.copytree(release.folder, mirror / release.folder.name)
    file = mirror / path.text
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with serve(mirror) as url:
        library = Library(Config(store=folder / "store-2", sources=(url,), pin_files=(pins,)))
        try:
            library.fetch(library.pins.get(RELEASE), [path])
        except CubinRuntimeError as error:
            detail(f"refused, as it must be (exit code {error.exit_code}): {error}")
        else:
            raise AssertionError(f"the damaged copy of {path} was accepted")
        stored = library.store.has(library.manifest(library.pins.get(RELEASE)).digests[path])
        detail(f"in the store afterwards: {'the damaged bytes' if stored else 'nothing'}")


def inspect(library: Library, path: ArtifactPath) -> None:
    """Print what the cubin's own bytes say of it."""
    artifact = library.load(path, fetch=False)
    cubin = parse_cubin(artifact.data)
    detail(f"{path}")
    detail(f"{cubin.architecture}, {len(artifact.data)} bytes, sha256 {artifact.sha256}, from {artifact.origin}")
    for kernel in cubin.kernels.values():
        sizes = ", ".join(str(parameter.size) for parameter in kernel.parameters)
        detail(
            f"{kernel.symbol}: parameters of {sizes} bytes, at most {kernel.max_threads} threads,"
            f" {kernel.registers} registers, {kernel.static_shared_bytes} bytes of static shared memory"
            " (from sm_90 on 1024 of them are CUDA's own)"
        )


def main() -> int:
    """Run all steps; 0 if each did what it should."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cubin-runtime-demo-") as scratch:
        folder = Path(scratch)
        release = _step("Build two kernels", lambda: build_small_set(folder / "build"))
        pins = _step("Pin them", lambda: pin_release(release, folder))
        published = folder / "published"
        _step("Publish them to a folder", lambda: detail(f"{publish(release.folder, published)}"))
        with serve(published) as url:
            library = Library(Config(store=folder / "store", sources=(url,), pin_files=(pins,)))
            pin = library.pins.get(RELEASE)
            path = _step("Fetch by artifact path", lambda: fetch_over_http(library, pin, url))
        _step("Refuse a damaged copy", lambda: refuse_damaged(release, path, folder, pins))
        _step("Inspect a cubin", lambda: inspect(library, path))
        _step("Plan and launch a decode", lambda: plan_and_launch(library, pin))
        _step("Check NVIDIA's published release", lambda: check_published_release(folder / "store"))
    print(f"\nAll steps done in {time.monotonic() - begin:.1f} s.")
    return 0


def _step(title: str, action: Callable[[], Result]) -> Result:
    heading(title)
    return action()


if __name__ == "__main__":
    raise SystemExit(main())
