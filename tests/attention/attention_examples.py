"""A small release of our kernels and made-up tensors for planning."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cubin_runtime.attention import TensorView
from cubin_runtime.launch.driver import DeviceFacts
from cubin_runtime.launch.hopper.params import LAYOUTS
from kernels_src.build import build, select
from kernels_src.toolchain import find_toolchain
from kernels_src.variants import VARIANTS

RELEASE_NAME = "hopper-test"
H200 = DeviceFacts(0, "H200", (9, 0), 132, 232448, 233472, 60 << 20, 13000)


def build_release(folder: Path, names: str = "fmha_*_sm90a") -> tuple[Path, Path]:
    """Build kernels (decode for sm_90a) as ``hopper-test`` and write the pin file that trusts them."""
    import hashlib

    build(
        folder / "tree",
        select(VARIANTS, names),
        LAYOUTS,
        find_toolchain(),
        release=RELEASE_NAME,
        jobs=os.cpu_count() or 1,
    )
    release = folder / "tree" / RELEASE_NAME
    manifest = (release / "checksums.txt").read_bytes()
    files = [path for path in release.rglob("*") if path.is_file() and path.name != "checksums.txt"]
    pins = folder / "pins.toml"
    pins.write_text(
        f'[[pin]]\nname = "{RELEASE_NAME}"\npath = "{RELEASE_NAME}"\n'
        f'manifest_sha256 = "{hashlib.sha256(manifest).hexdigest()}"\nfiles = {len(files)}\n'
        f"bytes = {sum(path.stat().st_size for path in files)}\nmax_file_bytes = 8388608\n"
        'abi = "hopper-0.1.0"\nlicence = "Apache-2.0"\nsources = []\n'
    )
    return folder / "tree", pins


_contiguous = TensorView.contiguous


@dataclass(frozen=True)
class Tensors:
    """The tensors of a decode of batch 4, 64 query heads over 8 KV heads, 100 pages of 64 tokens, NHD."""

    q: TensorView = field(default_factory=lambda: _contiguous(0x7F0000001000, "bfloat16", (4, 64, 128)))
    k_cache: TensorView = field(default_factory=lambda: _contiguous(0x7F0000100000, "bfloat16", (100, 64, 8, 128)))
    v_cache: TensorView = field(default_factory=lambda: _contiguous(0x7F0010000000, "bfloat16", (100, 64, 8, 128)))
    page_table: TensorView = field(default_factory=lambda: _contiguous(0x7F0000002000, "int32", (4, 16)))
    seq_lens: TensorView = field(default_factory=lambda: _contiguous(0x7F0000003000, "int32", (4,)))
    out: TensorView = field(default_factory=lambda: _contiguous(0x7F0000004000, "bfloat16", (4, 64, 128)))
    lse: TensorView | None = None
    q_cu_seq_lens: TensorView | None = None
    mask: TensorView | None = None
    sinks: TensorView | None = None
    softmax_scale: TensorView | None = None
    output_scale: TensorView | None = None

    def changed(self, name: str, **changes: Any) -> Tensors:
        """With one tensor changed."""
        return replace(self, **{name: replace(getattr(self, name), **changes)})

    @property
    def positional(self) -> tuple[TensorView | None, ...]:
        """Those that a plan takes by position."""
        return (self.q, self.k_cache, self.v_cache, self.page_table, self.seq_lens, self.out, self.lse)

    @property
    def named(self) -> dict[str, TensorView | None]:
        """Those that it takes by name, as far as they are there."""
        names = ("q_cu_seq_lens", "mask", "sinks", "softmax_scale", "output_scale")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def all(self) -> tuple[TensorView | None, ...]:
        """All, in the order in which checks and plans name them."""
        extra = (self.q_cu_seq_lens, self.mask, self.sinks, self.softmax_scale, self.output_scale)
        return (*self.positional, *extra)
