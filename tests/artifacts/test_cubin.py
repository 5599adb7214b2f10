from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cubin_runtime.artifacts.cubins.architecture import Architecture
from cubin_runtime.artifacts.cubins.cubin import CubinFormatError, KernelFacts, Parameter, kernel_code, parse_cubin
from cubin_runtime.errors import CorruptError

FIXTURES = Path(__file__).parents[1] / "fixtures"


def cubin_bytes(target: str) -> bytes:
    return (FIXTURES / f"facts_{target}.cubin").read_bytes()


def facts(target: str, symbol: str) -> KernelFacts:
    return parse_cubin(cubin_bytes(target)).kernels[symbol]


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    assert len(old) == len(new)
    return data.replace(old, new)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100f"])
def test_architecture_comes_with_its_suffix_from_the_toolkit_note(target: str) -> None:
    assert parse_cubin(cubin_bytes(target)).architecture == Architecture.parse(target)


def test_without_the_note_the_number_stays_and_the_suffix_is_unknown() -> None:
    without = patched(cubin_bytes("sm_90a"), b"-arch sm_90a", b"            ")
    assert parse_cubin(without).architecture == Architecture(90, None)


def test_a_note_that_contradicts_the_header_is_refused() -> None:
    with pytest.raises(CubinFormatError, match=r"sm_80.*90"):
        parse_cubin(patched(cubin_bytes("sm_90a"), b"-arch sm_90a", b"-arch sm_80 "))


def test_a_note_with_two_architectures_is_refused() -> None:
    data = cubin_bytes("sm_90a")
    with pytest.raises(CubinFormatError, match="2 architectures"):
        parse_cubin(patched(data, b"Cuda compilation tools", b"-arch sm_90 compilati\0"))


def test_the_digest_is_that_of_the_bytes() -> None:
    data = cubin_bytes("sm_80")
    assert parse_cubin(data).sha256 == hashlib.sha256(data).hexdigest()


def test_every_entry_point_is_listed_and_device_functions_are_not() -> None:
    assert set(parse_cubin(cubin_bytes("sm_90a")).kernels) == {"block", "large", "empty", "stack"}


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100f"])
def test_an_aligned_block_counts_its_own_bytes_without_padding_in_front(target: str) -> None:
    assert [p.size for p in facts(target, "block").parameters] == [1280, 8]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100f"])
def test_parameters_over_4_kib_have_exact_sizes_too(target: str) -> None:
    assert facts(target, "large").parameters == (
        Parameter(0, 0, 5000),
        Parameter(1, 5000, 8),
        Parameter(2, 5008, 2),
    )


def test_a_kernel_without_parameters_has_none() -> None:
    assert facts("sm_90a", "empty").parameters == ()


def test_declared_thread_limit() -> None:
    assert facts("sm_90a", "block").max_threads == 96


def test_no_thread_limit_is_none() -> None:
    assert facts("sm_90a", "large").max_threads is None


@pytest.mark.parametrize(("target", "registers"), [("sm_80", 10), ("sm_90a", 12), ("sm_100f", 12)])
def test_registers_are_those_that_the_compiler_reports(target: str, registers: int) -> None:
    assert facts(target, "block").registers == registers


@pytest.mark.parametrize(("target", "size"), [("sm_80", 132), ("sm_90a", 1024 + 132), ("sm_100f", 1024 + 132)])
def test_static_shared_memory_is_the_section_with_the_reserve_of_new_devices(target: str, size: int) -> None:
    assert facts(target, "block").static_shared_bytes == size


def test_no_shared_section_is_zero_bytes() -> None:
    assert facts("sm_90a", "empty").static_shared_bytes == 0


def test_stack_is_that_of_the_local_array() -> None:
    assert facts("sm_90a", "stack").stack_bytes == 160


def test_code_of_a_kernel_is_its_text_section() -> None:
    assert len(kernel_code(cubin_bytes("sm_90a"), "empty")) % 128 == 0


def test_code_of_an_absent_kernel_names_it() -> None:
    with pytest.raises(CubinFormatError, match="nothing"):
        kernel_code(cubin_bytes("sm_90a"), "nothing")


def test_a_cubin_that_does_not_read_counts_as_corrupt() -> None:
    with pytest.raises(CorruptError):
        parse_cubin(b"")
