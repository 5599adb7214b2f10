"""Partial results at random, and the comparison of a merge of them with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubin_runtime.attention.values import bfloat16_bits, bfloat16_values
from tests.attention.append_reference import merge_states_reference

_BITS = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
_ERROR = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}


@dataclass(frozen=True)
class MergeCase:
    """``other``: the last part is a tensor of its own. ``in_place``: the output is the first of two parts."""

    tokens: int = 7
    parts: int = 3
    heads: int = 5
    dim: int = 128
    dtype: str = "bfloat16"
    out: str = "bfloat16"
    other: bool = False
    in_place: bool = False
    sinks: bool = False
    mask: bool = False
    base: str = "2"
    empty: float = 0.2  # share of parts that saw no key
    with_lse: bool = True


def random_case(rng: np.random.Generator) -> MergeCase:
    dtype = str(rng.choice(list(_BITS)))
    in_place = bool(rng.integers(3) == 0)
    return MergeCase(
        int(rng.integers(1, 20)),
        2 if in_place else int(rng.integers(1, 8)),
        int(rng.integers(1, 9)),
        int(rng.choice([8, 64, 80, 128, 192, 256, 512, 576])),
        dtype,
        dtype if in_place else str(rng.choice(list(_BITS))),
        in_place or bool(rng.integers(2)),
        in_place,
        bool(rng.integers(2)),
        bool(rng.integers(2)),
        str(rng.choice(["2", "e"])),
        float(rng.choice([0.0, 0.3, 1.0])),
        in_place or bool(rng.integers(2)),
    )


class MergeArrays:
    """Host arrays of a case; ``make`` gives memory of a shape and dtype, filled with NaN."""

    def __init__(self, case: MergeCase, rng: np.random.Generator, make: Callable[[tuple[int, ...], Any], np.ndarray]):
        self.case = case
        shape = (case.tokens, case.parts, case.heads)
        s = rng.normal(0, 8, shape).astype(np.float32)
        s[rng.random(shape) < case.empty] = -np.inf
        values = rng.normal(0, 1, (*shape, case.dim)).astype(np.float32)
        values[np.isneginf(s)] = np.nan  # whatever is there does not count
        self.s = make(shape, np.float32)
        self.s[...] = s
        self.v = make(values.shape, _BITS[case.dtype])
        self.v[...] = bfloat16_bits(values) if case.dtype == "bfloat16" else values
        self.sinks = rng.normal(0, 4, case.heads).astype(np.float32) if case.sinks else None
        self.mask = rng.random(case.tokens) < 0.6 if case.mask else None
        own = case.parts - case.other
        self.out = self.v[:, 0] if case.in_place else make((case.tokens, case.heads, case.dim), _BITS[case.out])
        if case.in_place:
            self.lse = self.s[:, 0]
        else:  # heads first
            self.lse = make((case.heads, case.tokens), np.float32).T
        self.wide = bfloat16_values(self.v) if case.dtype == "bfloat16" else self.v.astype(np.float64)
        self.given = self.s.copy()
        self.parts = (self.v[:, :own], self.s[:, :own]) if own else (self.v[:, 0], self.s[:, 0])

    def arguments(self, place: Callable[[np.ndarray, str | None], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and options of ``plan_merge_states``; ``place`` gives the tensor of an array and its dtype."""
        case = self.case
        own = case.parts - case.other
        if not own:  # of one part alone
            tensors = {"parts": place(self.v, case.dtype), "part_lses": place(self.s, None)}
        elif case.in_place:
            tensors = {"parts": place(self.v[:, 0], case.dtype), "part_lses": place(self.s[:, 0], None)}
        else:
            tensors = {"parts": place(self.v[:, :own], case.dtype), "part_lses": place(self.s[:, :own], None)}
        if case.other and own:
            tensors |= {"other": place(self.v[:, -1], case.dtype), "other_lse": place(self.s[:, -1], None)}
        tensors["out"] = place(self.out, case.out)
        if case.with_lse:
            tensors["lse"] = place(self.lse, None)
        for name in ("sinks", "mask"):
            if getattr(self, name) is not None:
                tensors[name] = place(getattr(self, name), None)
        return tensors, {"lse_base": case.base}

    def check(self) -> None:
        """The output and its log-sum-exp are right, and what is masked is as it was."""
        case = self.case
        want, want_lse = merge_states_reference(self.wide, self.given, sinks=self.sinks, lse_base=case.base)
        out = bfloat16_values(self.out) if case.out == "bfloat16" else self.out.astype(np.float64)
        merged = np.ones(case.tokens, bool) if self.mask is None else self.mask
        bound = max(_ERROR[case.out], 2.0**-20)
        np.testing.assert_allclose(out[merged], want[merged], rtol=bound, atol=2.0**-19)
        if case.with_lse:
            np.testing.assert_allclose(self.lse[merged], want_lse[merged], rtol=2e-6, atol=2e-6)
        if case.in_place:
            np.testing.assert_array_equal(self.lse[~merged], self.given[~merged, 0])
            np.testing.assert_array_equal(out[~merged], self.wide[~merged, 0])
        else:
            assert np.isnan(out[~merged]).all()
            assert np.isnan(self.lse[~merged]).all()
