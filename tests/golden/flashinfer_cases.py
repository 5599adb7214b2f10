"""Calls under FlashInfer's names to be recorded: on our kernels for Hopper, and on the published ones for Blackwell."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tests.golden.cases import BLACKWELLS, FP8, HOPPERS, Draw, Tensor, caches, moved, rows_of_tokens, scale, tensor

FEW_SEMAPHORES = 128
_SCALES = (0.0884, 0.7, "[]", "[1]")
_WORKSPACE = tensor("workspace", "uint8", 2 << 30)
_OPTIONS: dict[str, Sequence[Any]] = {
    "batch": (1, 1, 2, 4, 7, 32, 100, 256),
    "bound": (1, 63, 130, 1000, 2048, 5000, 33000, 131072),
    "more_columns": (0, 1, 5),
    "pages": (1, 100, 5000),
    "sinks": (None, None, "flat", "list"),
    "bmm1": _SCALES,
    "bmm2": (1.0, *_SCALES[1:]),
    "enable_pdl": (None, True, False),
    "batch_invariant": (False, False, False, True),
    "again": ("no", "moved", "numbers"),
    "stream": (0, 1),
}
_TOKEN_OPTIONS: dict[str, Sequence[Any]] = {
    "q_len": (1, 1, 1, 2, 3, 5, 8),
    "form": ("nested", "nested", "ragged"),
    "fewer": (0, 1, 5),
    "q_rows": ("plain", "plain", "padded", "in a row"),
    "lse": (None, None, "made", "plain", "padded", "by heads"),
}
_PAGED_OPTIONS: dict[str, Sequence[Any]] = {
    "head_dim": (64, 128, 128, 256),
    "group": (1, 2, 4, 5, 8, 8, 16, 32),
    "kv_heads": (1, 2, 4, 8),
    "page": (16, 32, 32, 64, 128),
    "layout": ("HND", "NHD"),
    "pair": ("pair", "[pages, 2]", "[pages, 1]"),
    "cache": ("apart", "one tensor"),
    "window": (-1, -1, -1, 0, 127, 3000),
}
_PUBLISHED_OPTIONS: dict[str, Sequence[Any]] = {
    "on": BLACKWELLS,
    "types": (
        ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16"), (FP8, FP8),
        ("bfloat16", FP8), (FP8, "uint8"),
    ),
    "out": ("made", "bfloat16", "float16", "nvfp4", "given nvfp4"),
    "skip": (None, None, None, 0.0, 100.0),
    "counters": (False, True),
    "shares_index": (True, True, False),
}  # fmt: skip


def settle(draw: dict[str, Any]) -> Draw:
    """A draw without what the published operators refuse together."""
    q, kv = draw["types"][:2]
    of_queries = {"bfloat16": ("made", "bfloat16"), "float16": ("made", "float16")}
    if draw["out"] not in of_queries.get(q, (draw["out"],)) and draw["on"] in BLACKWELLS:
        draw["out"] = of_queries[q][1]
    if kv == "uint8":
        draw["layout"] = "HND"
    if draw.get("top_k"):
        draw |= {"form": "nested", "skip": None, "ranks": (512, 0) if draw["ranks"][1] == 0 else (512, 64)}
    elif draw.get("ranks") == (512, 0):
        draw["ranks"] = (512, 64)
    if draw.get("form") == "ragged" or draw["batch_invariant"]:
        draw["skip"] = None
    return draw


def _tokens(draw: Draw) -> tuple[int, bool]:
    batch, q_len = draw["batch"], draw["q_len"]
    ragged = draw.get("form") == "ragged"
    return (max(1, batch * q_len - draw["fewer"]) if ragged else batch * q_len), ragged


def _table(draw: Draw, page: int, *more: int) -> Tensor:
    columns = max(1, -(-draw["bound"] // page)) + draw["more_columns"]
    return tensor("page_table", "int32", draw["batch"], *more, columns)


def _lse(draw: Draw, tokens: int, heads: int) -> dict[str, Any]:
    kind = draw["lse"]
    if kind is None:
        return {}
    given = {} if kind == "made" else {"lse": rows_of_tokens("lse", "float32", [tokens], heads, 0, kind)}
    return {"return_lse": True, **given}


def _sinks(draw: Draw, heads: int) -> Any:
    sinks = tensor("sinks", "float32", heads)
    return {None: None, "flat": sinks, "list": [sinks]}[draw["sinks"]]


def _pair(draw: Draw, dtype: str, width: int) -> Any:
    """K and V as FlashInfer takes them."""
    if draw["pair"] == "pair":
        return list(caches(draw, dtype, draw["kv_heads"], width, draw["layout"]))
    heads, page = draw["kv_heads"], draw["page"]
    inner = (page, heads, width) if draw["layout"] == "NHD" else (heads, page, width)
    return tensor("k", dtype, draw["pages"], int(draw["pair"][-2]), *inner)


def _case(draw: Draw, name: str, call: dict[str, Any], numbers: Sequence[str] = ()) -> dict[str, Any]:
    """``call`` and, if drawn, the same once more with other tensors or other ``numbers``."""
    steps: list[dict[str, Any]] = [{}]
    if draw["again"] == "moved":
        steps.append(moved(call, *call))
    elif draw["again"] == "numbers":
        steps.append({name: 0.31 for name in numbers if isinstance(call.get(name), float)})
    case: dict[str, Any] = {"on": draw["on"], "call": name, "with": call, "steps": steps}
    if draw.get("semaphores") == FEW_SEMAPHORES:
        case["fresh"] = 1  # a runtime keeps memory of its own for them
    return {**case, "stream": 1} if draw["stream"] else case


def _output(draw: Draw, q: str, shape: Sequence[int]) -> dict[str, Any]:
    """``out`` or ``out_dtype``, with what an FP4 output needs; an object of two keys is an FP4 output."""
    kind = draw["out"]
    if kind == "made":
        return {}
    if kind == "nvfp4":
        return {"out_dtype": "nvfp4", "o_sf_scale": 0.5}
    if kind == "given nvfp4":
        packed = tensor("out", "uint8", *shape[:-1], shape[-1] // 2)
        columns = -(-prod(shape[1:]) // 16 // 4) * 4
        scales = tensor("out_scales", FP8, -(-shape[0] // 128) * 128 + 256, columns)
        return {"out": {"fp4": packed, "scale": scales, "first": 128}, "o_sf_scale": 0.25, "o_sf_vec_size": 16}
    return {"out": tensor("out", kind, *shape), "out_dtype": kind}


PUBLISHED_DECODE_OPTIONS = {
    **_OPTIONS, **_TOKEN_OPTIONS, **_PAGED_OPTIONS, **_PUBLISHED_OPTIONS, "bmm1": (*_SCALES, "log2"),
}  # fmt: skip


def published_decode(draw: Draw) -> dict[str, Any]:
    """``trtllm_batch_decode_with_kv_cache`` on the published kernels."""
    q, kv = draw["types"]
    tokens, ragged = _tokens(draw)
    width, heads = draw["head_dim"], draw["kv_heads"] * draw["group"]
    call: dict[str, Any] = {
        "query": rows_of_tokens("q", q, [tokens], heads, width, draw["q_rows"]),
        "kv_cache": _pair(draw, kv, width // (2 if kv == "uint8" else 1)),
        "workspace_buffer": _WORKSPACE,
        "block_tables": _table(draw, draw["page"], *(() if draw["shares_index"] else (2,))),
        "seq_lens": tensor("seq_lens", "int32", draw["batch"]),
        "max_seq_len": draw["bound"],
        "bmm2_scale": scale("output_scale", draw["bmm2"]),
        "window_left": draw["window"],
        "sinks": _sinks(draw, heads),
        "kv_layout": draw["layout"],
        "enable_pdl": draw["enable_pdl"],
        "q_len_per_req": None if ragged else draw["q_len"],
        "skip_softmax_threshold_scale_factor": draw["skip"],
        "uses_shared_paged_kv_idx": draw["shares_index"],
        "batch_invariant": draw["batch_invariant"],
        **_output(draw, q, (tokens, heads, width)),
        **_lse(draw, tokens, heads),
    }
    if draw["bmm1"] == "log2":
        call["bmm1_scale_log2"] = tensor("bmm1_log2", "float32", 1)
    else:
        call["bmm1_scale"] = scale("softmax_scale", draw["bmm1"])
    if kv == "uint8":
        call["kv_cache_sf"] = _block_scales(call["kv_cache"], draw)
    if ragged:
        call |= {"cum_seq_lens_q": tensor("q_cu_seq_lens", "int32", draw["batch"] + 1), "max_q_len": draw["q_len"]}
    if draw["counters"]:
        call["multi_ctas_kv_counter_buffer"] = tensor("counters", "int32", 1 << 21)
    return _case(draw, "trtllm_batch_decode_with_kv_cache", call, ("bmm1_scale", "bmm2_scale"))


def _block_scales(cache: Any, draw: Draw) -> Any:
    pair = cache if isinstance(cache, list) else [cache]
    made = [tensor(f"{name}_scales", FP8, *c["shape"][:-1], c["shape"][-1] // 8) for name, c in zip("kv", pair)]  # noqa: B905
    return made if isinstance(cache, list) else made[0]


PUBLISHED_MLA_OPTIONS: dict[str, Sequence[Any]] = {
    **_OPTIONS,
    **_TOKEN_OPTIONS,
    "on": BLACKWELLS,
    "types": (("bfloat16", "bfloat16"), (FP8, FP8)),
    "heads": (1, 8, 16, 32, 64, 128, 128, 128),
    "ranks": ((512, 64), (512, 64), (512, 64), (256, 64), (512, 0)),
    "page": (16, 32, 64, 64, 128),
    "cache": ("rank 3", "rank 4", "padded"),
    "top_k": (0, 0, 0, 128, 2048),
    "top_k_lens": (False, True),
    "out": ("made", "bfloat16", "float16", FP8, "flat"),
    "skip": (None, None, None, 100.0),
    "counters": (False, True),
    "shares_index": (True, True, True, False),
    "bound": (1, 130, 1000, 2048, 9000, 33000, 131072),
}
# Problems whose parts another launch merges.
REDUCED_MLA_OPTIONS: dict[str, Sequence[Any]] = {
    **PUBLISHED_MLA_OPTIONS,
    "batch": (1, 1, 2, 4, 8, 33),
    "heads": (64, 128),
    "bound": (2048, 9000, 33000, 131072),
    "ranks": ((512, 64), (512, 64), (512, 0)),
    "top_k": (0, 128, 2048),
    "out": ("made", "flat"),
    "skip": (None,),
    "batch_invariant": (False,),
}


def published_mla(draw: Draw) -> dict[str, Any]:
    """``trtllm_batch_decode_with_kv_cache_mla`` on the published kernels, sparse keys among them."""
    return _mla(draw, "trtllm_batch_decode_with_kv_cache_mla")


def _mla(draw: Draw, name: str) -> dict[str, Any]:
    q, kv = draw["types"]
    lora, rope = draw["ranks"]
    tokens, ragged = _tokens(draw)
    heads, width, batch, q_len = draw["heads"], lora + rope, draw["batch"], draw["q_len"]
    lead = [tokens] if ragged else [batch, q_len]
    shape = (
        (draw["pages"], 1, draw["page"], width) if draw["cache"] == "rank 4" else (draw["pages"], draw["page"], width)
    )
    table = _table(draw, draw["page"], *(() if draw["shares_index"] else (2,)))
    if draw["top_k"]:
        table = tensor("page_table", "int32", batch, q_len, draw["top_k"])
    call: dict[str, Any] = {
        "query": rows_of_tokens("q", q, lead, heads, width, draw["q_rows"]),
        "kv_cache": tensor("k", kv, *shape, pad=64 if draw["cache"] == "padded" else 0),
        "workspace_buffer": _WORKSPACE,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": lora,
        "qk_rope_head_dim": rope,
        "block_tables": table,
        "seq_lens": tensor("seq_lens", "int32", batch),
        "max_seq_len": draw["bound"],
        "bmm1_scale": scale("softmax_scale", draw["bmm1"]),
        "bmm2_scale": scale("output_scale", draw["bmm2"]),
        "sinks": _sinks(draw, heads),
        "enable_pdl": draw["enable_pdl"],
        "batch_invariant": draw["batch_invariant"],
    }
    if draw["out"] != "made":
        flat = draw["out"] == "flat" and q_len == 1 and not ragged
        dtype = "bfloat16" if draw["out"] == "flat" else draw["out"]
        call["out"] = tensor("out", dtype, *([batch] if flat else lead), heads, lora)
    if name.startswith("trtllm"):
        call |= {
            "sparse_mla_top_k": draw["top_k"],
            "skip_softmax_threshold_scale_factor": draw["skip"],
            "uses_shared_paged_kv_idx": draw["shares_index"],
            **_lse(draw, tokens, heads),
        }
        if draw["top_k"] and draw["top_k_lens"]:
            call["sparse_mla_top_k_lens"] = tensor("top_k_lens", "int32", tokens)
        if ragged:
            call |= {"cum_seq_lens_q": tensor("q_cu_seq_lens", "int32", batch + 1), "max_q_len": q_len}
        if draw["counters"]:
            call["multi_ctas_kv_counter_buffer"] = tensor("counters", "int32", 1 << 21)
    return _case(draw, name, call, ("bmm1_scale", "bmm2_scale"))


CONTEXT_OPTIONS: dict[str, Sequence[Any]] = {
    **_OPTIONS,
    **_PAGED_OPTIONS,
    **_PUBLISHED_OPTIONS,
    "tokens": (1, 100, 300, 5000),
    "max_q": (1, 100, 300),
    "q_rows": _TOKEN_OPTIONS["q_rows"],
    "lse": _TOKEN_OPTIONS["lse"],
    "causal": (True, True, False),
}


def context(draw: Draw) -> dict[str, Any]:
    """``trtllm_batch_context_with_kv_cache``."""
    q, kv = draw["types"]
    tokens, width, heads = draw["tokens"], draw["head_dim"], draw["kv_heads"] * draw["group"]
    call: dict[str, Any] = {
        "query": rows_of_tokens("q", q, [tokens], heads, width, draw["q_rows"]),
        "kv_cache": _pair(draw, kv, width // (2 if kv == "uint8" else 1)),
        "workspace_buffer": _WORKSPACE,
        "block_tables": _table(draw, draw["page"], *(() if draw["shares_index"] else (2,))),
        "seq_lens": tensor("seq_lens", "int32", draw["batch"]),
        "max_q_len": draw["max_q"],
        "max_kv_len": draw["bound"],
        "bmm1_scale": scale("softmax_scale", draw["bmm1"]),
        "bmm2_scale": scale("output_scale", draw["bmm2"]),
        "batch_size": draw["batch"],
        "cum_seq_lens_q": tensor("q_cu_seq_lens", "int32", draw["batch"] + 1),
        "cum_seq_lens_kv": tensor("kv_cu_seq_lens", "int32", draw["batch"] + 1),
        "window_left": draw["window"] if draw["causal"] else -1,
        "kv_layout": draw["layout"],
        "enable_pdl": draw["enable_pdl"],
        "sinks": _sinks(draw, heads),
        "skip_softmax_threshold_scale_factor": draw["skip"],
        "uses_shared_paged_kv_idx": draw["shares_index"],
        "causal": draw["causal"],
        "batch_invariant": draw["batch_invariant"],
        **_output(draw, q, (tokens, heads, width)),
        **_lse(draw, tokens, heads),
    }
    if kv == "uint8":
        call["kv_cache_sf"] = _block_scales(call["kv_cache"], draw)
    return _case(draw, "trtllm_batch_context_with_kv_cache", call, ("bmm1_scale", "bmm2_scale"))


RAGGED_OPTIONS: dict[str, Sequence[Any]] = {
    **_OPTIONS,
    "on": BLACKWELLS,
    "types": (
        ("bfloat16",) * 3, ("bfloat16",) * 3, ("float16",) * 3, (FP8,) * 3, ("int8", "int8", FP8),
    ),
    "out": ("made", "bfloat16", "float16"),
    "dims": ((192, 128), (192, 128), (128, 128), (256, 256)),
    "group": (1, 1, 2, 8),
    "kv_heads": (1, 8, 128),
    "tokens": (1, 200, 4000),
    "kv_tokens": (1, 400, 9000),
    "kv_rows": ("plain", "padded", "in a row"),
    "max_q": (1, 128, 300),
    "lse": (None, "made", "plain", "padded", "by heads"),
    "causal": (True, True, False),
    "window": (-1, -1, 127),
    "skip": (None, None, 100.0),
    "sage": (None, None, (1, 16, 0, 1), (1, 4, 0, 1)),
    "o_sf_scale": (-1.0, 0.5),
}  # fmt: skip


def ragged(draw: Draw) -> dict[str, Any]:
    """``trtllm_ragged_attention_deepseek``."""
    q, k, v = draw["types"]
    tokens, (width, width_v), kv_heads = draw["tokens"], draw["dims"], draw["kv_heads"]
    heads = kv_heads * draw["group"]
    call: dict[str, Any] = {
        "query": tensor("q", q, tokens, heads, width),
        "key": rows_of_tokens("k", k, [draw["kv_tokens"]], kv_heads, width, draw["kv_rows"]),
        "value": rows_of_tokens("v", v, [draw["kv_tokens"]], kv_heads, width_v, draw["kv_rows"]),
        "workspace_buffer": _WORKSPACE,
        "seq_lens": tensor("seq_lens", "int32", draw["batch"]),
        "max_q_len": draw["max_q"],
        "max_kv_len": draw["bound"],
        "bmm1_scale": scale("softmax_scale", draw["bmm1"]),
        "bmm2_scale": scale("output_scale", draw["bmm2"]),
        "o_sf_scale": draw["o_sf_scale"],
        "batch_size": draw["batch"],
        "window_left": draw["window"] if draw["causal"] else -1,
        "cum_seq_lens_q": tensor("q_cu_seq_lens", "int32", draw["batch"] + 1),
        "cum_seq_lens_kv": tensor("kv_cu_seq_lens", "int32", draw["batch"] + 1),
        "enable_pdl": bool(draw["enable_pdl"]),
        "is_causal": draw["causal"],
        "attention_sinks": _sinks(draw, heads),
        "skip_softmax_threshold_scale_factor": draw["skip"],
        "batch_invariant": draw["batch_invariant"],
        "return_lse": False,
        **_lse(draw, tokens, heads),
    }
    if draw["out"] != "made":
        call["out"] = tensor("out", draw["out"], tokens, heads, width_v)
    if draw["sage"]:
        blocks = list(draw["sage"])
        names = ("sage_q", "sage_k", "sage_p", "sage_v")
        scales = [tensor(n, "float32", 4096) if block else None for n, block in zip(names, blocks, strict=True)]
        call |= {"sage_attn_sfs": scales, "num_elts_per_sage_attn_blk": blocks}
    return _case(draw, "trtllm_ragged_attention_deepseek", call, ("bmm1_scale", "bmm2_scale"))


XQA_OPTIONS: dict[str, Sequence[Any]] = {
    **_OPTIONS,
    **_PAGED_OPTIONS,
    "on": HOPPERS,
    "call": ("xqa", "xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache"),
    "types": (
        ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", FP8), ("float16", FP8), (FP8, FP8),
    ),
    "out": ("made", "bfloat16", "float16", FP8),
    "q_len": (1, 1, 1, 2, 3, 8),
    "form": ("nested", "nested", "ragged"),
    "fewer": (0, 1),
    "lse": (None, None, "made", "plain", "by heads"),
    "mask": (None, None, "uint16"),
    "o_scale": (1.0, None, 0.5),
    "kv_scale": (1.0, 0.5, "[1]"),
    "semaphores": (1 << 20, 1 << 20, FEW_SEMAPHORES),
}  # fmt: skip


def xqa(draw: Draw) -> dict[str, Any]:
    """FlashInfer's XQA operators, and its decode where our kernels serve it."""
    if draw["call"] == "xqa":
        return _xqa(draw)
    q, kv = draw["types"]
    tokens, ragged = _tokens(draw)
    width, heads = draw["head_dim"], draw["kv_heads"] * draw["group"]
    call: dict[str, Any] = {
        "query": tensor("q", q, tokens, heads, width),
        "kv_cache": _pair(draw, kv, width),
        "workspace_buffer": _WORKSPACE,
        "block_tables": _table(draw, draw["page"]),
        "seq_lens": tensor("seq_lens", "int32", draw["batch"]),
        "max_seq_len": draw["bound"],
        "bmm1_scale": scale("softmax_scale", draw["bmm1"]),
        "bmm2_scale": scale("output_scale", draw["bmm2"]),
        "window_left": draw["window"],
        "sinks": _sinks(draw, heads),
        "kv_layout": draw["layout"],
        "enable_pdl": draw["enable_pdl"],
        "o_scale": draw["o_scale"],
        "batch_invariant": draw["batch_invariant"],
    }
    if draw["out"] != "made":
        call["out"] = tensor("out", draw["out"], tokens, heads, width)
    if draw["mask"]:
        call["mask"] = tensor("mask", "uint16", *([tokens] if ragged else [draw["batch"], draw["q_len"]]), 2)
    starts = tensor("q_cu_seq_lens", "int32", draw["batch"] + 1)
    if draw["call"].startswith("xqa"):
        call["q_len_per_req"] = draw["q_len"]
        call |= {"q_cu_seq_lens": starts} if ragged else {}
    else:
        call |= {"q_len_per_req": None if ragged else draw["q_len"], **_lse(draw, tokens, heads)}
        call |= {"cum_seq_lens_q": starts, "max_q_len": draw["q_len"]} if ragged else {}
    return _case(draw, draw["call"], call, ("bmm1_scale", "bmm2_scale", "o_scale"))


def _xqa(draw: Draw) -> dict[str, Any]:
    q, kv = draw["types"]
    tokens, ragged = _tokens(draw)
    width, heads, batch, q_len = draw["head_dim"], draw["kv_heads"] * draw["group"], draw["batch"], draw["q_len"]
    lead = [tokens] if ragged else [batch, 1] if q_len == 1 else [batch, 1, q_len]
    k, v = caches(draw, kv, draw["kv_heads"], width, draw["layout"])
    out = {"made": q if q != FP8 else "bfloat16"}.get(draw["out"], draw["out"])
    call: dict[str, Any] = {
        "q": tensor("q", q, *lead, heads, width),
        "k_cache": k,
        "v_cache": v,
        "page_table": _table(draw, draw["page"]),
        "seq_lens": tensor("seq_lens", "uint32", batch, 1),
        "output": tensor("out", out, *lead, heads, width),
        "workspace_buffer": _WORKSPACE,
        "semaphores": tensor("semaphores", "uint32", draw["semaphores"]),
        "num_kv_heads": draw["kv_heads"],
        "page_size": draw["page"],
        "sinks": _sinks(draw, heads),
        "q_scale": scale("softmax_scale", draw["bmm1"]),
        "kv_scale": scale("output_scale", draw["kv_scale"]),
        "sliding_win_size": max(0, draw["window"]),
        "kv_layout": draw["layout"],
        "enable_pdl": draw["enable_pdl"],
        "rcp_out_scale": 0.25 if out == FP8 else 1.0,
        "q_seq_len": q_len,
        "batch_invariant": draw["batch_invariant"],
    }
    if draw["mask"]:
        call["mask"] = tensor("mask", "uint16", *([tokens] if ragged else [batch, q_len]), 2)
    if ragged:
        call["q_cu_seq_lens"] = tensor("q_cu_seq_lens", "uint32", batch + 1)
    return _case(draw, "xqa", call, ("q_scale", "kv_scale"))


XQA_MLA_OPTIONS: dict[str, Sequence[Any]] = {
    **PUBLISHED_MLA_OPTIONS,
    "on": HOPPERS,
    "call": ("xqa_mla", "xqa_batch_decode_with_kv_cache_mla", "trtllm_batch_decode_with_kv_cache_mla"),
    "types": (("bfloat16", "bfloat16"), ("bfloat16", FP8), (FP8, FP8)),
    "heads": (1, 8, 17, 64, 128),
    "ranks": ((512, 64), (256, 64)),
    "page": (32, 64, 128),
    "top_k": (0,),
    "skip": (None,),
    "shares_index": (True,),
    "kv_scale": (1.0, 0.5, "[1]"),
    "semaphores": (1 << 20, 1 << 20, FEW_SEMAPHORES),
}
# Where FlashInfer has this kernel alone, and ours takes e4m3 alone.
OTHER_XQA_MLA_OPTIONS = {**XQA_MLA_OPTIONS, "on": ("RTX", "GB10"), "types": ((FP8, FP8),)}


def xqa_mla(draw: Draw) -> dict[str, Any]:
    """FlashInfer's MLA operators where our kernels serve them."""
    if draw["call"] != "xqa_mla":
        plain = draw["call"].startswith("xqa")
        return _mla({**draw, "form": "nested"} if plain else draw, draw["call"])
    q, kv = draw["types"]
    lora, batch, heads, page = draw["ranks"][0], draw["batch"], draw["heads"], draw["page"]
    shape = (draw["pages"], 1, page, lora + 64) if draw["cache"] == "rank 4" else (draw["pages"], page, lora + 64)
    cache = tensor("k", kv, *shape)
    narrow = {**cache, "shape": [*shape[:-1], lora]}
    call: dict[str, Any] = {
        "q": tensor("q", q, batch, 1, heads, lora + 64),
        "k_cache": cache,
        "v_cache": narrow if draw["cache"] == "padded" else cache,
        "page_table": _table(draw, page),
        "seq_lens": tensor("seq_lens", "uint32", batch, 1),
        "output": tensor("out", "bfloat16" if draw["out"] != "flat" else FP8, batch, 1, heads, lora),
        "workspace_buffer": _WORKSPACE,
        "semaphores": tensor("semaphores", "uint32", draw["semaphores"]),
        "page_size": page,
        "q_scale": scale("softmax_scale", draw["bmm1"]),
        "kv_scale": scale("output_scale", draw["kv_scale"]),
        "enable_pdl": draw["enable_pdl"],
        "batch_invariant": draw["batch_invariant"],
    }
    return _case(draw, "xqa_mla", call, ("q_scale", "kv_scale"))
