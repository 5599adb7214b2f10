"""Tensors made and read back with torch; its CPU build is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime import attention
from cubin_runtime.attention import Runtime
from cubin_runtime.attention.torch_memory import TorchMemory
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import StandIn
from tests.attention.test_wrong_arguments import CALLS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_an_output_takes_the_dtype_and_device_of_its_model() -> None:
    made = TorchMemory().empty(torch.ones(2, dtype=torch.float16), (3, 4), None)
    assert (tuple(made.shape), made.dtype, made.device.type) == ((3, 4), torch.float16, "cpu")


def test_a_dtype_is_taken_by_its_word() -> None:
    assert TorchMemory().empty(torch.ones(2), (3,), "float8_e4m3fn").dtype == torch.float8_e4m3fn


def test_zeros_are_zero() -> None:
    assert TorchMemory().zeros(torch.ones(2), (8,), "int32").tolist() == [0] * 8


def test_a_scale_is_multiplied_into_a_new_tensor() -> None:
    scale = torch.tensor([0.5])
    made = TorchMemory().scaled(scale, 2.0)
    assert (made.tolist(), made.dtype, scale.tolist()) == ([1.0], torch.float32, [0.5])


def test_two_scales_of_any_shape_are_multiplied() -> None:
    made = TorchMemory().product(torch.tensor(0.5), torch.tensor([[3.0]]))
    assert (made.tolist(), made.dtype) == ([1.5], torch.float32)


def test_counts_are_lengthened_by_a_number_or_the_differences_of_sums() -> None:
    lengths, sums = torch.tensor([5, 0, 7], dtype=torch.int32), torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    made = [TorchMemory().lengthened("counts", lengths, by) for by in (3, sums)]
    assert [tensor.tolist() for tensor in made] == [[8, 3, 10], [7, 0, 11]]
    assert {tensor.dtype for tensor in made} == {torch.int32}
    assert lengths.tolist() == [5, 0, 7]


def test_query_tokens_see_the_keys_up_to_themselves() -> None:
    lengths = torch.tensor([5, 1, 7], dtype=torch.int32)
    made = TorchMemory().causal("counts", lengths, 2, 6)
    assert (made.tolist(), made.dtype) == ([4, 5, 0, 1, 6, 7], torch.int32)


@pytest.mark.parametrize(
    ("sums", "lengths", "seen"),
    [
        ((0, 2, 2, 5), (5, 9, 7), [4, 5, 5, 6, 7]),
        ((0, 5), (3,), [-1, 0, 1, 2, 3]),
        ((0, 0, 3), (9, 3), [1, 2, 3, 4, 5]),
    ],
    ids=["a request without query tokens", "one request", "tokens behind all requests"],
)
def test_tokens_of_ragged_queries_see_the_keys_up_to_themselves(
    sums: tuple[int, ...], lengths: tuple[int, ...], seen: list[int]
) -> None:
    given = (torch.tensor(values, dtype=torch.int32) for values in (lengths, sums))
    made = TorchMemory().causal("counts", *given, 5)
    assert (made.tolist(), made.dtype) == (seen, torch.int32)


def test_integers_come_back_to_the_host() -> None:
    assert TorchMemory().to_host(torch.tensor([0, 3, 7], dtype=torch.int32)) == (0, 3, 7)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_integers_of_several_dimensions_come_back_flat(dtype: torch.dtype) -> None:
    mask = torch.tensor([[[1, 0], [3, 0]], [[1, 0], [65535, 2]]], dtype=dtype)
    assert TorchMemory().to_host(mask) == (1, 0, 3, 0, 1, 0, 65535, 2)


def test_a_tensor_is_scaled_where_it_lies() -> None:
    whole = torch.tensor([[1.0, 2.0], [-torch.inf, 4.0]])
    TorchMemory().scale_in_place(whole[:, 0], 0.5)
    assert whole.tolist() == [[0.5, 2.0], [-torch.inf, 4.0]]


def test_a_tensor_of_inference_mode_is_scaled_outside_of_it() -> None:
    with torch.inference_mode():
        lse = torch.ones(2)
    TorchMemory().scale_in_place(lse, 0.5)
    assert lse.tolist() == [0.5, 0.5]


def test_derivatives_notice_that_a_tensor_was_scaled() -> None:
    lse, factor = torch.ones(2), torch.ones(2, requires_grad=True)
    product = lse * factor
    TorchMemory().scale_in_place(lse, 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize(
    ("like", "stream"),
    [(0, 0x5000), (1, 0x5001), (torch.ones(2, device="meta"), 0x5007), (object(), 0)],
    ids=["device 0", "device 1", "a tensor", "no tensor"],
)
def test_the_current_stream_is_that_of_the_device_and_the_legacy_one_without_torch(like: Any, stream: int) -> None:
    class Memory(TorchMemory):
        @property
        def stream_query(self) -> Callable[[int], int]:
            return lambda device: 0x5000 + (7 if device is None else device)

    assert Memory().current_stream(like) == stream


@pytest.mark.parametrize("call", [name for name in CALLS if "append" not in name])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_no_output_is_made_of_a_nested_tensor(stub_runtime: Runtime, standin: StandIn, call: str, layout: Any) -> None:
    name, arguments = CALLS[call]
    first = next(iter(arguments))
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)
    with pytest.raises(UsageError, match=f"^{first}: a nested tensor"):
        getattr(attention, name)(**{**arguments, first: nested, "out": None}, runtime=stub_runtime)
    assert standin.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize("name", ["parents", "allowed"])
@pytest.mark.parametrize(
    "tree", [torch.zeros(()), torch.zeros(2, 3, requires_grad=True), torch._neg_view(torch.ones(3))]
)
def test_a_tree_on_the_host_that_numpy_cannot_read_is_named(name: str, tree: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}: .*, expected"):
        attention.draft_mask(**{name: tree})
