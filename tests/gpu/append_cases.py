"""Appends at random: layouts, views, dtypes, ragged and dense tables; on any memory, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cubin_runtime.attention.paged_cache import KV_SCALES
from cubin_runtime.attention.values import bfloat16_bits, bfloat16_values, e4m3_bits
from tests.attention.append_reference import append_kv_reference, token_positions
from tests.gpu.kv_scales import EXPANDED, FORMS, NUMBER, Scales, draw_kv_scales

UNTOUCHED = 0xA5
_BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float8_e4m3fn": np.uint8}


@dataclass(frozen=True)
class AppendCase:
    """One append. ``layout`` is NHD, HND, or ``columns``: K and V are columns of one tensor of one head.

    ``new`` are the new tokens of each request, ``before`` its keys before them; ``by`` says how tokens find their
    places: ``offsets``, ``request`` (all have as many) or ``token``. ``padding``: tokens behind the last offset.
    """

    new: tuple[int, ...]
    before: tuple[int, ...]
    source: str = "bfloat16"
    cache: str = "bfloat16"
    kv_heads: int = 2
    dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    layout: str = "NHD"
    by: str = "offsets"
    ragged_table: bool = False
    lengths_include_new: bool = True
    scales: Scales | None = None
    scale_form: str = ""
    padding: int = 0
    strided: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.new) + self.padding


def random_case(rng: np.random.Generator) -> AppendCase:
    batch, layout = int(rng.integers(1, 7)), str(rng.choice(["NHD", "HND", "columns"]))
    by = str(rng.choice(["offsets", "request", "token"]))
    new = tuple(int(n) for n in (rng.integers(0, 40, batch) if by != "request" else [rng.integers(1, 20)] * batch))
    source, cache = [
        ("bfloat16", "bfloat16"), ("float16", "float16"), ("float8_e4m3fn", "float8_e4m3fn"),
        ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e4m3fn"),
    ][int(rng.integers(5))]  # fmt: skip
    padding = int(rng.integers(0, 9)) if by != "request" else 0
    if not sum(new) + padding:
        new = (3, *new[1:])
    quantised = source != cache
    case = AppendCase(
        new,
        tuple(int(n) for n in rng.integers(0, 90, batch)),
        source,
        cache,
        kv_heads=1 if layout == "columns" else int(rng.choice([1, 2, 3, 8])),
        dims=(512, 64) if layout == "columns" else [(64, 64), (128, 128), (192, 128), (32, 48)][int(rng.integers(4))],
        page_size=int(rng.choice([1, 2, 5, 16, 64, 256])),
        layout=layout,
        by=by,
        ragged_table=bool(rng.integers(2)),
        lengths_include_new=bool(rng.integers(2)),
        padding=padding,
        strided=bool(rng.integers(2)),
    )
    if quantised and rng.integers(4):
        form = str(rng.choice(FORMS))
        case = replace(case, scale_form=form, scales=draw_kv_scales(form, batch, case.kv_heads, rng))
    return case


class AppendArrays:
    """Host arrays of a case: what a caller has, and the caches with gaps that nothing may write."""

    def __init__(self, case: AppendCase, rng: np.random.Generator, make: Callable[[tuple[int, ...], Any], np.ndarray]):
        """``make`` gives memory of a shape and dtype, filled with ``UNTOUCHED``."""
        self.case = case
        self.k, self.v = (self._source(rng, dim, make) for dim in case.dims)
        lengths = np.array([old + new for old, new in zip(case.before, case.new, strict=True)])
        needed = [-(-int(n) // case.page_size) for n in lengths]
        pages = sum(needed) + 3
        ids = rng.permutation(pages).astype(np.int32)
        begins = np.cumsum([0, *needed]).astype(np.int32)
        table = np.full((len(needed), max(1, *needed)), -(2**31), np.int32)
        for request, count in enumerate(needed):
            table[request, :count] = ids[begins[request] : begins[request] + count]
        self.page_indptr = begins if case.ragged_table else None
        self.page_table = ids[: max(1, begins[-1])].copy() if case.ragged_table else table
        self.seq_lens = (lengths if case.lengths_include_new else np.array(case.before)).astype(np.int32)
        self.q_cu_seq_lens = np.cumsum([0, *case.new]).astype(np.int32)
        positions, requests = token_positions(
            self.seq_lens, self.q_cu_seq_lens, case.tokens, lengths_include_new=case.lengths_include_new
        )
        self.positions, self.requests = np.array(positions, np.int32), np.array(requests, np.int32)
        self.whole, self.k_cache, self.v_cache = self._caches(pages, make)

    def _source(self, rng: np.random.Generator, dim: int, make: Any) -> np.ndarray:
        case, extra = self.case, 16 * self.case.strided
        shape = (case.tokens, case.kv_heads + int(case.strided), dim + extra)
        values = rng.normal(0, 20, shape).astype(np.float32)
        values.flat[::97] = np.nan
        values.flat[5::89] = rng.choice([1e4, -1e4, 0.0, -0.0, 448.0, 2**-10])
        bits = {"bfloat16": bfloat16_bits, "float16": lambda x: x.astype(np.float16).view(np.uint16)}
        held = make(shape, _BITS[case.source])
        held[...] = bits.get(case.source, e4m3_bits)(values)
        return held[:, : case.kv_heads, :dim]

    def _caches(self, pages: int, make: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The memory of both, and K and V as the operator takes them."""
        case, bits, (dk, dv) = self.case, _BITS[self.case.cache], self.case.dims
        if case.layout == "columns":
            whole = make((pages, case.page_size, dk + dv + 16 * case.strided), bits)
            return whole, whole[..., :dk], whole[..., dk : dk + dv]
        heads, gap = case.kv_heads, 16 * case.strided
        middle = (case.page_size, heads) if case.layout == "NHD" else (heads, case.page_size)
        whole = make((pages, *middle, dk + gap + dv), bits)  # V lies behind K in each row
        return whole, whole[..., :dk], whole[..., dk + gap :]

    @property
    def canonical(self) -> tuple[np.ndarray, np.ndarray]:
        """The caches as ``[pages, page_size, kv_heads, dim]``."""
        if self.case.layout == "columns":
            return self.k_cache[:, :, None], self.v_cache[:, :, None]
        turned = self.case.layout == "HND"
        return tuple(c.transpose(0, 2, 1, 3) if turned else c for c in (self.k_cache, self.v_cache))  # type: ignore

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """The bits that the caches shall hold of each token."""
        case = self.case
        if case.source == case.cache:
            return self.k, self.v
        wide = bfloat16_values if case.source == "bfloat16" else lambda b: b.view(np.float16).astype(np.float32)
        every = (len(case.new), case.kv_heads)
        scales = case.scales or (np.ones(1, np.float32),) * 2
        # Tokens of no request are not stored.
        inverses = [(np.float32(1) / np.broadcast_to(scale, every))[self.requests, :, None] for scale in scales]
        sources = zip((self.k, self.v), inverses, strict=True)
        with np.errstate(over="ignore"):
            parts = [e4m3_bits(wide(np.ascontiguousarray(x)) * inverse) for x, inverse in sources]
        return parts[0], parts[1]

    def expected(self) -> np.ndarray:
        """The memory of the caches after the append."""
        before = self.whole.copy()
        append_kv_reference(
            *self.stored(),
            *self.canonical,
            self.page_table,
            positions=self.positions,
            batch_indices=self.requests,
            page_indptr=self.page_indptr,
        )
        after = self.whole.copy()
        self.whole[...] = before
        return after

    def arguments(self, place: Callable[[np.ndarray, str | None], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and options of ``plan_append_kv`` by name; ``place`` gives the tensor of an array and its dtype."""
        case = self.case
        key, value, every = self.k, self.v, (len(self.case.new), self.case.kv_heads)
        if case.by == "request":
            shape = (len(case.new), case.new[0])
            key, value = (
                np.lib.stride_tricks.as_strided(
                    x, (*shape, *x.shape[1:]), (shape[1] * x.strides[0], *x.strides)
                )
                for x in (key, value)
            )  # fmt: skip
        tensors: dict[str, Any] = {
            "k": place(key, case.source),
            "v": place(value, case.source),
            "k_cache": place(self.k_cache, case.cache),
            "v_cache": place(self.v_cache, case.cache),
            "page_table": place(self.page_table, None),
        }
        if case.by == "token":
            tensors |= {"positions": place(self.positions, None), "batch_indices": place(self.requests, None)}
        else:
            tensors["seq_lens"] = place(self.seq_lens, None)
        if case.by == "offsets":
            tensors["q_cu_seq_lens"] = place(self.q_cu_seq_lens, None)
        if self.page_indptr is not None:
            tensors["page_indptr"] = place(self.page_indptr, None)
        options: dict[str, Any] = {"lengths_include_new": case.lengths_include_new}
        options["kv_layout"] = "NHD" if case.layout == "columns" else case.layout
        for name, scale in zip(KV_SCALES, case.scales or (), strict=False):
            if case.scale_form == NUMBER:
                options[name] = float(scale)
            else:
                shape = every if case.scale_form == EXPANDED else scale.shape
                tensors[name] = place(np.broadcast_to(scale, shape), None)
        return tensors, options
