"""Validation of trtllm-gen calls: all rules that need no kernel, checked before anything is planned or loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ...errors import UsageError
from ...kernels.trtllm_gen.arguments import OutScales, Sage, Scale, check_length
from ...kernels.trtllm_gen.arithmetic import INT32_MAX
from ...kernels.trtllm_gen.call import Call
from ...kernels.trtllm_gen.calls import ContextCall, DecodeCall, RaggedCall
from ...kernels.trtllm_gen.problem import is_mla
from ...tensor import TensorView
from ..checks import float32_number, listed

QUERY_DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
RAGGED_DTYPES = (*QUERY_DTYPES, "int8")
CACHE_DTYPES = (*QUERY_DTYPES, "uint8")
SCALE_BLOCK = 16
_CALLS = (DecodeCall, ContextCall, RaggedCall)
_KINDS: Mapping[str, Any] = {
    "TensorView": TensorView,
    "Scale": Scale,
    "OutScales": OutScales,
    "Sage": Sage,
    "int": int,
    "float": (int, float),
    "bool": bool,
}
_MOST_PAGES = INT32_MAX // 2  # of K, which are counted with those of V


def check_kinds(call: Call) -> None:
    """Check that there are kernels for the class of a call, and that its fields are of the declared kinds.

    Raises:
        UsageError: the message names the field.
    """
    if type(call) not in _CALLS:
        expected = listed([kind.__name__ for kind in _CALLS])
        raise UsageError(f"got {type(call).__name__}, expected {expected}", argument="call")
    for name, kind, is_optional in _kinds(type(call)):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(call, name)
        is_kind = isinstance(value, _KINDS[kind]) and (type(value) is not bool or kind == "bool")
        if not is_kind and (value is not None or not is_optional):
            raise UsageError(f"got {type(value).__name__}, expected {kind}", argument=name)


@lru_cache
def _kinds(of: type[Call]) -> tuple[tuple[str, str, bool], ...]:
    parted = [(member.name, str(member.type).removesuffix(" | None"), member.type) for member in fields(of)]
    return tuple((name, kind, kind != text) for name, kind, text in parted)


def check_call(call: Call) -> None:
    """Check a call by every rule that needs no kernel.

    Raises:
        UsageError: the message names the argument, what came and what was expected.
    """
    _check_query(call)
    _check_lengths(call)
    _check_options(call)
    if isinstance(call, DecodeCall):
        _check_decode(call)
    if isinstance(call, RaggedCall):
        _check_ragged(call)
    elif isinstance(call, (DecodeCall, ContextCall)):
        _check_pages(call)


def check_scales(call: Call) -> None:
    """Check the numbers that may change without another plan; errors as ``check_call``."""
    for name, scale in (("bmm1_scale", call.bmm1), ("bmm2_scale", call.bmm2)):
        if not scale.pointer:
            float32_number(name, scale.value)
    if isinstance(call, RaggedCall):
        float32_number("o_sf_scale", call.out_scale)
    elif isinstance(call, (DecodeCall, ContextCall)):
        float32_number("o_sf_scale", call.out_scales.scale)


def check_running_sum(name: str, values: Sequence[int], total: int) -> int:
    """The largest step of a running sum, which must begin at 0, never fall, and end at ``total``.

    Raises:
        UsageError: it does not.
    """
    if not values or values[0] != 0:
        raise UsageError(f"begins with {list(values[:1])}, expected 0", argument=name)
    steps = [after - before for before, after in pairwise(values)]
    for request, step in enumerate(steps):
        if step < 0:
            raise UsageError(
                f"falls from {values[request]} to {values[request + 1]} at request {request}", argument=name
            )
    if values[-1] != total:
        raise UsageError(f"ends with {values[-1]}, expected {total}, the number of tokens", argument=name)
    return max(steps, default=0)


def check_vector(name: str, view: TensorView, length: int, dtype: str, device: int) -> None:
    """Raise ``UsageError`` unless ``view`` is a contiguous vector of ``length`` on ``device``."""
    if len(view.shape) != 1:
        raise UsageError(f"shape {view.shape}, expected one dimension of {length}", argument=name)
    if view.shape[0] != length:
        raise UsageError(f"{view.shape[0]} entries, expected {length}", argument=name)
    if view.dtype != dtype:
        raise UsageError(f"dtype {view.dtype}, expected {dtype}", argument=name)
    if view.strides[0] != 1 and length > 1:
        raise UsageError(f"stride {view.strides[0]}, expected 1", argument=name)
    check_device(name, view, device)


def check_device(name: str, view: TensorView, device: int) -> None:
    """Raise ``UsageError`` unless ``view`` is on ``device``."""
    if view.device != device:
        raise UsageError(f"on device {view.device}, query is on device {device}", argument=name)


def _check_query(call: Call) -> None:
    query, out = call.query, call.out
    dtypes = RAGGED_DTYPES if isinstance(call, RaggedCall) else QUERY_DTYPES
    _check_form("query", query, 3, dtypes)
    if min(query.shape) < 1:
        raise UsageError(f"shape {query.shape}, expected at least one token, head and dimension", argument="query")
    if isinstance(call, RaggedCall) and not query.is_contiguous:
        raise UsageError(
            f"strides {query.strides}, expected a contiguous tensor: the kernels take no other", argument="query"
        )
    if out.shape[:-1] != query.shape[:-1]:
        raise UsageError(f"shape {out.shape}, expected {query.shape[:-1]} and the head dimension of V", argument="out")
    if not out.is_contiguous:
        raise UsageError(
            f"strides {out.strides}, expected a contiguous tensor: the kernels write no other", argument="out"
        )
    check_device("out", out, query.device)
    if call.sinks is not None:
        check_vector("sinks", call.sinks, query.shape[1], "float32", query.device)
    if call.lse is not None:
        if call.lse.shape != query.shape[:2] or call.lse.dtype != "float32":
            raise UsageError(f"{call.lse.dtype} {call.lse.shape}, expected float32 {query.shape[:2]}", argument="lse")
        check_device("lse", call.lse, query.device)


def _check_form(name: str, view: TensorView, rank: int, dtypes: Sequence[str]) -> None:
    if len(view.shape) != rank:
        raise UsageError(f"shape {view.shape}, expected {rank} dimensions", argument=name)
    if view.dtype not in dtypes:
        raise UsageError(f"dtype {view.dtype}, expected one of {', '.join(dtypes)}", argument=name)
    if view.strides[-1] != 1:
        raise UsageError(f"last stride {view.strides[-1]}, expected 1", argument=name)
    _check_steps(name, view, 2 if view.dtype == "uint8" else 1)


def _check_steps(name: str, view: TensorView, packed: int = 1) -> None:
    """Check that an int32 holds the strides, in numbers, of which an element has ``packed``: kernels take no others."""
    if max(_steps(view), default=0) * packed > INT32_MAX:
        raise UsageError(f"strides {view.strides}, expected at most {INT32_MAX // packed} elements", argument=name)


def _check_lengths(call: Call) -> None:
    device = call.query.device
    if len(call.seq_lens.shape) != 1 or call.seq_lens.shape[0] < 1:
        raise UsageError(
            f"shape {call.seq_lens.shape}, expected one dimension, a length for each request", argument="seq_lens"
        )
    check_vector("seq_lens", call.seq_lens, call.batch, "int32", device)
    for name, value in (("max_q_len", call.max_q), ("max_kv_len", call.max_kv)):
        check_length(name, value)
    if call.cum_seq_lens_q is not None:
        check_vector("cum_seq_lens_q", call.cum_seq_lens_q, call.batch + 1, "int32", device)
    elif call.tokens != call.batch * call.max_q:
        raise UsageError(
            f"{call.tokens} tokens for {call.batch} requests of {call.max_q}; expected "
            f"{call.batch * call.max_q}, or cum_seq_lens_q",
            argument="query",
        )
    if isinstance(call, (ContextCall, RaggedCall)):
        check_vector("cum_seq_lens_kv", call.cum_seq_lens_kv, call.batch + 1, "int32", device)
        if call.cum_seq_lens_q is None:
            raise UsageError("None, expected int32 [batch + 1]", argument="cum_seq_lens_q")


def _check_options(call: Call) -> None:
    check_scales(call)
    if call.window_left < -1 or call.window_left >= INT32_MAX:
        raise UsageError(
            "expected -1 (none) or the keys before a query's own", argument="window_left", value=call.window_left
        )
    if float32_number("skip_softmax_threshold_scale_factor", call.skip_softmax_factor) < 0:
        raise UsageError(
            "expected 0 or more", argument="skip_softmax_threshold_scale_factor", value=call.skip_softmax_factor
        )


def _check_decode(call: DecodeCall) -> None:
    if call.top_k < 0:
        raise UsageError("expected 0 (off) or more", argument="sparse_mla_top_k", value=call.top_k)
    if call.cum_seq_lens_q is not None:
        if call.skip_softmax_factor and is_mla(call.query.shape[2], call.out.shape[2], sparse=False):
            raise UsageError(
                "skip_softmax_threshold_scale_factor with cum_seq_lens_q: ragged queries of MLA skip no softmax"
            )
        if call.top_k:
            raise UsageError("sparse_mla_top_k with cum_seq_lens_q: ragged queries take no sparse keys")
    if call.top_k and call.skip_softmax_factor:
        raise UsageError("skip_softmax_threshold_scale_factor with sparse_mla_top_k: sparse MLA skips no softmax")
    if call.batch_invariant and call.skip_softmax_factor:
        raise UsageError(
            "batch_invariant with skip_softmax_threshold_scale_factor: what is skipped depends on the tile"
        )
    if call.top_k_lens is not None:
        if not call.top_k:
            raise UsageError("sparse_mla_top_k_lens without sparse_mla_top_k: nothing is sparse")
        check_vector("sparse_mla_top_k_lens", call.top_k_lens, call.tokens, "int32", call.query.device)


def _check_pages(call: DecodeCall | ContextCall) -> None:
    key, value, device = call.key, call.value, call.query.device
    for name, cache in (("key_cache", key), ("value_cache", value)):
        _check_form(name, cache, 4, CACHE_DTYPES)
        check_device(name, cache, device)
        if min(cache.shape) < 1:
            raise UsageError(
                f"shape {cache.shape}, expected at least one page, head, token and dimension", argument=name
            )
        if cache.shape[0] > _MOST_PAGES:
            raise UsageError(f"shape {cache.shape}, expected at most {_MOST_PAGES} pages", argument=name)
    if key.shape[:3] != value.shape[:3]:
        raise UsageError(f"shape {value.shape}, expected {key.shape}, like K", argument="value_cache")
    if _steps(key) != _steps(value):
        raise UsageError(
            f"strides {value.strides}, expected {key.strides}, like K: the kernels take one set for both",
            argument="value_cache",
        )
    packed = 2 if key.dtype == "uint8" else 1
    if key.shape[3] * packed != call.query.shape[2]:
        raise UsageError(
            f"head dimension {key.shape[3] * packed}, query has {call.query.shape[2]}", argument="key_cache"
        )
    _check_block_scales(call, packed)
    _check_table(call)
    if call.out_scales.scales is not None:
        check_device("out_scales", call.out_scales.scales, device)


def _steps(view: TensorView) -> list[int]:
    return [stride for size, stride in zip(view.shape[:3], view.strides[:3], strict=True) if size > 1]


def _check_block_scales(call: DecodeCall | ContextCall, packed: int) -> None:
    pairs = (("key_block_scales", call.key_scales, call.key), ("value_block_scales", call.value_scales, call.value))
    for name, scales, cache in pairs:
        if packed == 1:
            if scales is not None:
                raise UsageError(f"given for a cache of {cache.dtype}, expected for FP4 (uint8) alone", argument=name)
            continue
        expected = (*cache.shape[:3], cache.shape[3] * packed // SCALE_BLOCK)
        if scales is None:
            raise UsageError(f"None, expected float8_e4m3fn {expected} for an FP4 cache", argument=name)
        if scales.shape != expected or scales.dtype != "float8_e4m3fn":
            raise UsageError(f"{scales.dtype} {scales.shape}, expected float8_e4m3fn {expected}", argument=name)
        if scales.strides[3] != 1 or (scales.shape[2] > 1 and scales.strides[2] != scales.shape[3]):
            raise UsageError(
                f"strides {scales.strides}, expected the tokens of a page and head in one piece", argument=name
            )
        _check_steps(name, scales)
        check_device(name, scales, call.query.device)
    if call.key_scales is not None and call.value_scales is not None:
        key, value = _steps(call.key_scales), _steps(call.value_scales)
        if key != value:
            raise UsageError(
                f"strides {value}, expected {key}, like K: one set serves both", argument="value_block_scales"
            )


def _check_table(call: DecodeCall | ContextCall) -> None:
    table, batch = call.block_tables, call.batch
    top_k = call.top_k if isinstance(call, DecodeCall) else 0
    if top_k:
        if table.shape not in ((batch, call.max_q, top_k), (call.tokens, top_k)):
            raise UsageError(f"shape {table.shape}, expected {(batch, call.max_q, top_k)}", argument="block_tables")
    elif call.shares_index:
        if len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] < 1:
            raise UsageError(f"shape {table.shape}, expected [{batch}, columns]", argument="block_tables")
    elif len(table.shape) != 3 or table.shape[:2] != (batch, 2) or table.shape[2] < 1:
        raise UsageError(
            f"shape {table.shape}, expected [{batch}, 2, columns] for K and V apart", argument="block_tables"
        )
    if table.shape[-1] > INT32_MAX:
        raise UsageError(f"shape {table.shape}, expected at most {INT32_MAX} columns", argument="block_tables")
    if table.dtype != "int32":
        raise UsageError(f"dtype {table.dtype}, expected int32", argument="block_tables")
    if not table.is_contiguous:
        raise UsageError(f"strides {table.strides}, expected a contiguous tensor", argument="block_tables")
    check_device("block_tables", table, call.query.device)


def _check_ragged(call: RaggedCall) -> None:
    for name, tensor in (("key", call.key), ("value", call.value)):
        _check_form(name, tensor, 3, RAGGED_DTYPES)
        check_device(name, tensor, call.query.device)
        if min(tensor.shape) < 1:
            raise UsageError(f"shape {tensor.shape}, expected at least one token, head and dimension", argument=name)
    for place, scales in enumerate(call.sage.scales):
        if scales is not None:
            check_device(f"sage.scales[{place}]", scales, call.query.device)
    if call.key.shape[:2] != call.value.shape[:2]:
        raise UsageError(f"shape {call.value.shape}, key has {call.key.shape}", argument="value")
    if call.key.shape[2] != call.query.shape[2]:
        raise UsageError(f"head dimension {call.key.shape[2]}, query has {call.query.shape[2]}", argument="key")
    if call.out.shape[2] != call.value.shape[2]:
        raise UsageError(f"head dimension {call.out.shape[2]}, value has {call.value.shape[2]}", argument="out")


def scale_of(name: str, value: TensorView | float, device: int) -> Scale:
    """A factor as calls take it.

    Raises:
        UsageError: a tensor is not float32, has more than one element, or is on another device.
    """
    if isinstance(value, TensorView):
        if value.dtype != "float32" or math.prod(value.shape) != 1:
            raise UsageError(f"{value.dtype} {value.shape}, expected one float32", argument=name)
        check_device(name, value, device)
        return Scale(1.0, value.pointer)
    return Scale(value)
