"""MLA decodes on the host in a device's place, computed from their parameter struct; see ``rehearsed_decode``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels_src.variants import VARIANTS
from tests.gpu import rehearsed_decode
from tests.gpu.decode_masks import visible_keys
from tests.gpu.decode_values import KINDS, bits_of, values_of
from tests.gpu.rehearsed_decode import TYPES, RehearsalRuntime, attend, mask_of, memory, query_rows, rehearsal
from tests.kernels.variant_kernels import kernel_of

KERNELS = tuple(kernel_of(x) for x in VARIANTS if x.operation == "paged_mla_decode" and x.base_sm == "90")


@contextmanager
def mla_rehearsal(library: Path, store: Path) -> Iterator[RehearsalRuntime]:
    """A runtime on the stand-in driver at ``library`` whose decodes, MLA among them, are computed here."""
    with rehearsal(library, store) as made:
        own = made.native_release()
        made._native = replace(own, kernels=(*own.kernels, *KERNELS))
        yield made


def decode_latent(p: Mapping[str, Any], traits: Mapping[str, Any], _: Sequence[int]) -> None:
    """What an MLA kernel does with its parameters, clamping included; ``kv_map`` is the descriptor's specification."""
    kv, q_type, out_type = str(traits["dtype"]), TYPES[p["q_type"]], TYPES[p["out_type"]]
    heads, latent, page = p["heads"], int(traits["latent"]), 1 << p["page_size_log2"]
    width = latent + int(traits["rope"])
    item = np.dtype(KINDS[kv].bits).itemsize

    def cache_of(spec: Any, columns: int) -> np.ndarray:
        assert spec.dims == (columns, page, p["num_pages"])
        assert spec.dtype == {"bf16": "bfloat16", "e4m3": "uint8"}[kv]
        strides = (spec.strides[1] // item, spec.strides[0] // item, 1)
        return memory(spec.address, KINDS[kv].bits, (p["num_pages"], page, columns), strides)

    cache = cache_of(p["kv_map"], width)
    values = cache_of(p["v_map"], latent) if traits.get("separate_values") else cache[..., :latent]

    def scale(name: str) -> float:
        return float(memory(p[name], np.float32, (1,), (1,))[0]) if p[name] else 1.0

    status = memory(p["status"], np.uint32, (1,), (1,))
    q, out = _queries(p, KINDS[q_type].bits, latent, width), _of_tokens(p, "out", KINDS[out_type].bits, latent)
    lse = _of_tokens(p, "lse", np.float32) if p["lse"] else None
    table = memory(p["page_table"], np.int32, (p["batch"], -(-p["max_seq_len"] // page)), (p["table_stride"], 1))
    lengths = memory(p["seq_lens"], np.int32, (p["batch"],), (1,))
    words = mask_of(p)
    sinks = memory(p["sinks"], np.float32, (heads,), (1,)).astype(np.float64) if p["sinks"] else None
    shift = 0 if p["splits"] else 1e-5 * (p["batch"] % 64)
    logits = p["softmax_scale_log2"] / math.log2(math.e) * scale("softmax_scale_device")
    factor = p["output_scale"] * scale("output_scale_device")
    for b in range(p["batch"]):
        begin, rows = query_rows(p, b, status)
        length = int(lengths[b])
        status |= np.uint32(1 * (length > p["max_seq_len"]) | 2 * (length < 0))
        length = min(max(length, 0), p["max_seq_len"])
        seen = visible_keys(length, rows, None if words is None else words[begin : begin + rows])
        keys = np.arange(length)
        pages = table[b, keys // page]
        status |= np.uint32(4 * bool(((pages < 0) | (pages >= p["num_pages"])).any()))
        at_keys = np.clip(pages, 0, p["num_pages"] - 1), keys % page
        own, own_values = (values_of(kv, part[at_keys]).astype(np.float64)[:, None] for part in (cache, values))
        queries = values_of(q_type, np.ascontiguousarray(q[begin : begin + rows])).astype(np.float64)
        for i in range(rows):
            at = np.flatnonzero(seen[i])
            row, row_lse = attend(queries[i], own[at], own_values[at], logits, sinks)
            out[begin + i] = bits_of(out_type, row * factor)
            if lse is not None:
                lse[begin + i] = row_lse + shift * rehearsed_decode.show_arithmetic


def _of_tokens(p: Mapping[str, Any], name: str, dtype: Any, *last: int) -> np.ndarray:
    steps = (p[f"{name}_token_stride"], p[f"{name}_head_stride"], 1)[: 2 + len(last)]
    return memory(p[name], dtype, (p["tokens"], p["heads"], *last), steps)


def _queries(p: Mapping[str, Any], dtype: Any, latent: int, width: int) -> np.ndarray:
    """All columns of the queries, wherever the rope columns lie."""
    if p["q_rope"]:
        parts = _of_tokens(p, "q", dtype, latent), _of_tokens(p, "q_rope", dtype, width - latent)
        return np.concatenate(parts, axis=-1)
    assert all(p[f"q_rope_{of}_stride"] == p[f"q_{of}_stride"] for of in ("token", "head"))
    return _of_tokens(p, "q", dtype, width)


rehearsed_decode.COMPUTED["paged_mla_decode"] = decode_latent
