from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from cubin_runtime.artifacts.cubins.architecture import Architecture
from cubin_runtime.artifacts.cubins.cubin import Cubin, parse_cubin
from cubin_runtime.artifacts.tables.consistency import native_disagreements, resolve_architecture, trtllm_disagreements
from cubin_runtime.artifacts.tables.metadata import COLUMNS, KernelMeta
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel

FIXTURES = Path(__file__).parents[1] / "fixtures"
DATA = (FIXTURES / "pair_sm_100f.cubin").read_bytes()
DIGEST = hashlib.sha256(DATA).hexdigest()
META = KernelMeta(
    **{
        **{c.field: 0 for c in COLUMNS},
        "row": 0,
        "symbol": "fmhaSm100fKernel_Tiny",
        "sha256": DIGEST,
        "sm": "100f",
        "threads": 384,
        "shared_bytes": 64656,
    }
)
OWN_DATA = (FIXTURES / "facts_sm_90a.cubin").read_bytes()
OWN_DIGEST = hashlib.sha256(OWN_DATA).hexdigest()
OWN = NativeKernel(
    name="empty",
    symbol="empty",
    file="fmha/empty.cubin",
    sm="90a",
    family="fmha",
    operation="none",
    traits=MappingProxyType({}),
    struct="P",
    struct_bytes=1280,
    struct_fingerprint="0" * 64,
    threads=96,
    dynamic_shared_bytes=0,
    static_shared_bytes=0,
    registers=4,
    spill_bytes=0,
    flags=(),
    sources_sha256="0" * 64,
    status="measured",
)


def facts_that_differ(meta: KernelMeta, *, listed: str = DIGEST, parameter_bytes: int = 1280) -> list[str]:
    found = trtllm_disagreements(meta, DATA, parse_cubin(DATA), manifest_sha256=listed, parameter_bytes=parameter_bytes)
    return [f.fact for f in found]


def own_facts_that_differ(kernel: NativeKernel, listed: str = OWN_DIGEST) -> list[str]:
    return [f.fact for f in native_disagreements(kernel, parse_cubin(OWN_DATA), manifest_sha256=listed)]


def test_a_cubin_that_fits_its_row_has_no_disagreement() -> None:
    assert facts_that_differ(META) == []


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"threads": 512}, "threads"),
        ({"shared_bytes": 64660}, "occurrences of 64660 in GetSmemSize"),
        ({"shared_bytes": 0}, "occurrences of 0 in GetSmemSize"),
    ],
)
def test_one_wrong_value_is_one_disagreement(change: dict[str, int], fact: str) -> None:
    assert facts_that_differ(replace(META, **change)) == [fact]


def test_a_wrong_digest_shows_against_manifest_and_bytes() -> None:
    assert facts_that_differ(replace(META, sha256="0" * 64)) == ["digest in the manifest", "digest"]


def test_a_manifest_that_lists_another_digest_shows() -> None:
    assert facts_that_differ(META, listed="1" * 64) == ["digest in the manifest"]


def test_a_parameter_of_another_size_shows() -> None:
    assert facts_that_differ(META, parameter_bytes=1248) == ["parameter sizes"]


def test_another_symbol_shows_and_its_facts_are_not_guessed() -> None:
    assert facts_that_differ(replace(META, symbol="fmhaSm100fKernel_Other")) == ["kernels"]


def test_another_target_shows() -> None:
    assert "architecture" in facts_that_differ(replace(META, symbol="fmhaSm100aKernel_Tiny", sm="100"))


def test_a_disagreement_says_both_sides() -> None:
    found = trtllm_disagreements(
        replace(META, threads=512), DATA, parse_cubin(DATA), manifest_sha256=DIGEST, parameter_bytes=1280
    )
    assert str(found[0]) == "threads: the metadata says 512, the cubin 384"


@pytest.mark.parametrize(
    ("own", "declared", "resolved"),
    [
        (Architecture(100, None), Architecture(100, "a", True), Architecture(100, "a", True)),
        (Architecture(100, None), Architecture(103, "a", True), Architecture(100, None)),
        (Architecture(100, "f"), Architecture(100, "a", True), Architecture(100, "f")),
    ],
)
def test_a_declared_target_only_fills_what_the_binary_leaves_open(
    own: Architecture, declared: Architecture, resolved: Architecture
) -> None:
    assert resolve_architecture(Cubin("", own, {}), declared) == resolved


def test_an_own_kernel_is_held_against_its_parameters() -> None:
    assert own_facts_that_differ(OWN) == ["parameter sizes"]


def test_an_own_kernel_with_other_registers_shows() -> None:
    assert own_facts_that_differ(replace(OWN, registers=5)) == ["parameter sizes", "registers"]


def test_an_own_kernel_over_its_thread_limit_shows() -> None:
    assert "threads" in own_facts_that_differ(replace(OWN, symbol="block", threads=97))


def test_an_own_kernel_that_is_not_in_the_file_shows() -> None:
    assert own_facts_that_differ(replace(OWN, symbol="absent")) == ["symbol"]
