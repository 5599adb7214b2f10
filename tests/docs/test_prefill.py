"""What docs/prefill.md says of the kernels that ship and of their state, compared with the code."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from cubin_runtime.attention.backends import NATIVE, TABLE
from cubin_runtime.attention.paged_cache import PAGE_SIZES
from cubin_runtime.kernels.native.prefill.select import HEAD_DIMS, MAX_GROUP
from kernels_src.variants import VARIANTS

TEXT = " ".join((Path(__file__).parents[2] / "docs" / "prefill.md").read_text().split())
ALL = [variant for variant in VARIANTS if variant.operation == "context_attention"]
KERNELS = [kernel for kernel in ALL if kernel.traits["kv_dtype"] != "e4m3"]
OVER_E4M3 = [kernel for kernel in ALL if kernel.traits["kv_dtype"] == "e4m3"]


def test_it_counts_the_kernels() -> None:
    names = ("dtype", "soft_cap", "split_keys", "segments", "head_dim")
    found = {tuple(kernel.traits[name] for name in names) for kernel in KERNELS}
    options = list(product(("bf16", "fp16"), (False, True)))
    assert found == {
        (*option, split, False, dim) for option in options for split in (False, True) for dim in HEAD_DIMS
    } | {(*option, False, True, dim) for option in options for dim in (64, 128)}
    assert {kernel.sm for kernel in KERNELS} == {"90a"}
    assert len(KERNELS) == len(OVER_E4M3) == 40
    assert "40 cubins ship: bf16 and fp16, each head_dim, with and without a soft cap, again for split keys" in TEXT
    assert "and for `batch_invariant` at head_dim 64 and 128" in TEXT
    assert "As many more read e4m3 keys and values." in TEXT


def test_it_names_the_bounds_of_a_call() -> None:
    assert "head_dim 64, 128, 192 (with values of 128) or 256" in TEXT
    assert HEAD_DIMS == (64, 128, 192, 256)
    assert f"1 to {MAX_GROUP} query heads for each" in TEXT
    *most, last = PAGE_SIZES
    assert f"paged ({', '.join(map(str, most))} or {last} tokens" in TEXT


def test_it_says_whether_auto_takes_them() -> None:
    measured = (9, 0) in TABLE["context_attention"][NATIVE].automatic
    assert ("On compute capability 9.0 `auto` takes the kernels" in TEXT) is measured


def test_it_gives_the_sizes_of_row_tiles() -> None:
    rows = {kernel.traits["head_dim"]: kernel.traits["rows"] for kernel in KERNELS if not kernel.traits["segments"]}
    assert {rows[dim] for dim in (128, 192, 256)} == {128}
    assert f"{rows[128]} rows, or {rows[64]} for head_dim 64 (128 over an e4m3 cache)" in TEXT
    assert {kernel.traits["rows"] for kernel in OVER_E4M3} == {128}
