from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from cubin_runtime.artifacts.tables.kernel_filter import KernelFilter, dtype_name, is_stated
from cubin_runtime.artifacts.tables.metadata import COLUMNS, KernelMeta
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.errors import UsageError

NUMBERS = {c.field: 0 for c in COLUMNS if c.kind in ("uint", "bool")}
META = KernelMeta(
    **{
        **NUMBERS,
        "symbol": "fmhaSm100fKernel_QBf16H192",
        "sha256": "0" * 64,
        "row": 0,
        "sm": "100f",
        "dtype_q": "bf16",
        "dtype_kv": "e4m3",
        "dtype_k": "e4m3",
        "dtype_v": "e4m3",
        "dtype_o": "fp16",
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "head_dim_per_cta_v": 64,
    }
)
EXACT = replace(META, symbol="fmhaSm103aKernel_Q", sm="103")
OWN = NativeKernel(
    name="decode",
    symbol="decode_bf16",
    file="fmha/decode_bf16_sm_90a.cubin",
    sm="90a",
    family="fmha",
    operation="paged_decode",
    traits=MappingProxyType({"head_dim": 128, "dtype": "bf16", "page": 64}),
    struct="P",
    struct_bytes=8,
    struct_fingerprint="0" * 64,
    threads=128,
    dynamic_shared_bytes=0,
    static_shared_bytes=0,
    registers=32,
    spill_bytes=0,
    flags=(),
    sources_sha256="0" * 64,
    status="measured",
)


@pytest.mark.parametrize(
    ("sm", "row", "kept"),
    [
        (100, META, True),
        (103, META, True),
        (90, META, False),
        (103, EXACT, True),
        (100, EXACT, False),
        (90, OWN, True),
    ],
)
def test_sm_keeps_what_runs_there(sm: int, row: KernelMeta | NativeKernel, kept: bool) -> None:
    assert KernelFilter(sm=sm).keeps(row) is kept


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "fp16"])
def test_dtype_looks_at_queries_keys_values_and_output(dtype: str) -> None:
    assert KernelFilter(dtypes=(dtype,)).keeps(META)


def test_an_absent_dtype_keeps_nothing() -> None:
    assert not KernelFilter(dtypes=("e2m1",)).keeps(META)


def test_dtype_of_native_kernels_comes_from_their_traits() -> None:
    assert KernelFilter(dtypes=("bf16",)).keeps(OWN)
    assert not KernelFilter(dtypes=("fp16",)).keeps(OWN)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
def test_a_trait_may_list_several_dtypes(dtype: str) -> None:
    mixed = replace(OWN, traits=MappingProxyType({"dtype": "e4m3", "q_dtypes": "bf16,fp16"}))
    assert KernelFilter(dtypes=(dtype,)).keeps(mixed)


@pytest.mark.parametrize(("size", "kept"), [(192, True), (128, True), (64, False)])
def test_head_dim_looks_at_both_sizes_and_not_at_a_blocks_share(size: int, kept: bool) -> None:
    assert KernelFilter(head_dims=(size,)).keeps(META) is kept


def test_head_dim_of_native_kernels_comes_from_their_traits() -> None:
    assert KernelFilter(head_dims=(128,)).keeps(OWN)
    assert not KernelFilter(head_dims=(64,)).keeps(OWN)


@pytest.mark.parametrize("wanted", [KernelFilter(dtypes=("bf16",)), KernelFilter(head_dims=(128,))])
def test_a_kernel_that_states_no_type_or_head_size_serves_all(wanted: KernelFilter) -> None:
    assert wanted.keeps(replace(OWN, traits=MappingProxyType({"quantise": ""})))


@pytest.mark.parametrize(("size", "kept"), [(576, True), (512, True), (64, False)])
def test_head_dim_of_a_latent_cache_is_that_of_its_rows_and_of_its_values(size: int, kept: bool) -> None:
    latent = replace(OWN, traits=MappingProxyType({"latent": 512, "rope": 64}))
    assert KernelFilter(head_dims=(size,)).keeps(latent) is kept


@pytest.mark.parametrize(
    ("wanted", "stated"),
    [
        (KernelFilter(), True),
        (KernelFilter(dtypes=("bf16",), head_dims=(128,)), True),
        (KernelFilter(dtypes=("e2m1",)), False),
        (KernelFilter(dtypes=("bf16",), head_dims=(96,)), False),
    ],
)
def test_a_value_that_no_kernel_states_is_known(wanted: KernelFilter, stated: bool) -> None:
    assert is_stated(wanted, [replace(OWN, traits=MappingProxyType({})), OWN]) is stated


@pytest.mark.parametrize(
    ("family", "row", "kept"),
    [
        ("trtllm-gen", META, True),
        ("fmha", META, True),
        ("native", META, False),
        ("native", OWN, True),
        ("hopper", META, False),
        ("hopper", OWN, True),
        ("fmha", OWN, True),
        ("mla", OWN, False),
        ("decode", replace(META, kernel_type=2), True),
        ("generation", replace(META, kernel_type=3), True),
        ("prefill", replace(META, kernel_type=2), False),
        ("decode", replace(META, kernel_type=0), False),
        ("prefill", replace(META, kernel_type=0), True),
        ("paged", META, False),
        ("paged", replace(META, qkv_layout=2), True),
        ("decode", OWN, True),
        ("paged_decode", OWN, True),
        ("prefill", OWN, False),
    ],
)
def test_family_is_who_made_it_what_it_is_or_its_use(family: str, row: KernelMeta | NativeKernel, kept: bool) -> None:
    assert KernelFilter(families=(family,)).keeps(row) is kept


@pytest.mark.parametrize(
    ("glob", "kept"),
    [("decode_*", True), ("fmha/*", True), ("*.cubin", True), ("*_sm_90a.cubin", True), ("xqa/*", False)],
)
def test_a_glob_fits_path_name_or_symbol(glob: str, kept: bool) -> None:
    assert KernelFilter(globs=(glob,)).keeps(OWN) is kept


def test_values_of_one_field_are_alternatives() -> None:
    assert KernelFilter(head_dims=(64, 128)).keeps(META)


def test_all_fields_must_hold() -> None:
    assert not KernelFilter(sm=100, dtypes=("e2m1",)).keeps(META)


def test_an_empty_filter_keeps_all() -> None:
    assert KernelFilter().is_empty
    assert KernelFilter().keeps(META)


@pytest.mark.parametrize("word", ["100", "sm100", "sm_100", "SM_100", "sm_100a", "100f"])
def test_a_device_may_be_written_in_the_usual_ways(word: str) -> None:
    assert KernelFilter.from_words(sm=word).sm == 100


@pytest.mark.parametrize("word", ["", "h100", "1", "compute_90", "90 "])
def test_other_device_words_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"^sm "):
        KernelFilter.from_words(sm=word)


def test_a_head_size_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^head_dim "):
        KernelFilter.from_words(head_dims=[0])


@pytest.mark.parametrize(("word", "name"), [("bfloat16", "bf16"), ("BF16", "bf16"), ("fp8", "e4m3"), ("x", "x")])
def test_dtypes_have_one_name_each(word: str, name: str) -> None:
    assert dtype_name(word) == name


def test_globs_alone_need_no_metadata() -> None:
    assert not KernelFilter(globs=("*",)).needs_metadata


def test_everything_else_needs_metadata() -> None:
    assert KernelFilter(globs=("*",), head_dims=(64,)).needs_metadata
