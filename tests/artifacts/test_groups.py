"""What folders and file names tell of releases without metadata, and groups narrowed by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.pins.flashinfer import parse_artifacts
from cubin_runtime.artifacts.pins.pin import Pin
from cubin_runtime.artifacts.releases.groups import folder_facts, narrowed
from cubin_runtime.artifacts.tables.kernel_filter import KernelFilter, architecture_of_name
from cubin_runtime.errors import UsageError
from tests.artifacts.flashinfer_wheel import artifacts_text, make_tree


@pytest.mark.parametrize(
    ("folder", "families", "cpu", "target"),
    [
        ("2d6a/fmha/trtllm-gen", {"fmha", "trtllm-gen"}, None, "None"),
        ("8ee5/batched_gemm-fdba669-16ba8ed", {"batched_gemm", "batched-gemm"}, None, "None"),
        ("7b1f/gemm-b738138-25754e6", {"gemm"}, None, "None"),
        ("7ec7/deep-gemm", {"deep-gemm"}, None, "None"),
        ("6efb/fmha/cute-dsl/x86_64/sm_100a", {"fmha", "cute-dsl"}, "x86_64", "sm_100a"),
        ("6efb/fmha/cute-dsl/aarch64/sm_107a", {"fmha", "cute-dsl"}, "aarch64", "sm_107a"),
    ],
)
def test_a_folder_tells_family_cpu_and_target(folder: str, families: set[str], cpu: str | None, target: str) -> None:
    facts = folder_facts(ArtifactPath(folder))
    assert (facts.families, facts.cpu, str(facts.target)) == (families, cpu, target)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("Gemm_Bfloat16_E2m1E2m1_t128x32_TN_transOut_schedS_sm100f.cubin", "sm_100f"),
        ("fmhaSm103aKernel_QE4m3KvE4m3H128.cubin", "sm_103a"),
        ("facts_sm_90a.cubin", "sm_90a"),
        ("kernel.fp8_m_grouped_gemm.007404769193.cubin", "None"),
        ("flashInferMetaInfo.h", "None"),
        ("cute_dsl_fmha_bf16_h128_skipsm_tvmffi.so", "None"),
        ("prism100x.cubin", "None"),
    ],
)
def test_a_file_name_tells_its_target(name: str, target: str) -> None:
    assert str(architecture_of_name(name)) == target


@pytest.fixture
def pins(tmp_path: Path) -> tuple[Pin, ...]:
    return parse_artifacts(artifacts_text(make_tree(tmp_path)).encode(), "1", "x").pins


@pytest.mark.parametrize(
    ("wanted", "cpu", "words"),
    [
        (KernelFilter(), "x86_64", "fmha batched-gemm gemm deep-gemm cute-dsl-x86_64-sm_100a cute-dsl-x86_64-sm_103a"),
        (KernelFilter(sm=103), "aarch64", "fmha batched-gemm gemm deep-gemm cute-dsl-aarch64-sm_103a"),
        (KernelFilter(families=("gemm",)), None, "gemm"),
        (KernelFilter(families=("gemm", "batched-gemm")), None, "batched-gemm gemm"),
        (KernelFilter(families=("cute-dsl",), sm=100), "x86_64", "cute-dsl-x86_64-sm_100a"),
        (KernelFilter(families=("fmha",), sm=100), "x86_64", "fmha cute-dsl-x86_64-sm_100a"),
        (KernelFilter(families=("decode",), sm=100), "x86_64", "fmha"),
    ],
)
def test_a_group_is_narrowed_by_folders(pins: tuple[Pin, ...], wanted: KernelFilter, cpu: str, words: str) -> None:
    found = [pin.name.removeprefix("flashinfer-1-") for pin, _ in narrowed("flashinfer-1", pins, wanted, cpu)]
    assert found == words.split()


def test_what_a_folder_settled_is_not_asked_of_its_files(pins: tuple[Pin, ...]) -> None:
    left = {
        pin.name.removeprefix("flashinfer-1-"): left
        for pin, left in narrowed("flashinfer-1", pins, KernelFilter(sm=100, families=("fmha",)), "x86_64")
    }
    assert left == {"fmha": KernelFilter(sm=100), "cute-dsl-x86_64-sm_100a": KernelFilter()}


def test_a_filter_that_leaves_nothing_names_the_families(pins: tuple[Pin, ...]) -> None:
    with pytest.raises(UsageError, match=r"its families are batched-gemm, .*, deep-gemm, fmha, gemm, trtllm-gen"):
        narrowed("flashinfer-1", pins, KernelFilter(families=("mla",)), None)
