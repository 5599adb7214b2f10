"""Without torch, what would have to be made is asked of the caller."""

from __future__ import annotations

import pytest

from cubin_runtime.attention import TensorView
from cubin_runtime.attention.torch_memory import TorchMemory
from cubin_runtime.errors import UsageError

VIEW = TensorView.contiguous(0x1000, "int32", (4,))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda memory: memory.empty(VIEW, (4,), None), "an output"),
        (lambda memory: memory.zeros(VIEW, (4,), "int32"), "counters"),
        (lambda memory: memory.scaled(VIEW, 2.0), "a scale in base 2"),
        (lambda memory: memory.to_host(VIEW), "host values"),
    ],
)
def test_other_tensors_than_torch_s_are_refused(act: object, words: str) -> None:
    with pytest.raises(UsageError, match=f"{words} would be made from a TensorView.*pass it yourself"):
        act(TorchMemory())  # type: ignore[operator]


def test_only_a_torch_tensor_is_scaled_where_it_lies() -> None:
    with pytest.raises(UsageError, match="lse: got TensorView, expected a torch tensor"):
        TorchMemory().check_scalable("lse", VIEW)


def test_keys_are_counted_for_torch_tensors_alone() -> None:
    with pytest.raises(UsageError, match="counts: got TensorView, expected torch tensors to count keys by"):
        TorchMemory().causal("counts", VIEW, 3, 12)


def test_only_a_torch_tensor_of_x() -> None:
    with pytest.raises(UsageError, match="counts: got TensorView, expected torch tensors where lengths are added"):
        TorchMemory().lengthened("counts", VIEW, 3)


def test_other_tensors_run_on_the_legacy_default_stream() -> None:
    assert TorchMemory().current_stream(VIEW) == 0
