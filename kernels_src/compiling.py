"""Compile a variant with nvcc, read what ptxas reports, and check the cubin before it is shipped."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cubin_runtime.artifacts.cubins.cubin import KernelFacts, parse_cubin
from cubin_runtime.artifacts.cubins.elf import read_elf
from cubin_runtime.launch.structs import StructLayout

from .toolchain import Toolchain
from .variants import SHARED_BYTES_PER_BLOCK, Variant

# No -lineinfo: it writes paths into the cubin, and the bytes must not depend on where it was built.
FLAGS = ("-std=c++17", "-O3")
COMPILE_SECONDS = 600

_RESOURCES = re.compile(r"ptxas info\s*: Compiling entry function '([^']+)'(.*?)(?=ptxas info\s*: Compiling|\Z)", re.S)
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_DYNAMIC_SHARED = re.compile(r"^\s*// dynamic shared bytes: (\d+)$", re.MULTILINE)
# The compiler waits for each product where it finds no registers for those in flight. The kernels named here, which it
# says this of, are right, and slower than they could be.
_SERIALISED = "wgmma.mma_async instructions are serialized"
_SERIALISED_SYMBOLS = re.compile(r"fmha_paged_decode_(e4m3_q_)?(bf|fp)16_d(64|128)_rows(64|128)_segments")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# Symbols with internal linkage contain a hash of the source file's path.
_PATH_DEPENDENT = ("_INTERNAL_", "_GLOBAL__N_")


class BuildError(Exception):
    """A kernel does not compile, or its cubin must not be shipped; the message names the variant and why."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel needs, as the compiler reports it.

    Threads are those of a block; registers and spilled bytes (stores and loads) are per thread; static and dynamic
    shared memory in bytes per block.
    """

    threads: int
    registers: int
    spill_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A variant's cubin and resources."""

    variant: Variant
    cubin: bytes
    resources: Resources


def flags_of(variant: Variant) -> tuple[str, ...]:
    """The options that determine the cubin's bytes, in order; none of them is a path.

    ``KERNEL_NAME`` is defined for every variant, so that source and list agree.
    """
    values = {"KERNEL_NAME": variant.symbol, **variant.defines}
    defines = (f"-D{name}={values[name]}" for name in sorted(values))
    return (f"-arch=sm_{variant.sm}", *FLAGS, *defines)


def compile_command(variant: Variant, toolchain: Toolchain, root: Path, include: Path, output: Path) -> list[str]:
    """The arguments that compile ``variant`` to ``output``; see ``compile_variant`` for the rest."""
    command = [str(toolchain.nvcc), "-cubin", *flags_of(variant), "-Xptxas", "-v", "-I", str(include)]
    return [*command, "-o", str(output), str(root / variant.source)]


def compile_variant(
    variant: Variant, layout: StructLayout, toolchain: Toolchain, root: Path, include: Path, output: Path
) -> CompiledKernel:
    """Compile one variant to ``output`` and check it.

    Args:
        variant: what to build.
        layout: the parameter struct that the kernel must take, alone and by value.
        toolchain: the exact nvcc.
        root: the folder that ``variant.source`` is relative to.
        include: the folder of the generated struct headers.
        output: the cubin to write.

    Raises:
        BuildError: nvcc failed (its output is in the message), or the kernel must not be shipped.
    """
    command = compile_command(variant, toolchain, root, include, output)
    with tempfile.TemporaryDirectory(prefix="ptx-") as kept:
        reported = _run([*command, "--keep", "--keep-dir", kept], toolchain, variant)
        ptx = (Path(kept) / Path(variant.source).name).with_suffix(".ptx").read_text()
    cubin = output.read_bytes()
    facts = check_cubin(variant, cubin, layout)
    resources = parse_resources(reported, variant.symbol, facts.max_threads or 0, dynamic_shared_bytes(variant, ptx))
    check_shared_memory(variant, resources)
    return CompiledKernel(variant, cubin, resources)


def check_kernel(kernel: CompiledKernel, layout: StructLayout) -> None:
    """Check a kernel that was compiled earlier as ``compile_variant`` checks one.

    Raises:
        BuildError: it must not be shipped.
    """
    check_cubin(kernel.variant, kernel.cubin, layout)
    check_shared_memory(kernel.variant, kernel.resources)


def _run(command: Sequence[str], toolchain: Toolchain, variant: Variant) -> str:
    try:
        done = subprocess.run(
            command,
            env=toolchain.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{variant.name}: nvcc: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{variant.name}: nvcc exited with {done.returncode}\n{done.stderr}{done.stdout}")
    return done.stderr + done.stdout


def dynamic_shared_bytes(variant: Variant, ptx: str) -> int:
    """The dynamic shared memory of a kernel as ``dynamic_shared_storage`` of the sources states it; 0 without any.

    Raises:
        BuildError: the PTX states several sizes.
    """
    sizes = {int(size) for size in _DYNAMIC_SHARED.findall(ptx)}
    if len(sizes) > 1:
        raise BuildError(f"{variant.name}: the PTX states dynamic shared memory of {sorted(sizes)} bytes")
    return max(sizes, default=0)


def parse_resources(reported: str, symbol: str, threads: int, dynamic_shared_bytes: int) -> Resources:
    """Resources of ``symbol``: registers, spills and static shared memory from the output of ``ptxas -v``.

    Raises:
        BuildError: the output does not mention the symbol, or says that its warpgroup products wait for each other.
    """
    if _SERIALISED in reported and not _SERIALISED_SYMBOLS.fullmatch(symbol):
        raise BuildError(f"{symbol}: ptxas says that {_SERIALISED}; give the warpgroups other numbers of registers")
    for name, text in _RESOURCES.findall(reported):
        if name == symbol and (registers := _REGISTERS.search(text)) and (spills := _SPILLS.search(text)):
            shared = _SHARED.search(text)
            return Resources(
                threads=threads,
                registers=int(registers[1]),
                spill_bytes=int(spills[1]) + int(spills[2]),
                static_shared_bytes=int(shared[1]) if shared else 0,
                dynamic_shared_bytes=dynamic_shared_bytes,
            )
    raise BuildError(f'{symbol}: ptxas reported no resources of it; is it an extern "C" __global__ function?')


def _symbol_names(cubin: bytes) -> list[str]:
    elf = read_elf(cubin)
    return [name.decode("utf-8", "replace") for name in elf.content(elf.by_name[".strtab"]).split(b"\0") if name]


def check_cubin(variant: Variant, cubin: bytes, layout: StructLayout) -> KernelFacts:
    """Refuse a cubin that must not be shipped, and return the facts of its kernel.

    Raises:
        BuildError: a symbol whose name depends on the directory, another architecture, no such kernel,
            parameters other than one struct of ``layout.size`` bytes, or no ``__launch_bounds__``.
    """
    names = _symbol_names(cubin)
    bad = [name for name in names if any(mark in name for mark in _PATH_DEPENDENT)]
    if bad:
        raise BuildError(
            f"{variant.name}: the symbols {', '.join(bad)} have internal linkage, so the bytes depend on the"
            " directory; give them external linkage (no static, no unnamed namespace)"
        )
    facts = parse_cubin(cubin)
    if str(facts.architecture) != f"sm_{variant.sm}":
        raise BuildError(f"{variant.name}: the cubin is for {facts.architecture}, expected sm_{variant.sm}")
    kernel = facts.kernels.get(variant.symbol)
    if kernel is None:
        raise BuildError(f"{variant.name}: the cubin has the kernels {', '.join(facts.kernels)}, not {variant.symbol}")
    sizes = [parameter.size for parameter in kernel.parameters]
    if sizes != [layout.size]:
        raise BuildError(f"{variant.name}: parameters of {sizes} bytes, expected {layout.name} of {layout.size}")
    if kernel.max_threads is None:
        raise BuildError(f"{variant.name}: the kernel states no __launch_bounds__, which are the threads of a launch")
    return kernel


def check_shared_memory(variant: Variant, resources: Resources) -> None:
    """Refuse a kernel that needs more shared memory than a block of the SM may have.

    Raises:
        BuildError: it does.
    """
    limit = SHARED_BYTES_PER_BLOCK[variant.base_sm]
    dynamic, static = resources.dynamic_shared_bytes, resources.static_shared_bytes
    if dynamic + static > limit:
        raise BuildError(
            f"{variant.name}: {dynamic} dynamic + {static} static bytes of shared memory, sm_{variant.sm} allows"
            f" {limit} per block"
        )
