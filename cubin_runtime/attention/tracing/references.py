"""The sources of references in torch that definitions carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from .schema import Scalar, Tensor


def run_of(
    function: str,
    inputs: Sequence[Tensor | Scalar],
    outputs: Sequence[Tensor],
    more: Mapping[str, str],
    *,
    without: Sequence[str] = (),
) -> str:
    """The source of ``run``, which gives its arguments to ``function`` of ``FUNCTION_reference.py``.

    Args:
        inputs, outputs: of the definition; of two outputs the second is the log-sum-exp.
        more: arguments of ``function`` beside the inputs, as expressions over these.
        without: inputs that it does not take.
    """
    texts = {part.name: part.name for part in inputs if part.name not in without} | dict(more)
    texts |= {"out_dtype": f"torch.{outputs[0].view.dtype}", "with_lse": repr(len(outputs) > 1)}
    passed = ", ".join(f"{name}={text}" for name, text in texts.items())
    return (
        f"{_source(function)}\n\ndef run({', '.join(part.name for part in inputs)}):\n    return {function}({passed})\n"
    )


@cache
def _source(function: str) -> str:
    return Path(__file__).with_name(f"{function}_reference.py").read_text()
