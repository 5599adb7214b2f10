"""``make demo``: from the source of a kernel to its launch, one step after the other; ``DEMO=full`` shows details.

Needs the CUDA toolchain of the build; a GPU only for the launch itself.
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
from demo_text import detail, heading, say  # noqa: E402

from cubin_runtime import Config, CubinRuntimeError  # noqa: E402
from cubin_runtime.artifacts.cubins.cubin import parse_cubin  # noqa: E402
from cubin_runtime.artifacts.library import Library  # noqa: E402
from cubin_runtime.artifacts.path import ArtifactPath  # noqa: E402
from cubin_runtime.artifacts.pins.pin import Pin  # noqa: E402
from cubin_runtime.kernels.native.layouts import LAYOUTS  # noqa: E402
from kernels_src.build import BuildStep, build, select  # noqa: E402
from kernels_src.kernel_cache import kernel_cache  # noqa: E402
from kernels_src.pinning import pin_of, with_pin  # noqa: E402
from kernels_src.publishing import publish, serve  # noqa: E402
from kernels_src.release import Release  # noqa: E402
from kernels_src.toolchain import find_toolchain  # noqa: E402
from kernels_src.variants import VARIANTS  # noqa: E402

RELEASE = "hopper-demo"
KERNELS = ("fmha_paged_decode_bf16_d128_rows8_sm90a", "fmha_paged_decode_bf16_d128_rows16_sm90a")
INTRODUCTION = """\
This demo takes two attention kernels from their source to a launch, as a serving host would get them:
it compiles them (the only step that needs a compiler), pins and publishes them, fetches them by path over
HTTP into an empty store, refuses a damaged copy, plans a decode, and launches it if there is a Hopper GPU.
It takes about 10 seconds, writes only to a temporary folder, and DEMO=full shows every detail."""
NEXT = """\
What to try next
   make install                                              the package and its kernels into your environment
   cubin-runtime doctor                                      what will work on this machine
   cubin-runtime explain --sm 90 --batch 64 --kv-len 8192    which kernel a call launches, and why
   ls examples/                                              decode loops, MLA, tree masks, a kernel of your own
   DEMO=full make demo                                       the same with registers, digests and all parameters"""
Result = TypeVar("Result")


def build_small_set(folder: Path) -> Release:
    """Compile the sm_90a variants into a release tree of its own name."""
    toolchain = find_toolchain()
    chosen = [variant for name in KERNELS for variant in select(VARIANTS, name)]
    say(f"nvcc compiles {len(chosen)} of the {len(VARIANTS)} kernels of kernels_src/, for Hopper GPUs.")
    detail(f"{toolchain.nvcc}")
    release = build(
        folder,
        chosen,
        LAYOUTS,
        toolchain,
        release=RELEASE,
        cache=kernel_cache(),
        progress=_show_step,
    )
    say(f"checksums.txt lists {release.files} files: the kernels, and kernels.json, which describes them.")
    return release


def _show_step(step: BuildStep) -> None:
    kernel, used = step.kernel, step.kernel.resources
    time_of = "compiled earlier" if step.seconds is None else f"{step.seconds:.1f} s"
    detail(
        f"{kernel.variant.name}: {len(kernel.cubin)} bytes, {used.registers} registers,"
        f" {used.spill_bytes} bytes spilled, {time_of}"
    )


def pin_release(release: Release, folder: Path) -> Path:
    """Write a user's pins file: the only thing that will be trusted about the release."""
    file = folder / "pins.toml"
    file.write_text(with_pin("", pin_of(release)))
    say(f"All that is trusted about {RELEASE}: the SHA-256 of checksums.txt, {release.manifest_sha256[:16]}...")
    detail(f"{file}: manifest_sha256 = {release.manifest_sha256}")
    return file


def fetch_over_http(library: Library, pin: Pin, url: str) -> ArtifactPath:
    """Fetch the whole release by artifact path into the empty store and verify it; the path of one cubin."""
    report = library.fetch(pin)
    say(f"{report.fetched} files, {report.bytes} bytes in {report.seconds:.2f} s from {url}, which is not trusted.")
    verified = library.verify(pin, complete=True)
    say(f"Each was compared with its digest: {verified.ok} ok, {len(verified.corrupt)} corrupt.")
    detail(f"the store is {library.store.root}")
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
            say(f"A mirror with one flipped bit is refused, with exit code {error.exit_code} of the command line.")
            detail(f"{error}")
        else:
            raise AssertionError(f"the damaged copy of {path} was accepted")
        stored = library.store.has(library.manifest(library.pins.get(RELEASE)).digests[path])
        if stored:
            raise AssertionError(f"the damaged copy of {path} is in the store")
        say("None of its bytes are in the store.")


def inspect(library: Library, path: ArtifactPath) -> None:
    """Print what the cubin's own bytes say of it."""
    artifact = library.load(path, fetch=False)
    cubin = parse_cubin(artifact.data)
    say(f"{path}: for {cubin.architecture}, {len(artifact.data)} bytes.")
    for kernel in cubin.kernels.values():
        size = sum(parameter.size for parameter in kernel.parameters)
        say(
            f"Its ELF states {size} bytes of parameters and at most {kernel.max_threads} threads per block."
            " A launch that differs is refused."
        )
        shared = f"{kernel.static_shared_bytes} bytes of static shared memory, 1024 of them CUDA's own"
        detail(f"{kernel.symbol}: {kernel.registers} registers, {shared}")
    detail(f"sha256 {artifact.sha256}, from {artifact.origin}")


def main() -> int:
    """Run all steps; 0 if each did what it should."""
    begin = time.monotonic()
    print(INTRODUCTION)
    with tempfile.TemporaryDirectory(prefix="cubin-runtime-demo-") as scratch:
        folder = Path(scratch)
        release = _step("Build two kernels", lambda: build_small_set(folder / "build"))
        pins = _step("Pin the release", lambda: pin_release(release, folder))
        published = folder / "published"
        _step("Publish it", lambda: _publish(release, published))
        with serve(published) as url:
            library = Library(Config(store=folder / "store", sources=(url,), pin_files=(pins,)))
            pin = library.pins.get(RELEASE)
            path = _step("Fetch it by path", lambda: fetch_over_http(library, pin, url))
        _step("Refuse a damaged copy", lambda: refuse_damaged(release, path, folder, pins))
        _step("Inspect a cubin", lambda: inspect(library, path))
        _step("Plan and launch a decode", lambda: plan_and_launch(library, pin))
        _step("Check NVIDIA's published release", lambda: check_published_release(folder / "store"))
    print(f"\nAll steps done in {time.monotonic() - begin:.1f} s.\n\n{NEXT}")
    return 0


def _publish(release: Release, published: Path) -> None:
    place = publish(release.folder, published)
    say("A release is a folder of files: any web server, bucket, wheel or shared disk can serve it.")
    detail(f"{place}")


def _step(title: str, action: Callable[[], Result]) -> Result:
    heading(title)
    return action()


if __name__ == "__main__":
    raise SystemExit(main())
