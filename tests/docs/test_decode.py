"""What docs/decode.md says about the kernels that ship, compared with the list of variants."""

from __future__ import annotations

from pathlib import Path

from kernels_src.variants import VARIANTS

TEXT = " ".join((Path(__file__).parents[2] / "docs" / "decode.md").read_text().split())
DECODES = [variant for variant in VARIANTS if variant.operation == "paged_decode"]
PORTABLE = [variant for variant in DECODES if variant.sm != "90a"]


def test_it_counts_the_kernels() -> None:
    measured = len(DECODES) - len(PORTABLE)
    assert f"The release has {len(DECODES)} decode kernels, {measured} of them for SM90a" in TEXT


def test_it_names_what_portable_kernels_lack() -> None:
    e4m3 = min(int(variant.sm) for variant in PORTABLE if variant.traits["dtype"] == "e4m3")
    head_dims = [int(variant.traits["head_dim"]) for variant in PORTABLE]
    assert f"head_dim {min(head_dims)} to {max(head_dims)}, and e4m3 from SM{e4m3} on" in TEXT
