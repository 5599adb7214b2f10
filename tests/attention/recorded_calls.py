"""Recorded calls made on the host: a decode of two requests whose outputs are those of the reference."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cubin_runtime.attention.reference import bfloat16_bits
from cubin_runtime.debug.recorded.call import RecordedCall, RecordedTensor
from cubin_runtime.debug.recorded.call_file import write_call
from cubin_runtime.debug.recorded.references import reference_of
from cubin_runtime.tensor import TensorView

ORIGIN = {"pin": "hopper-made", "device": "made-up GPU", "cubin_runtime": "0.0"}
KERNEL = {"kernel": "made_up_sm90a", "symbol": "made_up", "sha256": "ab" * 32, "grid": "(1, 1, 2)"}
OPTIONS = {"max_seq_len": 64, "planned_max_seq_len": 64, "softmax_scale": 0.25, "output_scale": 1.0}
PAGES = (1, 2, 5)  # of 8


def decode_call(*, ragged: bool = False, operator: str = "paged_decode", error: str = "") -> RecordedCall:
    """Requests of 17 and 9 keys in pages of 16, 2 query heads over 1 of 32 columns."""
    cache = (8, 16, 1, 32)
    tensors = {
        "q": _random(1, (3 if ragged else 2, 2, 32)),
        "k_cache": _paged(2, cache),
        "v_cache": _paged(3, cache),
        **_tables(),
    }
    if ragged:
        tensors["q_cu_seq_lens"] = _integers(7, [0, 2, 3])
    more = {"kv_layout": "NHD", "max_q_len": 2 if ragged else None, "window_left": -1, "batch_invariant": False}
    return _finished(operator, tensors, {**more, "backend": "auto", "enable_pdl": False}, error, 32)


def mla_call(*, separate_values: bool = False, separate_rope: bool = False) -> RecordedCall:
    """One latent cache of 64 + 64 columns, which no kernel takes."""
    tensors = {"q": _random(1, (2, 2, 128)), "kv_cache": _paged(2, (8, 16, 1, 128)), **_tables()}
    if separate_values:
        tensors["v_cache"] = _paged(3, (8, 16, 1, 64))
    if separate_rope:
        tensors |= {"q": _random(1, (2, 2, 64)), "q_rope": _random(4, (2, 2, 64))}
    return _finished("mla_decode", tensors, {"max_q_len": None, "batch_invariant": False}, "", 64)


def context_call(*, even: bool = False) -> RecordedCall:
    """Two requests of 2 and 4 query tokens over 5 and 4 keys, 2 heads of 64 columns; ``even``: of 3 over 4 keys."""
    sizes = ((2, 3), (2, 5)) if even else ((6,), (9,))
    tensors = {"q": _random(1, (*sizes[0], 2, 64)), "k": _random(2, (*sizes[1], 1, 64))}
    tensors["v"] = _random(3, (*sizes[1], 1, 64))
    if even:
        tensors["seq_lens"] = _integers(6, [4, 5])
    else:
        tensors |= {"q_cu_seq_lens": _integers(7, [0, 2, 6]), "kv_cu_seq_lens": _integers(8, [0, 5, 9])}
    more = {"max_q_len": None, "causal": True, "window_left": -1, "window_right": -1, "logit_soft_cap": 0.0}
    more |= {"lse_base": "2", "lse_sink": True, "backend": "auto", "enable_pdl": False}
    return _finished("context_attention", tensors, more, "", 64)


def call_bytes(call: RecordedCall) -> bytes:
    """The call as a file."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "call"
        write_call(call, file)
        return file.read_bytes()


def _finished(
    operator: str, tensors: dict[str, RecordedTensor], more: dict[str, Any], error: str, columns: int
) -> RecordedCall:
    shape = (*tensors["q"].view.shape[:-1], columns)
    view = TensorView.contiguous(9 << 20, "bfloat16", shape)
    tensors["out"] = RecordedTensor(view, b"", output=True)
    call = RecordedCall(operator, tensors, {**OPTIONS, **more}, PAGES, (KERNEL,), ORIGIN, error)
    if error or operator == "other":
        return call
    bits = bfloat16_bits(reference_of(call).out).tobytes().ljust(2 * prod(shape), b"\0")
    return replace(call, tensors={**tensors, "out": replace(tensors["out"], data=bits)})


def _tables() -> dict[str, RecordedTensor]:
    table = _integers(5, [1, 5, 0, 0, 2, 0, 0, 99])
    view = TensorView.contiguous(5 << 20, "int32", (2, 4))
    return {"page_table": replace(table, view=view), "seq_lens": _integers(6, [17, 9])}


def _random(place: int, shape: tuple[int, ...]) -> RecordedTensor:
    view = TensorView.contiguous(place << 20, "bfloat16", shape)
    values = np.random.default_rng(place).standard_normal(shape)
    return RecordedTensor(view, bfloat16_bits(values).tobytes())


def _paged(place: int, shape: tuple[int, ...]) -> RecordedTensor:
    stored = _random(place, (len(PAGES), *shape[1:]))
    return replace(stored, view=TensorView.contiguous(place << 20, "bfloat16", shape), paged=True)


def _integers(place: int, values: list[int]) -> RecordedTensor:
    view = TensorView.contiguous(place << 20, "int32", (len(values),))
    return RecordedTensor(view, np.array(values, dtype=np.int32).tobytes())
