from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.artifacts.cubins.cubin import Architecture, Cubin, KernelFacts
from cubin_runtime.errors import AbiError
from cubin_runtime.launch.abi import LaunchNeeds, check_launchable
from cubin_runtime.launch.driver import DeviceFacts
from tests.launch.examples import LAYOUT, SYMBOL, cubin, device, kernel_facts

HOPPER = device(9, 0)


def check(
    made: Cubin,
    on: DeviceFacts = HOPPER,
    *,
    fingerprint: str | None = LAYOUT.fingerprint,
    threads: int = 384,
    declared: Architecture | None = None,
    shared: int = 0,
) -> KernelFacts:
    return check_launchable(made, SYMBOL, LaunchNeeds(LAYOUT, threads, fingerprint, shared, declared), on)


def without_note(number: int) -> Cubin:
    return replace(cubin(), architecture=Architecture(number, None))


def test_a_kernel_that_fits_gives_its_facts() -> None:
    assert check(cubin()) == kernel_facts()


RUNS = [
    ("80", 8, 0, True),
    ("80", 8, 6, True),
    ("80", 8, 9, True),
    ("86", 8, 0, False),
    ("80", 9, 0, False),
    ("90", 9, 0, True),
    ("90", 10, 0, False),
    ("90a", 9, 0, True),
    ("90a", 10, 0, False),
    ("90a", 8, 9, False),
    ("100", 10, 3, True),
    ("103", 10, 0, False),
    ("100a", 10, 0, True),
    ("100a", 10, 3, False),
    ("100f", 10, 0, True),
    ("100f", 10, 3, True),
    ("100f", 10, 1, False),
    ("100f", 9, 0, False),
    ("100f", 12, 0, False),
    ("90f", 9, 0, False),
    ("120", 12, 1, True),
    ("120", 10, 0, False),
]


@pytest.mark.parametrize(("target", "major", "minor"), [row[:3] for row in RUNS if row[3]])
def test_architecture_runs_on(target: str, major: int, minor: int) -> None:
    assert check(cubin(target), device(major, minor)).symbol == SYMBOL


@pytest.mark.parametrize(("target", "major", "minor"), [row[:3] for row in RUNS if not row[3]])
def test_architecture_is_refused_naming_both_sides(target: str, major: int, minor: int) -> None:
    with pytest.raises(AbiError, match=rf"built for sm_{target}, device 0 \(SM {major}.{minor}\) is {major}.{minor}"):
        check(cubin(target), device(major, minor))


def test_without_a_note_the_declared_architecture_counts() -> None:
    assert check(without_note(100), device(10, 3), declared=Architecture(100, "f")).symbol == SYMBOL


def test_a_declared_architecture_is_labelled_when_refused() -> None:
    with pytest.raises(AbiError, match=r"built for sm_100f \(declared\), device 0 \(SM 9.0\)"):
        check(without_note(100), declared=Architecture(100, "f"))


@pytest.mark.parametrize("declared", [None, Architecture(90, None)])
def test_an_architecture_that_nothing_establishes_is_refused(declared: Architecture | None) -> None:
    with pytest.raises(AbiError, match="neither the cubin nor its metadata states the suffix"):
        check(without_note(90), declared=declared)


def test_a_declared_architecture_of_another_number_is_refused() -> None:
    with pytest.raises(AbiError, match=r"the cubin says sm_100[?], its metadata declares sm_90a"):
        check(without_note(100), declared=Architecture(90, "a"))


def test_a_declared_architecture_that_contradicts_the_note_is_refused() -> None:
    with pytest.raises(AbiError, match="the cubin says sm_90a, its metadata declares sm_90"):
        check(cubin("90a"), declared=Architecture(90, ""))


def test_a_missing_symbol_names_those_that_are_there() -> None:
    with pytest.raises(AbiError, match="kernel 'other': the cubin holds decode"):
        check_launchable(cubin(), "other", LaunchNeeds(LAYOUT, 1), HOPPER)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            (LAYOUT.size + 8,),
            f"has {LAYOUT.size} bytes; according to its ELF, the kernel takes one of {LAYOUT.size + 8} bytes",
        ),
        ((LAYOUT.size, 8), rf"takes 2 of \[{LAYOUT.size}, 8\] bytes"),
        ((), "takes no parameter"),
    ],
)
def test_another_parameter_size_is_refused(sizes: tuple[int, ...], text: str) -> None:
    with pytest.raises(AbiError, match=text):
        check(cubin(facts=kernel_facts(sizes)))


def test_a_padded_offset_in_front_of_the_parameter_does_not_matter() -> None:
    facts = kernel_facts()
    moved = replace(facts, parameters=(replace(facts.parameters[0], offset=112),))
    assert check(cubin(facts=moved)) == moved


def test_another_fingerprint_is_refused_naming_both() -> None:
    with pytest.raises(AbiError, match=f"fingerprint {LAYOUT.fingerprint[:16]}; .*fingerprint 0000000000000000"):
        check(cubin(), fingerprint="0" * 64)


def test_no_recorded_fingerprint_leaves_the_size_check() -> None:
    assert check(cubin(), fingerprint=None) == kernel_facts()


@pytest.mark.parametrize("threads", [0, 385])
def test_a_block_that_the_kernel_was_not_built_for_is_refused(threads: int) -> None:
    with pytest.raises(AbiError, match=f"a block of {threads} threads; according to its ELF, at most 384"):
        check(cubin(), threads=threads)


def test_a_block_of_exactly_the_limit_fits() -> None:
    assert check(cubin(), threads=384).max_threads == 384


def test_more_shared_memory_than_the_device_has_is_refused() -> None:
    with pytest.raises(AbiError, match=r"needs 232449 bytes of dynamic shared memory per block, .* at most 232448"):
        check(cubin(), shared=232449)


def test_all_the_shared_memory_of_a_block_fits() -> None:
    assert check(cubin(), shared=232448).symbol == SYMBOL
