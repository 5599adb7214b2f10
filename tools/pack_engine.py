"""Pack a whole engine for a machine with SM90 GPUs, PyTorch 2.11 and no network: see benchmarks/engine_run.sh.

    python tools/pack_engine.py vllm build/vllm.txz
    python tools/pack_engine.py sglang build/sglang.txz

The archive has one folder, ``site``, for PYTHONPATH: the engine and the packages of ``vllm_packages.txt`` or
``sglang_packages.txt``, which come from the package index. vLLM is 0.26.0, the last release for PyTorch 2.11; SGLang
0.5.16 is one of those. Machine code that the benchmarks do not run is zeroed, so that 400 MB pack into 30: code for
other GPUs, quantized matrix products of vLLM, and of its FlashAttention-3 what is not bf16 at head dimensions 64, 128
and 256, e4m3 at 64 and 128, or of MLA; SGLang's FlashAttention-3 is left out. Nothing of this belongs into this
repository.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PYTHON = ("--python-version=3.12", "--implementation=cp")
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)
PLATFORMS = (
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC),
    *("--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"),
)
LEFT_OUT = ("xgrammar/lib", "mistral_common/data", "pycountry/locales", "**/__pycache__")
FLASH_ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"


class Engine(NamedTuple):
    """What is packed: wheels; libraries with machine code, and the architectures whose code stays; what is left out.

    Entries of containers that have exactly the architectures of ``unused`` are zeroed too.
    """

    wheels: tuple[str, ...]
    libraries: tuple[str, ...]
    architectures: frozenset[int]
    unused: frozenset[int]
    left_out: tuple[str, ...]


ENGINES = {
    "vllm": Engine(
        ("vllm==0.26.0",),
        ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", FLASH_ATTENTION),
        frozenset({90}),
        frozenset({80, 90, 120}),
        (
            *("vllm/vllm-rs", "vllm/third_party/fmha_sm100", "vllm/_qutlass_C.abi3.so"),
            *("vllm/third_party/deep_gemm/_C.cpython-31[0134]*", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"),
        ),
    ),
    "sglang": Engine(
        ("sglang==0.5.16", "sglang-kernel==0.4.5"),
        ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/flashmla_ops.abi3.so"),
        frozenset({80, 90}),
        frozenset(),
        (
            *("sgl_kernel/sm100", "sgl_kernel/flash_ops.abi3.so", "sgl_kernel/infllm_ops*"),
            *("sglang/multimodal_gen", "sglang/srt/grpc/*.so"),
            "torchao/_C_cutlass_90a.abi3.so",
        ),
    ),
}

# The header of a container of machine code (.nv_fatbin), and that of each of its entries: NVIDIA's fat binary format.
MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ")
CUBIN = 2


class Entry(NamedTuple):
    """An entry of a container: its kind, its architecture, and where its bytes lie in the library."""

    kind: int
    architecture: int
    begin: int
    end: int


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("archive", type=Path)
    chosen = parser.parse_args()
    engine, archive = ENGINES[chosen.engine], chosen.archive.resolve()
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        needed = Path(__file__).with_name(f"{chosen.engine}_packages.txt")
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps")
        asked = (*pip, "--only-binary=:all:", *PYTHON, *PLATFORMS, "--dest", str(wheels), "-r", str(needed))
        subprocess.run((*asked, *engine.wheels), check=True)
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(site)
        for path in [path for pattern in (*LEFT_OUT, *engine.left_out) for path in site.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for library in engine.libraries:
            (site / library).write_bytes(pruned((site / library).read_bytes(), engine, library == FLASH_ATTENTION))
        for path in site.rglob("*.so*"):
            path.chmod(0o755)
            if not {"vllm", "sgl_kernel"}.intersection(path.parts):  # whose machine code a strip would move
                subprocess.run(["strip", "--strip-unneeded", str(path)], stderr=subprocess.DEVNULL, check=False)
        packing = {**os.environ, "XZ_OPT": "-T2 --lzma2=preset=9,dict=64MiB"}
        subprocess.run(["tar", "cJf", str(archive), "-C", folder, "--sort=name", "site"], check=True, env=packing)
    print(archive, archive.stat().st_size)


def pruned(library: bytes, engine: Engine, attention: bool) -> bytes:
    """A library of the engine with zeros for machine code that nothing here runs; ``attention``: FlashAttention's."""
    data = bytearray(library)
    for entries in containers(library):
        cubins = {entry.architecture for entry in entries if entry.kind == CUBIN}
        for entry in entries:
            kept = entry.kind == CUBIN and entry.architecture in engine.architectures and cubins != engine.unused
            if not kept or (attention and not _used(library[entry.begin : entry.end])):
                data[entry.begin : entry.end] = bytes(entry.end - entry.begin)
    return bytes(data)


def containers(library: bytes) -> Iterator[list[Entry]]:
    """The entries of each container of machine code in a library."""
    at = 0
    while (at := library.find(MAGIC, at)) >= 0:
        _, version, header, size = CONTAINER.unpack_from(library, at)
        if (version, header) != (1, CONTAINER.size):
            at += len(MAGIC)
            continue
        entry, end = at + header, at + header + size
        entries = []
        while entry < end:
            kind, _, head, length = ENTRY.unpack_from(library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            entries.append(Entry(kind, architecture, entry + head, entry + head + length))
            entry += head + length
        yield entries
        at = end


def _used(cubin: bytes) -> bool:
    """Whether a cubin of FlashAttention serves a head dimension and dtype of the models, or all."""
    if b"CollectiveMainloopFwd" not in cubin:
        return True
    # By the head dimension of the values: 128 is that of MLA's prompts too, and 512 that of its decodes.
    kept = [f"ELi{head_dim}ENS_10bfloat16_t".encode() for head_dim in (64, 128, 256, 512)]
    kept += [f"ELi{head_dim}ENS_12float_e4m3_t".encode() for head_dim in (64, 128)]
    return any(name in cubin for name in kept) and b"ILi64EEEEEELi256E" not in cubin  # keys of 64, values of 256


if __name__ == "__main__":
    main()
