"""Which parameter structs a release's kernels take, by the ABI that its pin names."""

from __future__ import annotations

import pytest

from cubin_runtime.artifacts.pins.pin import KNOWN_ABIS
from cubin_runtime.errors import AbiError
from cubin_runtime.kernels import abi
from cubin_runtime.kernels.abi import abi_layouts
from cubin_runtime.launch.structs import Field, StructLayout


@pytest.mark.parametrize("name", [None, "trtllm-gen-9.9"])
def test_a_release_without_a_known_abi_is_never_launched(name: str | None) -> None:
    with pytest.raises(AbiError, match="never launched"):
        abi_layouts(name)


def test_a_declaration_that_drifted_from_the_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drifted = StructLayout.declare("KernelParams", [Field("a", "int32")])
    monkeypatch.setattr("cubin_runtime.kernels.trtllm_gen.params.LAYOUTS", {"KernelParams": drifted})
    with pytest.raises(AbiError, match=r"declared with 4 bytes, .* recorded with 1280 bytes"):
        abi_layouts("trtllm-gen-0.6.13")


def test_the_names_that_pins_may_have_are_those_with_layouts() -> None:
    assert set(KNOWN_ABIS) == set(abi.ABIS)


@pytest.mark.parametrize("name", sorted(abi.RECORDED))
def test_every_record_belongs_to_a_known_abi(name: str) -> None:
    assert name in abi.ABIS
