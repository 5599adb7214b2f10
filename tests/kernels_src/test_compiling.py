from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime.artifacts.cubins.cubin import parse_cubin
from cubin_runtime.launch.structs import Field, StructLayout
from kernels_src.build import SOURCES, write_headers
from kernels_src.compiling import (
    BuildError,
    CompiledKernel,
    Resources,
    check_cubin,
    check_shared_memory,
    compile_variant,
    dynamic_shared_bytes,
    flags_of,
    parse_resources,
)
from kernels_src.toolchain import Toolchain
from kernels_src.variants import Variant
from tests.kernels_src.stub_kernels import LAYOUT, SOURCE, stub, write_source

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size, 4352 bytes smem
ptxas info    : Compile time = 3.096 ms
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers
"""


def compile_text(folder: Path, toolchain: Toolchain, text: str, variant: Variant | None = None) -> CompiledKernel:
    write_source(folder, text)
    write_headers(folder / "generated", {LAYOUT.name: LAYOUT})
    chosen = variant or stub()
    return compile_variant(chosen, LAYOUT, toolchain, folder, folder / "generated", folder / "out.cubin")


def test_registers_spills_and_shared_bytes_are_read_per_kernel() -> None:
    assert parse_resources(PTXAS, "one", 384, 1024) == Resources(384, 168, 20, 4352, 1024)
    assert parse_resources(PTXAS, "two", 32, 0) == Resources(32, 12, 0, 0, 0)


def test_a_kernel_that_ptxas_does_not_name_is_an_error() -> None:
    with pytest.raises(BuildError, match=r'three: .*extern "C"'):
        parse_resources(PTXAS, "three", 32, 0)


def test_products_that_wait_for_each_other_are_an_error() -> None:
    warning = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    with pytest.raises(BuildError, match=r"one: ptxas says that wgmma.mma_async instructions are serialized"):
        parse_resources(f"{warning} insufficient register resources for the function 'one'\n{PTXAS}", "one", 384, 1024)


def test_the_flags_name_no_path_and_no_line_information() -> None:
    assert flags_of(stub()) == ("-arch=sm_90a", "-std=c++17", "-O3", "-DKERNEL_NAME=stub_scale", "-DUNROLL=1")


def test_what_ptxas_reports_is_what_the_cubin_says(tmp_path: Path, toolchain: Toolchain) -> None:
    kernel = compile_text(tmp_path, toolchain, SOURCE, stub(sm="80"))
    facts = parse_cubin(kernel.cubin).kernels["stub_scale"]
    assert kernel.resources == Resources(128, facts.registers or 0, 0, facts.static_shared_bytes, 0)
    assert kernel.resources.static_shared_bytes == 256


def test_an_error_in_the_source_names_the_variant_and_the_line(tmp_path: Path, toolchain: Toolchain) -> None:
    with pytest.raises(BuildError, match=r"(?s)stub_scale_sm90a: nvcc exited with .*scale\.cu\(1\)"):
        compile_text(tmp_path, toolchain, "nonsense")


@pytest.mark.parametrize(
    "definition",
    [
        "static __device__ __noinline__ float scaled(float x) { return x * FACTOR; }",
        "namespace { __device__ __noinline__ float scaled(float x) { return x * FACTOR; } }",
    ],
)
def test_a_symbol_with_internal_linkage_is_named_and_refused(
    tmp_path: Path, toolchain: Toolchain, definition: str
) -> None:
    text = SOURCE.replace("p.factor * FACTOR", "scaled(p.factor)").replace('extern "C"', f'{definition}\nextern "C"')
    with pytest.raises(BuildError, match=r"_INTERNAL_.* have internal linkage"):
        compile_text(tmp_path, toolchain, text)


def test_a_struct_of_another_size_than_the_kernel_takes_is_refused(tmp_path: Path, toolchain: Toolchain) -> None:
    kernel = compile_text(tmp_path, toolchain, SOURCE)
    other = StructLayout.declare("Other", [Field("count", "int64")])
    with pytest.raises(BuildError, match=r"parameters of \[16\] bytes, expected Other of 8"):
        check_cubin(kernel.variant, kernel.cubin, other)


def test_a_kernel_without_launch_bounds_is_refused(tmp_path: Path, toolchain: Toolchain) -> None:
    with pytest.raises(BuildError, match="stub_scale_sm90a: the kernel states no __launch_bounds__"):
        compile_text(tmp_path, toolchain, SOURCE.replace("__launch_bounds__(128)", ""))


def test_a_cubin_for_another_architecture_is_refused(tmp_path: Path, toolchain: Toolchain) -> None:
    kernel = compile_text(tmp_path, toolchain, SOURCE)
    with pytest.raises(BuildError, match="the cubin is for sm_90a, expected sm_100"):
        check_cubin(stub(sm="100"), kernel.cubin, LAYOUT)


def test_dynamic_shared_memory_is_what_the_kernel_states(tmp_path: Path, toolchain: Toolchain) -> None:
    stated = SOURCE.replace("float* values", "dynamic_shared_storage<Storage>().numbers[0] = 1.f;\n    float* values")
    storage = "struct alignas(1024) Storage { float numbers[300]; };\n"
    text = f'#include "{SOURCES}/common/ptx.cuh"\n{storage}{stated}'
    assert compile_text(tmp_path, toolchain, text).resources.dynamic_shared_bytes == 2048


def test_the_statement_of_dynamic_shared_memory_leaves_the_cubin_as_it_is(tmp_path: Path, toolchain: Toolchain) -> None:
    stating = SOURCE.replace(
        "float* values", 'asm volatile("// dynamic shared bytes: %0" ::"n"(64));\n    float* values'
    )
    plain, told = compile_text(tmp_path, toolchain, SOURCE), compile_text(tmp_path, toolchain, stating)
    assert (told.resources.dynamic_shared_bytes, told.cubin) == (64, plain.cubin)


def test_two_sizes_of_dynamic_shared_memory_are_refused() -> None:
    with pytest.raises(BuildError, match=r"stub_scale_sm90a: .* of \[16, 32\] bytes"):
        dynamic_shared_bytes(stub(), "\t// dynamic shared bytes: 16\n\t// dynamic shared bytes: 32\n")


@pytest.mark.parametrize(("sm", "limit"), [("86", 99 << 10), ("80", 163 << 10), ("90a", 227 << 10)])
def test_dynamic_and_static_shared_memory_together_stay_within_the_limit_of_the_sm(sm: str, limit: int) -> None:
    check_shared_memory(stub(sm=sm), Resources(128, 32, 0, 256, limit - 256))
    with pytest.raises(BuildError, match=f"allows {limit} per block"):
        check_shared_memory(stub(sm=sm), Resources(128, 32, 0, 256, limit - 255))
