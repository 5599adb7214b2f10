"""Build the native kernels into a release tree: ``python -m kernels_src.build --out DIR [--only GLOB] [--force]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cubin_runtime.kernels.native import constants
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.launch.structs import StructLayout

from .compiling import BuildError, CompiledKernel, check_kernel, compile_command, compile_variant
from .includes import sources_sha256
from .kernel_cache import KernelCache, cache_key, kernel_cache
from .release import RELEASE, Release, kernel_entry, write_release
from .toolchain import Toolchain, ToolchainError, find_toolchain
from .variants import VARIANTS, Variant

SOURCES = Path(__file__).resolve().parent
DEFAULT_JOBS = min(2, os.cpu_count() or 1)
COMPILE_COMMANDS = "compile_commands.json"


@dataclass(frozen=True, slots=True)
class BuildStep:
    """A kernel that is there, the ``number``-th of ``total``; ``seconds`` of its compilation, None from the cache."""

    kernel: CompiledKernel
    number: int
    total: int
    seconds: float | None


def select(variants: Sequence[Variant], pattern: str) -> tuple[Variant, ...]:
    """The variants whose name matches the glob; names occur once.

    Raises:
        BuildError: a name occurs twice, or nothing matches.
    """
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BuildError(f"variants listed twice: {', '.join(twice)}")
    chosen = tuple(variant for variant in variants if fnmatchcase(variant.name, pattern))
    if not chosen:
        raise BuildError(f"no variant matches {pattern!r}; there are: {', '.join(sorted(names)) or 'none'}")
    return chosen


def generated_headers(layouts: Mapping[str, StructLayout]) -> dict[str, str]:
    """File name to text: the shared numbers, and each layout's struct with the assertions that tie C++ to Python."""
    return {constants.HEADER: constants.cpp_header()} | {f"{x.name}.h": x.c_declaration() for x in layouts.values()}


def write_headers(folder: Path, layouts: Mapping[str, StructLayout]) -> None:
    """Write the generated headers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in generated_headers(layouts).items():
        (folder / name).write_text(text)


def write_compile_commands(
    out: Path, variants: Sequence[Variant], toolchain: Toolchain, sources: Path, include: Path, release: str
) -> None:
    """Write ``compile_commands.json``, which tells editors and clangd the options and the generated headers."""
    entries = []
    for variant in variants:
        cubin = out / release / variant.file
        command = compile_command(variant, toolchain, sources, include, cubin)
        source = str(sources / variant.source)
        entries.append({"directory": str(out), "file": source, "output": str(cubin), "arguments": command})
    (out / COMPILE_COMMANDS).write_text(json.dumps(entries, indent=1) + "\n")


def build(
    out: Path,
    variants: Sequence[Variant],
    layouts: Mapping[str, StructLayout],
    toolchain: Toolchain,
    *,
    sources: Path = SOURCES,
    release: str = RELEASE,
    jobs: int = DEFAULT_JOBS,
    cache: KernelCache | None = None,
    progress: Callable[[BuildStep], None] | None = None,
) -> Release:
    """Compile ``variants`` and write the tree ``out/release``, the same bytes with and without a cache.

    Beside it, ``out`` gets the generated headers and ``compile_commands.json``, before anything is compiled.

    Args:
        out: the folder that holds releases.
        variants: what to compile; their ``source`` is relative to ``sources``.
        layouts: struct name to layout.
        toolchain: the exact nvcc.
        sources: the folder of kernel sources.
        release: the name of the release folder.
        jobs: compilations at a time.
        cache: kernels of earlier builds; None: compile all, keep none.
        progress: called for each kernel, first those of the cache, then as compilations end.

    Raises:
        BuildError: an unknown struct, a failed compilation, sources that changed meanwhile, or a cubin that must not be
            shipped.
        ToolchainError: with a cache, files of the compiler cannot be read.
    """
    unknown = sorted({variant.struct for variant in variants} - set(layouts))
    if unknown:
        raise BuildError(f"unknown structs {', '.join(unknown)}; params.py declares {', '.join(sorted(layouts))}")
    out, sources = out.resolve(), sources.resolve()
    include = out / "generated"
    write_headers(include, layouts)
    write_compile_commands(out, variants, toolchain, sources, include, release)
    headers = generated_headers(layouts)
    digests = {source: sources_sha256(sources, source, headers) for source in {x.source for x in variants}}
    toolchain_sha256 = toolchain.sha256() if cache else ""
    keys = {x.name: cache_key(x, digests[x.source], toolchain_sha256) for x in variants}
    kernels: dict[str, CompiledKernel] = {}

    def add(kernel: CompiledKernel, seconds: float | None) -> None:
        kernels[kernel.variant.name] = kernel
        if progress is not None:
            progress(BuildStep(kernel, len(kernels), len(variants), seconds))

    def compile_one(variant: Variant, output: Path) -> tuple[CompiledKernel, float]:
        begin = time.monotonic()
        kernel = compile_variant(variant, layouts[variant.struct], toolchain, sources, include, output)
        if sources_sha256(sources, variant.source, headers) != digests[variant.source]:
            raise BuildError(f"{variant.name}: its sources changed while it was compiled; build again")
        if cache:
            cache.store(keys[variant.name], kernel)
        return kernel, time.monotonic() - begin

    for variant in variants:
        if cache and (cached := cache.load(keys[variant.name], variant)):
            check_kernel(cached, layouts[variant.struct])
            add(cached, None)
    missing = [variant for variant in variants if variant.name not in kernels]
    _compile_all(missing, compile_one, jobs, add)
    if cache and missing:
        cache.prune()
    entries = [kernel_entry(kernels[x.name], layouts[x.struct], digests[x.source]) for x in variants]
    return write_release(out, release, {x.file: kernels[x.name].cubin for x in variants}, entries)


def _compile_all(
    variants: Sequence[Variant],
    compile_one: Callable[[Variant, Path], tuple[CompiledKernel, float]],
    jobs: int,
    add: Callable[[CompiledKernel, float], None],
) -> None:
    """Compile ``jobs`` variants at a time and ``add`` each as it ends; the first error ends all."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as scratch, ThreadPoolExecutor(max(1, jobs)) as pool:
        futures = [pool.submit(compile_one, x, Path(scratch) / f"{x.name}.cubin") for x in variants]
        try:
            for future in as_completed(futures):
                add(*future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _print_step(step: BuildStep) -> None:
    used = step.kernel.resources
    time_of = "cached" if step.seconds is None else f"{step.seconds:.1f} s"
    print(
        f"  {step.number}/{step.total} {step.kernel.variant.name} ({time_of}): {len(step.kernel.cubin)} bytes,"
        f" {used.registers} registers, {used.spill_bytes} bytes spilled",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build from the command line; 1 and a message on the standard error if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kernels_src.build", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the release folder")
    parser.add_argument("--only", default="*", metavar="GLOB", help="build only variants whose name matches")
    parser.add_argument("--jobs", type=int, default=DEFAULT_JOBS, help="compilations at a time (%(default)s)")
    parser.add_argument("--release", default=RELEASE, help="name of the release folder (%(default)s)")
    parser.add_argument("--force", action="store_true", help="compile every kernel, also those in the cache")
    parser.add_argument("--headers-only", action="store_true", help="write only the generated headers into --out")
    given = parser.parse_args(arguments)
    try:
        if given.headers_only:
            write_headers(given.out, LAYOUTS)
            return 0
        toolchain = find_toolchain()
        chosen = select(VARIANTS, given.only)
        print(f"{len(chosen)} kernels with {toolchain.nvcc} (from {toolchain.origin})", flush=True)
        compiled: list[BuildStep] = []

        def show(step: BuildStep) -> None:
            if step.seconds is not None:
                compiled.append(step)
            # Of a whole release only what is compiled is news; with a pattern, somebody looks at these kernels.
            if step.seconds is not None or given.only != "*":
                _print_step(step)

        release = build(
            given.out,
            chosen,
            LAYOUTS,
            toolchain,
            release=given.release,
            jobs=given.jobs,
            cache=kernel_cache(reuse=not given.force),
            progress=show,
        )
    except (BuildError, ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"  {len(chosen) - len(compiled)} cached, {len(compiled)} compiled")
    print(f"{release.folder}: {release.files} files, {release.bytes} bytes, checksums.txt {release.manifest_sha256}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
