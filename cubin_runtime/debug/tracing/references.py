"""The sources of references in torch that definitions carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from .schema import Scalar, Tensor


def run_of(
    function: str,
    inputs: Sequence[Tensor | Scalar],
    more: Mapping[str, str],
    *,
    without: Sequence[str] = (),
) -> str:
    """The source of ``run``, which gives its arguments to ``function`` of ``FUNCTION_reference.py``.

    Args:
        inputs: of the definition.
        more: arguments of ``function`` beside the inputs, as expressions over these.
        without: inputs that it does not take.
    """
    texts = {part.name: part.name for part in inputs if part.name not in without} | dict(more)
    passed = ", ".join(f"{name}={text}" for name, text in texts.items())
    return (
        f"{_source(function)}\n\ndef run({', '.join(part.name for part in inputs)}):\n    return {function}({passed})\n"
    )


def of_attention(outputs: Sequence[Tensor]) -> dict[str, str]:
    """The arguments of a reference of attention that follow from the outputs: the output, perhaps a log-sum-exp."""
    return {"out_dtype": f"torch.{outputs[0].view.dtype}", "with_lse": repr(len(outputs) > 1)}


@cache
def _source(function: str) -> str:
    return Path(__file__).with_name(f"{function}_reference.py").read_text()
