from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cubin_runtime.dtypes import ITEM_BYTES
from cubin_runtime.errors import UsageError
from cubin_runtime.tensor import view_of

pytestmark = pytest.mark.torch


class PosesAsCuda:
    """A real torch tensor of the host that says it is on CUDA device 0."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.device = SimpleNamespace(type="cuda", index=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32", "uint8", "int64"])
def test_dtypes_go_by_torch_s_names(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 3, dtype=getattr(torch, name))
    view = view_of(PosesAsCuda(tensor), "q")
    assert (view.dtype, ITEM_BYTES[view.dtype]) == (name, tensor.element_size())


def test_strides_of_a_transposed_slice_are_kept() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 2, 6, dtype=torch.bfloat16)
    part = tensor[:, 1].transpose(0, 1)
    view = view_of(PosesAsCuda(part), "k_cache")
    assert (view.shape, view.strides, view.pointer) == ((6, 4), (1, 12), tensor.data_ptr() + 12)


def test_a_tensor_of_the_host_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="q: is on cpu, expected a CUDA device"):
        view_of(torch.zeros(3), "q")
