from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime import tensor as tensors_module
from cubin_runtime.dtypes import ITEM_BYTES
from cubin_runtime.errors import UsageError
from cubin_runtime.tensor import view_of

pytestmark = pytest.mark.torch


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host are taken to be on CUDA device 0."""
    monkeypatch.setattr(tensors_module, "_torch_device", lambda tensor, name: 0)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32", "uint8", "int64"])
def test_dtypes_go_by_torch_s_names(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 3, dtype=getattr(torch, name))
    view = view_of(tensor, "q")
    assert (view.dtype, ITEM_BYTES[view.dtype]) == (name, tensor.element_size())


@pytest.mark.usefixtures("on_device")
def test_strides_of_a_transposed_slice_are_kept() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 2, 6, dtype=torch.bfloat16)
    part = tensor[:, 1].transpose(0, 1)
    view = view_of(part, "k_cache")
    assert (view.shape, view.strides, view.pointer) == ((6, 4), (1, 12), tensor.data_ptr() + 12)


def test_a_tensor_of_the_host_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="q: is on cpu, expected a CUDA device"):
        view_of(torch.zeros(3), "q")


def negated(torch: Any) -> Any:
    return torch.zeros(2, 3, dtype=torch.complex64).conj().imag


def nested(torch: Any) -> Any:
    return torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)])


def nested_with_offsets(torch: Any) -> Any:
    return torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)


def sparse_rows(torch: Any) -> Any:
    return torch.zeros(2, 3).to_sparse_csr()


def masked(torch: Any) -> Any:
    return torch.masked.masked_tensor(torch.zeros(2), torch.ones(2, dtype=torch.bool))


def fake(torch: Any) -> Any:
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.zeros(2, 3))


UNFAITHFUL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lazily negated": (negated, "is negated lazily"),
    "conjugated": (lambda torch: torch.zeros(2, dtype=torch.complex64).conj(), "dtype complex64"),
    "nested": (nested, "a nested tensor"),
    "nested, of offsets": (nested_with_offsets, "a NestedTensor, which need not have memory of its own"),
    "sparse": (lambda torch: torch.zeros(2, 3).to_sparse(), "layout torch.sparse_coo, expected torch.strided"),
    "sparse rows": (sparse_rows, "layout torch.sparse_csr, expected torch.strided"),
    "of another library's layout": (lambda torch: torch.zeros(2, 3).to_mkldnn(), "layout torch._mkldnn"),
    "quantised": (lambda torch: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "dtype qint8"),
    "masked": (masked, "a MaskedTensor, which need not have memory of its own"),
    "fake": (fake, "a FakeTensor, which need not have memory of its own"),
}


@pytest.mark.usefixtures("on_device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("form", UNFAITHFUL)
def test_a_tensor_that_is_not_what_its_memory_holds_is_refused(form: str) -> None:
    torch = pytest.importorskip("torch")
    make, message = UNFAITHFUL[form]
    with pytest.raises(UsageError, match=f"^q: {message}"):
        view_of(make(torch), "q")


@pytest.mark.usefixtures("on_device")
def test_a_tensor_with_a_forward_mode_tangent_is_refused() -> None:
    torch = pytest.importorskip("torch")
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros(2, 3), torch.ones(2, 3))
        with torch.no_grad(), pytest.raises(UsageError, match=r"^q: has a forward-mode tangent"):
            view_of(dual, "q")
        assert view_of(torch.zeros(2, 3), "q").shape == (2, 3)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_tensor_that_torch_transforms_is_refused(transform: str) -> None:
    torch = pytest.importorskip("torch")

    def function(tensor: Any) -> Any:
        with pytest.raises(UsageError, match=r"^q: a Tensor without memory of its own"):
            view_of(tensor, "q")
        return tensor.sum()

    getattr(torch.func, transform)(lambda tensor: function(tensor.detach()) * tensor.sum())(torch.zeros(3))


def test_a_tensor_on_no_device_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match=r"^q: is on meta, expected a CUDA device"):
        view_of(torch.zeros(3, device="meta"), "q")
