from __future__ import annotations

import pytest

from cubin_runtime.kernels.native.layouts import LAYOUTS
from kernels_src.build import SOURCES, BuildError, select
from kernels_src.variants import SHARED_BYTES_PER_BLOCK, VARIANTS
from tests.kernels_src.stub_kernels import stub


def test_names_files_and_sources_of_the_list_are_in_order() -> None:
    assert select(VARIANTS, "*") == VARIANTS
    assert {variant.struct for variant in VARIANTS} <= set(LAYOUTS)
    assert [variant.source for variant in VARIANTS if not (SOURCES / variant.source).is_file()] == []


def test_only_what_a_gpu_run_measured_is_called_measured() -> None:
    assert [stub(sm=sm).status for sm in ("90", "90a")] == ["measured"] * 2
    assert [stub(sm=sm).status for sm in ("80", "86", "89", "100", "103", "120")] == ["built, not run"] * 6


def test_limits_of_shared_memory_are_those_of_the_hardware() -> None:
    kibibytes = {sm: limit // 1024 for sm, limit in SHARED_BYTES_PER_BLOCK.items()}
    assert kibibytes == {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "103": 227, "120": 99}


def test_the_name_holds_symbol_and_sm_and_the_file_the_family() -> None:
    assert stub(sm="90a").name == "stub_scale_sm90a"
    assert stub(sm="90a").file == "stub/stub_scale_sm90a.cubin"


@pytest.mark.parametrize("changes", [{"sm": "75"}, {"sm": "90b"}, {"symbol": "no-name"}])
def test_a_variant_outside_its_domain_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        stub(**changes)


def test_two_variants_of_one_name_are_refused() -> None:
    with pytest.raises(BuildError, match="listed twice: stub_scale_sm90a"):
        select((stub(), stub()), "*")


def test_a_pattern_that_matches_nothing_names_what_there_is() -> None:
    with pytest.raises(BuildError, match=r"'\*sm89'; there are: stub_scale_sm90a"):
        select((stub(),), "*sm89")
