"""A small release of our kernels and made-up tensors for planning."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import TensorView
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.launch.driver import DeviceFacts
from kernels_src.build import build, select
from kernels_src.kernel_cache import kernel_cache
from kernels_src.toolchain import find_toolchain
from kernels_src.variants import VARIANTS

RELEASE_NAME = "hopper-test"
H200 = DeviceFacts(0, "H200", (9, 0), 132, 232448, 233472, 60 << 20, 13000)


def build_release(folder: Path, names: str = "fmha_paged_decode_bf16_d128_rows*[0-9]_sm90a") -> tuple[Path, Path]:
    """Build kernels (by default some for bf16) as ``hopper-test`` and write the pin file that trusts them."""
    build(
        folder / "tree",
        select(VARIANTS, names),
        LAYOUTS,
        find_toolchain(),
        release=RELEASE_NAME,
        jobs=os.cpu_count() or 1,
        cache=kernel_cache(),
    )
    return folder / "tree", pin_release(folder)


def describe_release(folder: Path, kernels: Sequence[NativeKernel]) -> tuple[Path, Path]:
    """A release that says to have ``kernels``, whose files are empty: it can be planned with, not run."""
    release = folder / "tree" / RELEASE_NAME
    for family in {kernel.family for kernel in kernels}:
        (release / family).mkdir(parents=True)
    rows = [{**asdict(kernel), "traits": dict(kernel.traits)} for kernel in kernels]
    (release / "kernels.json").write_text(json.dumps({"schema": 1, "release": RELEASE_NAME, "kernels": rows}))
    for row in rows:
        (release / row["file"]).write_bytes(b"")
    names = ["kernels.json", *sorted(row["file"] for row in rows)]
    lines = [f"{hashlib.sha256((release / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (release / "checksums.txt").write_text("".join(lines))
    return folder / "tree", pin_release(folder)


def pin_release(folder: Path) -> Path:
    """Write the pin file that trusts the release in ``folder/tree`` as it is."""
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
    return pins


class TorchLike:
    """A view that looks like a CUDA tensor of torch, as far as operators ask."""

    def __init__(self, view: TensorView) -> None:
        self._view = view
        self.dtype = f"torch.{view.dtype}"
        self.shape = view.shape
        self.device = SimpleNamespace(type="cuda", index=view.device)

    def stride(self) -> tuple[int, ...]:
        return self._view.strides

    def get_device(self) -> int:
        return self._view.device

    def data_ptr(self) -> int:
        return self._view.pointer


_contiguous = TensorView.contiguous


def _like(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"shape": shape, "strides": _contiguous(0, "int8", shape).strides}


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
    global_seq_lens: TensorView | None = None
    softmax_scale: TensorView | None = None
    output_scale: TensorView | None = None
    k_scale: TensorView | None = None
    v_scale: TensorView | None = None

    def changed(self, name: str, **changes: Any) -> Tensors:
        """With one tensor changed."""
        return replace(self, **{name: replace(getattr(self, name), **changes)})

    def draft(self, q_len: int, **more: TensorView | None) -> Tensors:
        """With ``q_len`` query tokens per request."""
        q, out = (replace(view, **_like((4, q_len, *view.shape[1:]))) for view in (self.q, self.out))
        return replace(self, q=q, out=out, **more)

    def ragged(self, tokens: int, **more: TensorView | None) -> Tensors:
        """With ``tokens`` query tokens over the four requests."""
        q, out = (replace(view, **_like((tokens, *view.shape[1:]))) for view in (self.q, self.out))
        return replace(self, q=q, out=out, **{"q_cu_seq_lens": _contiguous(0x7F0000005000, "int32", (5,)), **more})

    def of_dtypes(self, kv: str, q: str, out: str, head_dim: int = 128) -> Tensors:
        """With caches, q and out of these dtypes and this head dimension."""
        shapes = {name: (*getattr(self, name).shape[:-1], head_dim) for name in ("q", "k_cache", "v_cache", "out")}
        dtypes = {"q": q, "k_cache": kv, "v_cache": kv, "out": out}
        return replace(
            self, **{name: replace(getattr(self, name), dtype=dtypes[name], **_like(shapes[name])) for name in shapes}
        )

    def as_torch(self) -> Tensors:
        """The same, each looking like a tensor of torch."""
        there = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(self, **{name: TorchLike(tensor) for name, tensor in there.items()})

    @property
    def positional(self) -> tuple[TensorView | None, ...]:
        """Those that a plan takes by position."""
        return (self.q, self.k_cache, self.v_cache, self.page_table, self.seq_lens, self.out, self.lse)

    @property
    def named(self) -> dict[str, TensorView | None]:
        """Those that it takes by name, as far as they are there."""
        names = ("q_cu_seq_lens", "mask", "sinks", "global_seq_lens", "softmax_scale", "output_scale")
        names += ("k_scale", "v_scale")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def by_name(self) -> dict[str, TensorView | None]:
        """All, None for what is left out."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
