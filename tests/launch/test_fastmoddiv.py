from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubin_runtime.errors import UsageError
from cubin_runtime.launch.structs import INT32_MAX, FastModDiv

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "fastmoddiv.json").read_text())["entries"]
int32_positive = st.integers(1, INT32_MAX)
int32_natural = st.integers(0, INT32_MAX)


@pytest.mark.parametrize("entry", REFERENCE, ids=lambda entry: str(entry["d"]))
def test_words_are_those_of_the_reference(entry: dict[str, object]) -> None:
    made = FastModDiv.of(int(str(entry["d"])))
    assert made.to_bytes().hex() == entry["hex"]


@settings(max_examples=2000)
@given(int32_natural, int32_positive)
def test_divides_as_integers_do(dividend: int, divisor: int) -> None:
    made = FastModDiv.of(divisor)
    assert (made.divide(dividend), made.modulo(dividend)) == divmod(dividend, divisor)


@settings(max_examples=2000)
@given(int32_positive, st.data())
def test_divides_exactly_around_multiples(divisor: int, data: st.DataObject) -> None:
    multiple = data.draw(st.integers(0, INT32_MAX // divisor)) * divisor
    dividend = min(INT32_MAX, max(0, multiple + data.draw(st.sampled_from([-1, 0, 1]))))
    assert FastModDiv.of(divisor).divide(dividend) == dividend // divisor


@given(int32_positive)
def test_divides_the_largest_dividend(divisor: int) -> None:
    assert FastModDiv.of(divisor).divide(INT32_MAX) == INT32_MAX // divisor


@given(int32_positive)
def test_words_fit_their_fields_and_read_back(divisor: int) -> None:
    made = FastModDiv.of(divisor)
    assert FastModDiv.from_bytes(made.to_bytes()) == made


@pytest.mark.parametrize("divisor", [0, -1, 2**31])
def test_a_divisor_outside_int32_is_refused(divisor: int) -> None:
    with pytest.raises(UsageError, match=f"divisor={divisor}"):
        FastModDiv.of(divisor)
