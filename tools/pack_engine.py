"""Pack a whole vLLM for a machine with SM90 GPUs, PyTorch 2.11 and no network, where benchmarks/engine_run.sh runs it.

    python tools/pack_engine.py build/engine.txz

The archive has one folder, ``site``, for PYTHONPATH: vLLM 0.26.0, the last release for PyTorch 2.11, and the packages
of ``vllm_packages.txt``, which come from the package index. Machine code that the benchmarks do not run is zeroed, so
that 400 MB pack into 30: code for other GPUs, quantized matrix products, and of FlashAttention-3 what is not bf16 at
head dimensions 64, 128 and 256. Nothing of this belongs into this repository.
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

VLLM = "vllm==0.26.0"
PYTHON = ("--python-version=3.12", "--implementation=cp")
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)
PLATFORMS = (
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC),
    *("--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"),
)
LEFT_OUT = (
    *("vllm/vllm-rs", "vllm/third_party/deep_gemm/include", "vllm/third_party/fmha_sm100", "vllm/_qutlass_C.abi3.so"),
    *("vllm/third_party/deep_gemm/_C.cpython-31[0134]*", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "xgrammar/lib"),
    *("mistral_common/data", "pycountry/locales", "**/__pycache__"),
)
FLASH_ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", FLASH_ATTENTION)

# The header of a container of machine code (.nv_fatbin), and that of each of its entries: NVIDIA's fat binary format.
MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ")
CUBIN = 2
QUANTIZED = {80, 90, 120}  # the architectures of quantized matrix products, and of nothing else


class Entry(NamedTuple):
    """An entry of a container: its kind, its architecture, and where its bytes lie in the library."""

    kind: int
    architecture: int
    begin: int
    end: int


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    archive = parser.parse_args().archive.resolve()
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        needed = Path(__file__).with_name("vllm_packages.txt")
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps")
        asked = (*pip, "--only-binary=:all:", *PYTHON, *PLATFORMS, "--dest", str(wheels), VLLM, "-r", str(needed))
        subprocess.run(asked, check=True)
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(site)
        for path in [path for pattern in LEFT_OUT for path in site.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for library in LIBRARIES:
            (site / library).write_bytes(pruned((site / library).read_bytes(), library == FLASH_ATTENTION))
        for path in site.rglob("*.so*"):
            path.chmod(0o755)
            if "vllm" not in path.parts:  # whose machine code a strip would move
                subprocess.run(["strip", "--strip-unneeded", str(path)], stderr=subprocess.DEVNULL, check=False)
        packing = {**os.environ, "XZ_OPT": "-T2 --lzma2=preset=9e,dict=64MiB"}
        subprocess.run(["tar", "cJf", str(archive), "-C", folder, "--sort=name", "site"], check=True, env=packing)
    print(archive, archive.stat().st_size)


def pruned(library: bytes, attention: bool) -> bytes:
    """The library with zeros for the machine code that nothing here runs; ``attention``: it is FlashAttention's."""
    data = bytearray(library)
    for entries in containers(library):
        cubins = {entry.architecture for entry in entries if entry.kind == CUBIN}
        for entry in entries:
            ours = entry.kind == CUBIN and entry.architecture == 90 and cubins != QUANTIZED
            if not ours or (attention and not _used(library[entry.begin : entry.end])):
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
    head_dims = (b"ELi64ENS_10bfloat16_t", b"ELi128ENS_10bfloat16_t", b"ELi256ENS_10bfloat16_t")
    other_keys = (b"ILi192EEEEEELi128E", b"ILi64EEEEEELi256E", b"ILi64EEEEEELi512E")
    return any(name in cubin for name in head_dims) and not any(name in cubin for name in other_keys)


if __name__ == "__main__":
    main()
