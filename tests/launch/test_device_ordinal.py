"""Devices of torch, cuda.core and cuda.bindings name the same ordinal."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.launch.devices import device_ordinal


class TorchLike(NamedTuple):
    type: str
    index: int | None


class CoreLike(NamedTuple):
    device_id: Any


@pytest.mark.parametrize(
    ("device", "ordinal"), [(0, 0), (3, 3), (TorchLike("cuda", 2), 2), (TorchLike("cuda", None), 0), (CoreLike(1), 1)]
)
def test_a_device_is_read(device: Any, ordinal: int) -> None:
    assert device_ordinal(device) == ordinal


def test_a_device_of_cuda_bindings_is_read() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    assert device_ordinal(bindings.CUdevice(2)) == 2


@pytest.mark.parametrize("device", [None, -1, "cuda", 1.0, True, TorchLike("cpu", 0), CoreLike("0")])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(UsageError, match="device: got"):
        device_ordinal(device)
