"""Comparison of an output with the reference, within tolerances that follow from the dtypes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ...attention.reference import bfloat16_values, e4m3_values
from ...attention.tolerances import LSE_TOLERANCE, ROUNDING, ROW_FACTOR
from .call import RecordedTensor
from .references import Reference
from .snapshot import array_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Comparison(NamedTuple):
    """One output beside the reference.

    ``error`` is relative to the norm of the reference (of a log-sum-exp: the largest difference), ``tolerance`` the
    most that it may be. ``wrong`` counts rows of one token and head, of ``rows``, that are off; ``first`` is the
    first one.
    """

    name: str
    error: float
    tolerance: float
    rows: int
    wrong: int
    first: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Return whether the output is within tolerance."""
        return not self.wrong and self.error <= self.tolerance

    def __str__(self) -> str:
        said = f"{self.name}: error {self.error:.2e}, tolerance {self.tolerance:.2e}"
        if not self.wrong:
            return said
        token, head = self.first
        return f"{said}; {self.wrong} of {self.rows} rows are off, the first at token {token}, head {head}"


def compare(name: str, tensor: RecordedTensor, reference: Reference) -> Comparison:
    """``out`` or ``lse`` beside the reference; rows that no request owns do not count."""
    view = tensor.view
    if name == "lse":
        return _of_lse(name, array_of(view, tensor.data).reshape(-1, view.shape[-1]), reference)
    bits = array_of(view, tensor.data).reshape(-1, *view.shape[-2:])
    return _of_output(name, _values(bits, view.dtype), view.dtype, reference)


def _of_output(name: str, values: NDArray[Any], dtype: str, reference: Reference) -> Comparison:
    import numpy as np

    rounding = ROUNDING[dtype]
    want = np.clip(reference.out, -rounding.largest, rounding.largest)
    got = values[: len(want)].astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"{name}: {got.shape}, expected {want.shape}")
    bound = ROUNDING[reference.probabilities].probabilities + rounding.output + reference.of_scores * math.log(2)
    floor = rounding.step * math.sqrt(want.shape[-1])
    errors, norms = np.linalg.norm(got - want, axis=-1), np.linalg.norm(want, axis=-1)
    wrong = ~(errors <= ROW_FACTOR * bound * norms + floor)
    total, size = float(np.linalg.norm(errors)), float(np.linalg.norm(norms))
    spare = floor * math.sqrt(max(1, norms.size))
    error = max(0.0, total - spare) / size if size else total
    return Comparison(name, error if error == error else math.inf, bound, wrong.size, int(wrong.sum()), _first(wrong))


def _of_lse(name: str, got: NDArray[Any], reference: Reference) -> Comparison:
    import numpy as np

    want, tolerance = reference.lse, LSE_TOLERANCE + reference.of_scores
    got = got[: len(want)].astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"{name}: {got.shape}, expected {want.shape}")
    empty = np.isneginf(want)
    distance = np.abs(np.where(empty, 0, got) - np.where(empty, 0, want))
    distance = np.where(empty, np.where(np.isneginf(got), 0, np.inf), distance)
    wrong = ~(distance <= tolerance)
    largest = float(np.nan_to_num(distance, nan=np.inf).max(initial=0.0))
    return Comparison(name, largest, tolerance, wrong.size, int(wrong.sum()), _first(wrong))


def _values(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return bfloat16_values(bits)
    return e4m3_values(bits) if dtype == "float8_e4m3fn" else bits


def _first(wrong: NDArray[Any]) -> tuple[int, ...]:
    import numpy as np

    places = np.argwhere(wrong)
    return tuple(int(index) for index in places[0]) if len(places) else ()
