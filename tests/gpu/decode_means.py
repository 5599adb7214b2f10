"""Queries and keys of zero: every visible key weighs the same, so that the output is the mean of the visible values.

Random data within a dtype's tolerance cannot see a mask that a kernel ignores; this can.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tests.gpu.decode_cases import DecodeCase, HostTensors, Request, assemble, make_request, make_sinks
from tests.gpu.decode_masks import visible_keys
from tests.gpu.decode_values import values_of


def make_means(case: DecodeCase, rng: np.random.Generator) -> HostTensors:
    """Requests whose queries and keys are zero, with random values."""
    requests = [make_request(case, rng, *lens) for lens in zip(case.lengths, case.query_lens, strict=True)]
    zeroed = [replace(request, q=np.zeros_like(request.q), k=np.zeros_like(request.k)) for request in requests]
    return assemble(case, zeroed, rng, make_sinks(case, rng))


def means_of(case: DecodeCase, host: HostTensors) -> tuple[np.ndarray, np.ndarray]:
    """What must come out: output ``[tokens, q_heads, D]`` and LSE in base 2, float64."""
    sinks = np.zeros(case.q_heads) if host.sinks is None else np.exp(host.sinks.astype(np.float64))
    rows = [_means_of_request(case, request, sinks) for request in host.requests]
    return np.concatenate([out for out, _ in rows]), np.concatenate([lse for _, lse in rows])


def _means_of_request(case: DecodeCase, request: Request, sinks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    seen = visible_keys(len(request.k), len(request.q), request.mask, case.window_left, case.by_index)
    values = values_of(case.kv_dtype, request.v).astype(np.float64)
    sums = seen.astype(np.float64) @ values.reshape(len(values), case.kv_heads * case.head_dim)
    sums = sums.reshape(len(seen), case.kv_heads, 1, case.head_dim)
    weight = seen.sum(axis=1)[:, None] + (sinks if case.sinks else 0 * sinks)
    share = np.divide(case.output_scale, weight, out=np.zeros_like(weight, dtype=np.float64), where=weight > 0)
    with np.errstate(divide="ignore"):
        lse = np.log(weight) / math.log(2)
    grouped = share.reshape(len(seen), case.kv_heads, case.group, 1)
    return (sums * grouped).reshape(len(seen), case.q_heads, case.head_dim), lse
