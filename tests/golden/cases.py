"""Calls to be recorded: options crossed at random until every pair of values has met, as far as a call takes both.

A draw picks a value for every option (``DECODE_OPTIONS``), a function makes a call of it (``decode``), tensors as
``{"at", "dtype", "shape", "strides"}``. Strides of tokens, heads, requests and pages differ wherever they may.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any

Draw = Mapping[str, Any]
Tensor = dict[str, Any]
Pair = tuple[tuple[str, str], ...]

FP8 = "float8_e4m3fn"
ITEM = {
    "bfloat16": 2,
    "float16": 2,
    FP8: 1,
    "float32": 4,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "uint32": 4,
    "uint16": 2,
    "bool": 1,
}
# Names of tensors -> their places in memory, no two of which are alike in their low bits.
_NAMES = (
    "q", "k", "v", "out", "lse", "page_table", "seq_lens", "q_cu_seq_lens", "kv_cu_seq_lens", "mask", "sinks",
    "softmax_scale", "output_scale", "workspace", "semaphores", "counters", "k_scales", "v_scales", "top_k_lens",
    "bmm1_log2", "out_scales", "sage_q", "sage_k", "sage_p", "sage_v", "k_scale", "v_scale", "q_rope")  # fmt: skip
_AT = {name: 0x7E00_0000_0000 + (place << 36) + 16 * (place + 1) for place, name in enumerate(_NAMES)}
_MOVED = 0x5_0000_0040
_CHANCES = 4

HOPPERS = ("H100", "H200", "H100 PCIe", "GH200")
OTHERS = ("A100", "A40", "L40S", "B200", "B300", "RTX", "GB10")
BLACKWELLS = ("B200", "B200", "B300", "B200 few clusters")
SCALES = (None, 0.7, "[]", "[1]", "[1, 1]")


class Crossing:
    """Draws, each the one of several that has most pairs of values that no taken one had yet."""

    def __init__(
        self, options: Mapping[str, Sequence[Any]], seed: int, settle: Callable[[dict[str, Any]], Draw] = dict
    ) -> None:
        """``options`` are the values of each; ``settle`` makes those of a draw fit together."""
        self._options, self._settle, self._rng = options, settle, random.Random(seed)
        self._drawn: Counter[Pair] = Counter()
        self._taken: set[Pair] = set()

    def draw(self) -> Draw:
        """A value for every option."""
        several = [self._settle({name: self._rng.choice(v) for name, v in self._options.items()}) for _ in range(8)]
        best = max(several, key=lambda draw: sum(self._is_wanted(pair) for pair in _pairs(draw)))
        self._drawn.update(_pairs(best))
        return best

    def take(self, draw: Draw) -> None:
        """Say that a draw made a call."""
        self._taken.update(_pairs(draw))

    @property
    def missing(self) -> list[Pair]:
        """The pairs of values that no call took."""
        values = [[(name, str(value)) for value in dict.fromkeys(v)] for name, v in self._options.items()]
        every = [pair for first, second in combinations(values, 2) for pair in product(first, second)]
        return [pair for pair in every if pair not in self._taken]

    def _is_wanted(self, pair: Pair) -> bool:
        # Some values never go together.
        return pair not in self._taken and self._drawn[pair] < _CHANCES


def _pairs(draw: Draw) -> list[Pair]:
    return list(combinations([(name, str(value)) for name, value in draw.items()], 2))


def tensor(name: str, dtype: str, *shape: int, order: Sequence[int] | None = None, pad: int = 0) -> Tensor:
    """A tensor whose dimensions lie in ``order``, outermost first, with ``pad`` elements behind each innermost row.

    A padded one has room for an odd number more in its outermost but one dimension too.
    """
    order = tuple(range(len(shape))) if order is None else order
    strides, step = [0] * len(shape), 1
    for place, axis in reversed(list(enumerate(order))):
        strides[axis] = step
        step *= shape[axis]
        if pad and place == len(order) - 1:
            step += pad
        elif pad and place == 1:
            step += 3 * 16
    return {"at": _AT[name], "dtype": dtype, "shape": list(shape), "strides": strides}


def rows_of_tokens(name: str, dtype: str, lead: Sequence[int], heads: int, width: int, form: str) -> Tensor:
    """``[*lead, heads, width]`` (no width: 0) by tokens, by heads first, or as a part of wider rows."""
    last = (heads, width) if width else (heads,)
    tokens = prod(lead)
    if form == "by heads":
        flat = tensor(name, dtype, tokens, *last, order=(1, 0, 2)[: 1 + len(last)])
    else:
        flat = tensor(name, dtype, tokens, *last, pad=16 if form == "padded" else 0)
        if form == "in a row":  # of heads of K and V behind those of Q
            flat["strides"][0] += 2 * (width or 8) * 3
    strides = flat["strides"]
    nested = [strides[0] * lead[1], *strides] if len(lead) == 2 else strides
    return {**flat, "shape": [*lead, *last], "strides": nested}


def scale(name: str, value: Any) -> Any:
    """A number, or a tensor whose shape is written."""
    if not isinstance(value, str):
        return value
    return tensor(name, "float32", *[1] * value.count("1"))


def moved(call: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The tensors ``names`` of a call at other addresses."""
    return {name: _moved(call[name]) for name in names if isinstance(call.get(name), (dict, list))}


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "at" not in value:
        return {name: _moved(item) for name, item in value.items()}
    return {**value, "at": value["at"] + _MOVED}


def caches(draw: Draw, dtype: str, heads: int, width: int, layout: str, axis: int = 2) -> tuple[Tensor, Tensor]:
    """K and V in ``layout``, each at its place or both in one tensor."""
    pages, page = draw["pages"], draw["page"]
    shape = (pages, page, heads, width) if layout == "NHD" else (pages, heads, page, width)
    kind = draw["cache"]
    if kind == "one tensor":  # [pages, 2, ...]
        k = tensor("k", dtype, *shape)
        k["strides"][0] *= 2
        return k, {**k, "at": k["at"] + k["strides"][0] // 2 * ITEM[dtype]}
    if kind == "side by side":  # a row of V behind each row of K
        k = tensor("k", dtype, *shape)
        k["strides"] = [2 * step for step in k["strides"][:3]] + [1]
        return k, {**k, "at": k["at"] + width * ITEM[dtype]}
    if kind == "other order":
        return tuple(tensor(name, dtype, *shape, order=(0, 2, 1, 3)) for name in "kv")  # type: ignore[return-value]
    if kind == "padded apart":
        return tensor("k", dtype, *shape, pad=16), tensor("v", dtype, *shape, pad=48)
    if kind == "odd strides of 1":
        k, v = (tensor(name, dtype, *shape) for name in "kv")
        for view in (k, v):
            view["strides"] = [s if n > 1 else 7 for n, s in zip(view["shape"], view["strides"], strict=True)]
        return k, v
    return tensor("k", dtype, *shape), tensor("v", dtype, *shape)


def _lead(draw: Draw) -> tuple[list[int], bool, int]:
    """The dimensions in front of the heads, whether requests differ, and the bound on their tokens."""
    batch, q_len = draw["batch"], draw["q_len"]
    if draw["form"] == "ragged":
        return [max(1, batch * q_len - draw["fewer"])], True, q_len
    return ([batch] if q_len == 1 and draw["form"] == "flat" else [batch, q_len]), False, q_len


def _bound(draw: Draw, page: int) -> tuple[int, int]:
    """The bound on the keys, and columns of a table that hold them."""
    bound = {"page": page, "page - 1": page - 1, "page + 1": page + 1}.get(draw["bound"], draw["bound"])
    return bound, max(1, -(-bound // page)) + draw["more_columns"]


def _table(draw: Draw, batch: int, columns: int) -> Tensor:
    made = tensor("page_table", "int32", batch, columns)
    made["strides"][0] += draw["table_gap"]
    return made


def _out(draw: Draw, lead: Sequence[int], heads: int, width: int) -> Tensor | None:
    """The output, or None where an operator is to make it."""
    if draw["out"] == "made" and draw["call"] == "operator":
        return None
    dtype = {"made": "bfloat16"}.get(draw["out"], draw["out"])
    return rows_of_tokens("out", dtype, lead, heads, width, draw["out_rows"])


def _mask(kind: str | None, lead: Sequence[int], ragged: bool) -> Tensor | None:
    if kind is None:
        return None
    words = {"uint16": 2, "uint32": 1}[kind.split()[0]]
    nested = len(lead) == 2 and "flat" not in kind and not ragged
    return tensor("mask", kind.split()[0], *(lead if nested else [prod(lead)]), words)


def _sinks(kind: str | None, *shape: int) -> Tensor | None:
    if kind is None:
        return None
    return tensor("sinks", "float32", *(shape if kind == "by KV head" else [prod(shape)]))


def _own(draw: Draw, call: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What cases of our own operators have besides their arguments."""
    steps: list[dict[str, Any]] = [{}]
    if draw["again"] == "moved":
        steps.append(moved(call, *names))
    elif draw["again"] == "caches moved":
        steps.append(moved(call, "k_cache", "v_cache", "kv_cache"))
    elif draw["again"] == "numbers":
        numbers = {name: 0.31 for name in ("softmax_scale", "output_scale") if not isinstance(call.get(name), dict)}
        steps.append({**numbers, "max_seq_len": call["max_seq_len"] * 3 // 4})
    case: dict[str, Any] = {"call": draw["call"], "with": call, "steps": steps}
    for name in ("workspace", "stream", "torch"):
        if draw[name]:
            case[name] = draw[name]
    return case


_STEP_OPTIONS: dict[str, Sequence[Any]] = {
    "again": ("no", "no", "moved", "caches moved", "numbers"),
    "workspace": (None, "two buffers", "one buffer"),
    "stream": (0, 1),
    "torch": (0, 1),
}
_LENGTH_OPTIONS: dict[str, Sequence[Any]] = {
    "bound": (0, 1, "page - 1", "page", "page + 1", 129, 777, 1024, 2049, 4096, 8191, 16384, 40000, 131072),
    "more_columns": (0, 1, 5),
    "table_gap": (0, 0, 1, 7),
    "lengths": ("int32", "uint32"),
    "q_lengths": ("int32", "uint32"),
    "pages": (1, 2, 100, 5000, 100000),
}
_QUERY_OPTIONS: dict[str, Sequence[Any]] = {
    "batch": (1, 1, 2, 3, 4, 7, 16, 33, 64, 128, 257),
    "q_len": (1, 1, 1, 1, 2, 3, 4, 5, 8, 16),
    "form": ("flat", "flat", "nested", "ragged"),
    "fewer": (0, 1, 5),
    "q_rows": ("plain", "padded", "by heads", "in a row"),
    "out_rows": ("plain", "padded", "by heads"),
    "lse_rows": (None, None, "plain", "padded", "by heads"),
}
_COMMON_OPTIONS: dict[str, Sequence[Any]] = {
    "mask": (None, None, "uint16", "uint16 flat", "uint32", "uint32 flat"),
    "sinks": (None, None, "flat", "by KV head"),
    "softmax": SCALES,
    "output": (1.0, *SCALES[1:]),
    "batch_invariant": (False, False, True),
    "enable_pdl": (False, True),
    "call": ("plan", "operator"),
}
_KV_TYPES = (
    ("bfloat16", "bfloat16"), ("float16", "float16"), (FP8, "bfloat16"), (FP8, "float16"), (FP8, FP8),
)  # fmt: skip

DECODE_OPTIONS: dict[str, Sequence[Any]] = {
    **_QUERY_OPTIONS,
    **_COMMON_OPTIONS,
    **_LENGTH_OPTIONS,
    **_STEP_OPTIONS,
    "on": HOPPERS,
    "types": _KV_TYPES,
    "out": ("made", "bfloat16", "float16", FP8),
    "head_dim": (32, 64, 64, 128, 128, 128, 256, 512),
    "group": (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32),
    "kv_heads": (1, 1, 2, 3, 4, 8, 16, 40),
    "page": (16, 32, 64, 128, 256),
    "layout": ("NHD", "HND"),
    "cache": ("apart", "one tensor", "side by side", "other order", "padded apart", "odd strides of 1"),
    "window": (-1, -1, -1, 0, 1, 127, 1000, 5000, 2**31 - 1),
    "backend": ("auto", "hopper"),
}
# Every kernel for other devices, whose backend is taken by name only. The conversion from e4m3 came with SM89.
OTHER_DECODE_OPTIONS = {
    **{name: values for name, values in DECODE_OPTIONS.items() if name not in ("on", "types", "head_dim")},
    "kernel": tuple(
        (on, types, head_dim)
        for on, types, head_dim in product(OTHERS, _KV_TYPES, (32, 64, 128, 256))
        if types[0] != FP8 or on not in ("A100", "A40")
    ),
    "backend": ("hopper",),
}
# Rows and keys that the kernels with the largest row tiles are for.
WIDE_DECODE_OPTIONS = {
    **DECODE_OPTIONS,
    "batch": (16, 33, 64, 128),
    "q_len": (4, 8, 16),
    "group": (8, 12, 16, 24, 32),
    "head_dim": (64, 128),
    "bound": (4096, 16384, 40000, 131072),
}


def decode(draw: Draw) -> dict[str, Any]:
    """A call of ``paged_decode``, or of the function that plans it."""
    if "kernel" in draw:
        on, types, head_dim = draw["kernel"]
        draw = {**draw, "on": on, "types": types, "head_dim": head_dim}
    kv, q = draw["types"]
    lead, ragged, q_len = _lead(draw)
    heads, width = draw["kv_heads"] * draw["group"], draw["head_dim"]
    k, v = caches(draw, kv, draw["kv_heads"], width, draw["layout"])
    bound, columns = _bound(draw, draw["page"])
    call: dict[str, Any] = {
        "q": rows_of_tokens("q", q, lead, heads, width, draw["q_rows"]),
        "k_cache": k,
        "v_cache": v,
        "page_table": _table(draw, draw["batch"], columns),
        "seq_lens": tensor("seq_lens", draw["lengths"], draw["batch"]),
        "out": _out(draw, lead, heads, width),
        "max_seq_len": bound,
        "softmax_scale": scale("softmax_scale", draw["softmax"]),
        "output_scale": scale("output_scale", draw["output"]),
        "kv_layout": draw["layout"],
        "mask": _mask(draw["mask"], lead, ragged),
        "sinks": _sinks(draw["sinks"], draw["kv_heads"], draw["group"]),
        "window_left": draw["window"],
        "batch_invariant": draw["batch_invariant"],
        "enable_pdl": draw["enable_pdl"],
        "backend": draw["backend"],
    }
    if draw["lse_rows"]:
        call["lse"] = rows_of_tokens("lse", "float32", lead, heads, 0, draw["lse_rows"])
    if ragged:
        call["q_cu_seq_lens"] = tensor("q_cu_seq_lens", draw["q_lengths"], draw["batch"] + 1)
        call["max_q_len"] = q_len
    name = {"plan": "plan_paged_decode", "operator": "paged_decode"}[draw["call"]]
    return {"on": draw["on"], **_own({**draw, "call": name}, call, tuple(call))}


MLA_OPTIONS: dict[str, Sequence[Any]] = {
    **_QUERY_OPTIONS,
    **_COMMON_OPTIONS,
    **_LENGTH_OPTIONS,
    **_STEP_OPTIONS,
    "on": HOPPERS,
    "types": (("bfloat16", "bfloat16"), (FP8, "bfloat16"), (FP8, FP8)),
    "out": ("made", "bfloat16", "float16", FP8),
    "softmax": (0.0722, 0.31, *SCALES[2:]),
    "columns": ((512, 64), (512, 64), (256, 64)),
    "heads": (1, 2, 3, 8, 16, 17, 32, 64, 96, 128),
    "page": (32, 64, 128),
    "cache": ("rank 3", "rank 4", "padded", "odd strides of 1"),
    "backend": ("auto", "hopper"),
}
# The kernels for SM120 and SM121, which take e4m3 alone, by name only.
OTHER_MLA_OPTIONS = {**MLA_OPTIONS, "on": ("RTX", "GB10"), "types": ((FP8, FP8),), "backend": ("hopper",)}
# Rows without rope columns, and narrow ones.
_OTHER_COLUMNS = ((512, 0), (256, 32), (128, 32))
MLA_COLUMN_OPTIONS = {**MLA_OPTIONS, "columns": _OTHER_COLUMNS, "backend": ("auto", "native")}
# Values in memory of their own, in strides of their own.
SEPARATE_MLA_OPTIONS = {
    **MLA_OPTIONS,
    "columns": ((512, 64),),
    "types": ((FP8, FP8),),
    "values": ("dense", "padded"),
    "backend": ("auto", "native"),
}
# Rope columns of queries in memory of their own, in strides of their own.
ROPE_MLA_OPTIONS = {
    **MLA_OPTIONS,
    "columns": ((512, 64), (512, 64), (256, 64), (256, 32), (128, 32)),
    "rope_rows": _QUERY_OPTIONS["q_rows"],
    "backend": ("auto", "native"),
}
OTHER_MLA_COLUMN_OPTIONS = {**OTHER_MLA_OPTIONS, "columns": _OTHER_COLUMNS, "backend": ("native",)}


def mla(draw: Draw) -> dict[str, Any]:
    """A call of ``mla_decode``, or of the function that plans it."""
    kv, q = draw["types"]
    lead, ragged, q_len = _lead(draw)
    (latent, rope), heads, pages, page = draw["columns"], draw["heads"], draw["pages"], draw["page"]
    width = latent + rope
    shape = (pages, 1, page, width) if draw["cache"] == "rank 4" else (pages, page, width)
    cache = tensor("k", kv, *shape, pad=64 if draw["cache"] == "padded" else 0)
    if draw["cache"] == "odd strides of 1" and pages == 1:
        cache["strides"][0] = 7
    bound, columns = _bound(draw, page)
    call: dict[str, Any] = {
        "q": rows_of_tokens("q", q, lead, heads, latent if "rope_rows" in draw else width, draw["q_rows"]),
        "kv_cache": cache,
        "page_table": _table(draw, draw["batch"], columns),
        "seq_lens": tensor("seq_lens", draw["lengths"], draw["batch"]),
        "out": _out(draw, lead, heads, latent),
        "max_seq_len": bound,
        "softmax_scale": scale("softmax_scale", draw["softmax"]),
        "output_scale": scale("output_scale", draw["output"]),
        "mask": _mask(draw["mask"], lead, ragged),
        "sinks": _sinks(draw["sinks"] and "flat", heads),
        "batch_invariant": draw["batch_invariant"],
        "enable_pdl": draw["enable_pdl"],
        "backend": draw["backend"],
    }
    if "values" in draw:
        call["v_cache"] = tensor("v", kv, *shape[:-1], latent, pad=64 if draw["values"] == "padded" else 0)
    if "rope_rows" in draw:
        call["q_rope"] = rows_of_tokens("q_rope", q, lead, heads, rope, draw["rope_rows"])
    if draw["lse_rows"]:
        call["lse"] = rows_of_tokens("lse", "float32", lead, heads, 0, draw["lse_rows"])
    if ragged:
        call["q_cu_seq_lens"] = tensor("q_cu_seq_lens", draw["q_lengths"], draw["batch"] + 1)
        call["max_q_len"] = q_len
    name = {"plan": "plan_mla_decode", "operator": "mla_decode"}[draw["call"]]
    return {"on": draw["on"], **_own({**draw, "call": name}, call, tuple(call))}
