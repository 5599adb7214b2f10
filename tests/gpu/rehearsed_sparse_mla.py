"""Sparse MLA decodes on the host in a device's place, from their parameter struct; see ``rehearsed_decode``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels_src.variants import VARIANTS
from tests.gpu import rehearsed_decode
from tests.gpu.decode_values import KINDS, bits_of, values_of
from tests.gpu.rehearsed_decode import TYPES, RehearsalRuntime, attend, memory, rehearsal
from tests.gpu.sparse_mla_cases import SparseMlaCase, row_values
from tests.kernels.variant_kernels import kernel_of

KERNELS = tuple(kernel_of(x) for x in VARIANTS if x.operation == "sparse_mla_decode")


@contextmanager
def sparse_mla_rehearsal(library: Path, store: Path) -> Iterator[RehearsalRuntime]:
    """A runtime on the stand-in driver at ``library`` whose sparse MLA decodes are computed here."""
    with rehearsal(library, store) as made:
        own = made.native_release()
        made._native = replace(own, kernels=(*own.kernels, *KERNELS))
        yield made


def decode_lists(p: Mapping[str, Any], traits: Mapping[str, Any], _: Sequence[int]) -> None:
    """What the kernel does with its parameters, clamping included."""
    form = SparseMlaCase(cache=str(traits["cache_rows"]))
    tokens, heads, latent, out_type = p["batch"], p["heads"], int(traits["latent"]), TYPES[p["out_type"]]
    pages = -(-p["rows"] >> p["page_size_log2"])
    size = 1 << p["page_size_log2"]
    cache = memory(p["kv_cache"], np.uint8, (pages, size, form.row_bytes), (p["page_bytes"], p["row_bytes"], 1))

    def of_tokens(name: str, dtype: Any, last: tuple[int, ...]) -> np.ndarray:
        steps = (p[f"{name}_token_stride"], p[f"{name}_head_stride"], 1)[: 2 + len(last)]
        return memory(p[name], dtype, (tokens, heads, *last), steps)

    def scale(name: str) -> float:
        return (
            p[name] * float(memory(p[f"{name}_device"], np.float32, (1,), (1,))[0]) if p[f"{name}_device"] else p[name]
        )

    status = memory(p["status"], np.uint32, (1,), (1,))
    q, out = of_tokens("q", np.uint16, (form.columns,)), of_tokens("out", KINDS[out_type].bits, (latent,))
    lse = of_tokens("lse", np.float32, ()) if p["lse"] else None
    lists = memory(p["indices"], np.int32, (tokens, p["width"]), (p["indices_stride"], 1))
    lens = memory(p["topk_lens"], np.int32, (tokens,), (1,)) if p["topk_lens"] else np.full(tokens, p["width"])
    sinks = memory(p["sinks"], np.float32, (heads,), (1,)).astype(np.float64) if p["sinks"] else None
    for token in range(tokens):
        count = int(lens[token])
        status |= np.uint32(1 * (count > p["width"]) | 2 * (count < 0))
        slots = lists[token, : min(max(count, 0), p["width"])].astype(np.int64)
        status |= np.uint32(4 * bool((slots >= p["rows"]).any()))
        slots = slots[(slots >= 0) & (slots < p["rows"])]
        keys = row_values(form, cache[slots >> p["page_size_log2"], slots & (size - 1)])[:, None]
        queries = values_of("bf16", np.ascontiguousarray(q[token])).astype(np.float64)
        row, row_lse = attend(queries, keys, keys[..., :latent], scale("softmax_scale"), sinks)
        out[token] = bits_of(out_type, row * scale("output_scale"))
        if lse is not None:
            if not p["lse_sink"]:
                row_lse = attend(queries, keys, keys[..., :latent], scale("softmax_scale"), None)[1]
            lse[token] = row_lse * p["lse_from_log2"]


rehearsed_decode.COMPUTED["sparse_mla_decode"] = decode_lists
