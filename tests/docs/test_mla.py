"""What docs/mla.md and docs/mla_kernels.md say of the kernels that ship and of their state, compared with the code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.attention import mla_decode
from cubin_runtime.attention.backends import NATIVE, TABLE
from cubin_runtime.attention.checks import listed
from cubin_runtime.attention.paged_cache import PAGE_SIZES
from cubin_runtime.compat.flashinfer import trtllm_batch_decode_with_kv_cache_mla, xqa_mla
from cubin_runtime.kernels.native.mla.select import COLUMNS, MAX_HEADS, MAX_QUERIES
from kernels_src.variants import VARIANTS

DOCS = Path(__file__).parents[2] / "docs"
TEXT, KERNEL_TEXT = (" ".join((DOCS / name).read_text().split()) for name in ("mla.md", "mla_kernels.md"))
WIDTHS = listed([f"{latent} + {rope}" if rope else str(latent) for latent, rope in COLUMNS])
ALL = [variant for variant in VARIANTS if variant.operation == "paged_mla_decode"]
KERNELS = [variant for variant in ALL if variant.sm == "90a"]
PORTABLE = [variant for variant in ALL if variant.sm != "90a"]


def test_it_counts_the_kernels() -> None:
    types = {
        64: (("bf16", "bf16"), ("e4m3", "bf16"), ("e4m3", "e4m3")),
        16: (("bf16", "bf16"), ("e4m3", "bf16,e4m3")),
    }
    names = ("rows", "dtype", "q_dtypes", "latent", "rope")
    found = {tuple(kernel.traits[name] for name in names) for kernel in KERNELS}
    assert found == {(rows, *own, *columns) for rows in types for own in types[rows] for columns in COLUMNS}
    assert f"{len(KERNELS)} cubins for SM90a: with row tiles of 64 for bf16" in KERNEL_TEXT
    assert f"each for rows of {WIDTHS.replace(' or ', ' and ')} columns" in KERNEL_TEXT


def test_it_says_what_the_portable_kernels_are() -> None:
    found = {tuple(kernel.traits[name] for name in ("rows", "dtype", "q_dtypes", "tile_tokens")) for kernel in PORTABLE}
    assert found == {(64, "e4m3", "e4m3", 32)}
    widths = {(kernel.sm, (kernel.traits["latent"], kernel.traits["rope"])) for kernel in PORTABLE}
    assert widths == set(product(("90", "120"), COLUMNS))
    assert "take queries and caches of e4m3. 8 warps compute row tiles of 64 on KV tiles of 32 keys" in KERNEL_TEXT
    stages = {kernel.traits["latent"]: kernel.defines["STAGES"] for kernel in PORTABLE}
    assert f"in {stages[512]}, {stages[256]} or {stages[128]} pipeline stages" in KERNEL_TEXT


def test_it_names_the_bounds_of_a_call() -> None:
    assert f"{WIDTHS} columns" in TEXT
    assert f"pages of {PAGE_SIZES[0]} to {PAGE_SIZES[-1]} tokens" in TEXT
    assert f"1 to {MAX_HEADS} heads" in TEXT
    assert f"up to {MAX_QUERIES} per request" in TEXT


@pytest.mark.parametrize("operator", [mla_decode, trtllm_batch_decode_with_kv_cache_mla, xqa_mla])
def test_functions_name_the_page_sizes(operator: Callable[..., Any]) -> None:
    text = " ".join(str(operator.__doc__).split())
    assert f"a power of two from {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}" in text


def test_it_says_whether_auto_takes_them() -> None:
    measured = (9, 0) in TABLE["mla_decode"][NATIVE].automatic
    assert ("On compute capability 9.0 `auto` takes the kernels" in TEXT) is measured
    assert TABLE["mla_decode"][NATIVE].built == {(12, 0), (12, 1)}
    assert "On 12.0 and 12.1 there are kernels for queries and caches of e4m3" in TEXT
    assert "built but have not been run on such a GPU" in TEXT
