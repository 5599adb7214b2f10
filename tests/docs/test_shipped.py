"""What the pages say of sizes and spilled registers, compared with the release that is built here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from cubin_runtime._version import KERNELS_VERSION
from tests.docs.pages import ROOT

BUILT = ROOT / "build" / "artifacts" / f"hopper-{KERNELS_VERSION}"
CHECKSUMS = BUILT / "checksums.txt"
IS_PINNED = CHECKSUMS.is_file() and CHECKSUMS.read_bytes() == (ROOT / "benchmarks/results/checksums.txt").read_bytes()
pytestmark = pytest.mark.skipif(not IS_PINNED, reason="the pinned release is not built here")
Kernel = Mapping[str, Any]


def text_of(page: str) -> str:
    return " ".join((ROOT / "docs" / page).read_text().split())


def kernels(of: Callable[[Kernel], bool]) -> list[Kernel]:
    return [kernel for kernel in json.loads((BUILT / "kernels.json").read_text())["kernels"] if of(kernel)]


def megabytes(of: Callable[[Kernel], bool]) -> str:
    return f"{sum((BUILT / kernel['file']).stat().st_size for kernel in kernels(of)) / 1e6:.1f} MB"


def spills(of: Callable[[Kernel], bool]) -> dict[str, int]:
    return {kernel["name"]: kernel["spill_bytes"] for kernel in kernels(of) if kernel["spill_bytes"]}


def test_paged_decode() -> None:
    on_hopper = megabytes(lambda k: k["operation"] == "paged_decode" and k["sm"] == "90a")
    others = megabytes(lambda k: k["operation"] == "paged_decode" and k["sm"] != "90a")
    text = text_of("decode_kernels.md")
    assert f"The cubins for SM90a take {on_hopper}, those for the other architectures {others}." in text
    assert spills(lambda k: k["operation"] == "paged_decode") == {
        "fmha_paged_decode_bf16_d128_rows128_sm90a": 224,
        "fmha_paged_decode_fp16_d128_rows128_sm90a": 224,
        "fmha_paged_decode_e4m3_d128_rows16_sm90a": 8,
        "fmha_paged_decode_e4m3_q_bf16_d64_rows8_segments_sm90a": 8,
        "fmha_paged_decode_e4m3_q_fp16_d128_rows64_segments_sm90a": 44,
    }
    assert "at head_dim 128 for 16-bit caches spill 224 bytes per thread, the one with 16 rows for e4m3" in text


def test_mla_decode() -> None:
    text = text_of("mla_kernels.md")
    on_hopper = [kernel["name"] for kernel in kernels(lambda k: k["operation"] == "paged_mla_decode")]
    assert f"Together they take {megabytes(lambda k: k['name'] in on_hopper and k['sm'] == '90a')};" in text
    assert spills(lambda k: k["name"] in on_hopper) == {
        **{kernel: 8 for kernel in on_hopper if kernel.startswith("paged_mla_decode_e4m3_q_e4m3_")},
        "portable_mla_decode_e4m3_latent512_sm90": 48,
        "portable_mla_decode_e4m3_latent512_rope0_sm90": 48,
    }
    assert "those for e4m3 queries spill 8 bytes per thread, the others no register" in text
    assert "that for `sm_90` 48 bytes per thread with 512 latent columns" in text


def test_context_attention() -> None:
    found = spills(lambda k: k["operation"] == "context_attention")
    assert all("_over_e4m3_" in name for name in found)
    assert (len(found), min(found.values()), max(found.values())) == (7, 8, 68)
    assert "Seven of these spill 8 to 68 bytes per thread" in text_of("prefill.md")
