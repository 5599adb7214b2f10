"""Scales of keys and of values in every form that calls take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cubin_runtime.attention import TensorView
from cubin_runtime.attention.paged_cache import KV_SCALES
from cubin_runtime.testing.device import DeviceArrays

NUMBER, EXPANDED = "number", "expanded"
# "number" is none of a tensor; "expanded" has no stride between requests.
FORMS = (NUMBER, "one", "heads", "requests", EXPANDED)
Scales = tuple[np.ndarray, np.ndarray]


def draw_kv_scales(form: str, requests: int, kv_heads: int, rng: np.random.Generator) -> Scales | None:
    """Scales of keys and of values, some of them negative; None for no form."""
    shapes = {NUMBER: (), "one": (1,), "heads": (kv_heads,), "requests": (requests, kv_heads), EXPANDED: (1, kv_heads)}
    if not form:
        return None
    shape = shapes[form]

    def drawn() -> np.ndarray:
        sizes = rng.uniform(0.4, 2.0, shape) * rng.choice((-1, 1, 1, 1), shape)
        return np.asarray(sizes, np.float32)

    return drawn(), drawn()


def kv_scale_arguments(form: str, scales: Scales | None, requests: int, arrays: DeviceArrays) -> dict[str, Any]:
    """The arguments of a call, by name."""
    if scales is None:
        return {}
    if form == NUMBER:
        return {name: float(value) for name, value in zip(KV_SCALES, scales, strict=True)}
    given = {}
    for name, values in zip(KV_SCALES, scales, strict=True):
        given[name] = TensorView.contiguous(arrays.upload(values), "float32", values.shape)
        if form == EXPANDED:
            given[name] = replace(given[name], shape=(requests, values.shape[1]), strides=(0, 1))
    return given
