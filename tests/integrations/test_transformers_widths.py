"""Head dimensions without a kernel of their own: padded with zeros, and values in parts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed (make test-torch)")
from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.transformers.attention import attention  # noqa: E402
from cubin_runtime.integrations.transformers.masks import mask  # noqa: E402
from tests.integrations.attention_stand_in import StandIn, in_domain  # noqa: E402

pytestmark = pytest.mark.torch
Q_LEN, KV_LEN = 3, 11
FORMS = {
    "no padding": lambda: mask(2, Q_LEN, KV_LEN, q_offset=KV_LEN - Q_LEN),
    "room": lambda: mask(2, Q_LEN, KV_LEN, q_offset=5),
    "padding": lambda: mask(2, Q_LEN, KV_LEN, q_offset=KV_LEN - Q_LEN, attention_mask=padded()),
}


def padded() -> Any:
    valid = torch.ones(2, KV_LEN, dtype=torch.bool)
    valid[1, :4] = False
    return valid


def states(head_dim: int, value_dim: int) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, Q_LEN, head_dim), (2, 2, KV_LEN, head_dim), (2, 2, KV_LEN, value_dim)]
    return tuple(torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)  # type: ignore[return-value]


# The shapes of checkpoints: DiffLlama's values, DeepSeek's prefill, Phi-2, Phi-3 mini, MiniCPM3.
WIDTHS = [(64, 128), (64, 192), (192, 128), (192, 192), (80, 80), (96, 96), (96, 64), (16, 16), (256, 128), (160, 160)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("head_dim", "value_dim"), WIDTHS)
@pytest.mark.parametrize("scaling", [0.2, None])
def test_attention_of_other_head_dimensions(head_dim: int, value_dim: int, form: str, scaling: float | None) -> None:
    q, k, v = states(head_dim, value_dim)
    scale = head_dim**-0.5 if scaling is None else scaling
    found, _ = attention(in_domain(StandIn().operators), object(), q, k, v, FORMS[form](), scaling=scaling)
    expected, _ = attention(StandIn().operators, object(), q, k, v, FORMS[form](), scaling=scale)
    assert found.shape == (2, Q_LEN, 4, value_dim)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.002)


def test_the_shapes_of_kernels_take_one_call_without_copies() -> None:
    stand_in, (q, k, v) = StandIn(), states(64, 64)
    taken = []
    even = stand_in.operators.even
    operators = stand_in.operators._replace(
        even=lambda q, k, v, **given: taken.append((k, v)) or even(q, k, v, **given)
    )
    attention(operators, object(), q, k, v, FORMS["no padding"](), scaling=0.1)
    assert [(one.data_ptr(), other.data_ptr()) for one, other in taken] == [(k.data_ptr(), v.data_ptr())]


def test_a_head_dimension_above_all_is_refused() -> None:
    q, k, v = states(320, 320)
    with pytest.raises(UsageError, match="head dimensions 320"):
        attention(in_domain(StandIn().operators), object(), q, k, v, FORMS["room"](), scaling=0.1)
