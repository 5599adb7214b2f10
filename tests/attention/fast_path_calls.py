"""Calls of every operator, what else each argument may be, and what a call came to: launches, result or error."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cubin_runtime.attention import (
    Runtime,
    TensorView,
    append_kv,
    context_attention,
    merge_states,
    mla_decode,
    paged_decode,
    plan_append_kv,
    plan_context_attention,
    plan_merge_states,
    plan_mla_decode,
    plan_paged_decode,
    plan_sparse_mla_decode,
    sparse_mla_decode,
)
from cubin_runtime.attention.fast_path.notes import note_made
from cubin_runtime.attention.fast_path.operator_function import suspend
from cubin_runtime.attention.operator_plan import OperatorPlan
from cubin_runtime.compat import flashinfer
from cubin_runtime.dtypes import ITEM_BYTES
from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.launch.workspace import REGION_ALIGNMENT, SemaphoreWorkspace, Workspace
from cubin_runtime.testing import StandIn
from tests.attention.device_calls import ON_NATIVE_KERNELS, ON_TRTLLM_GEN_KERNELS, native_ragged_arguments
from tests.attention.trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    mla_arguments,
    ragged_arguments,
)
from tests.attention.xqa_calls import (
    mla_batch_arguments,
    mla_list_arguments,
    mla_list_arguments_of_656_bytes,
    mla_list_arguments_of_ragged_queries,
    trtllm_arguments,
    xqa_arguments,
    xqa_batch_arguments,
)

Arguments = dict[str, Any]
Outcome = tuple[Any, ...]


_MADE = 0x5A3C_9600_0000


class NotingMemory(MadeUpMemory):
    """Made-up memory that notes what it makes, as torch's does; nothing else has addresses like those."""

    def _made(self, what: str, like: TensorView, view: TensorView) -> TensorView:
        return super()._made(what, like, replace(view, pointer=_MADE + (len(self.made) << 33)))

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> TensorView:
        make = partial(super().empty, like, shape, dtype)
        return note_made(make(), make)

    def zeros(self, like: Any, shape: tuple[int, ...], dtype: str) -> TensorView:
        make = partial(super().zeros, like, shape, dtype)
        return note_made(make(), make)

    def scaled(self, tensor: TensorView, factor: float) -> TensorView:
        plain = super().scaled
        return note_made(plain(tensor, factor), lambda scale: plain(scale, factor), (tensor,))

    def product(self, first: TensorView, second: TensorView) -> TensorView:
        return note_made(super().product(first, second), super().product, (first, second))

    def lengthened(self, name: str, lengths: TensorView, by: TensorView | int) -> TensorView:
        plain = super().lengthened
        if isinstance(by, int):
            return note_made(plain(name, lengths, by), lambda given: plain(name, given, by), (lengths,))
        return note_made(plain(name, lengths, by), lambda *given: plain(name, *given), (lengths, by))

    def causal(self, name: str, lengths: TensorView, q_lens: TensorView | int, tokens: int) -> TensorView:
        plain = super().causal
        if isinstance(q_lens, int):
            return note_made(
                plain(name, lengths, q_lens, tokens), lambda given: plain(name, given, q_lens, tokens), (lengths,)
            )
        return note_made(
            plain(name, lengths, q_lens, tokens), lambda *given: plain(name, *given, tokens), (lengths, q_lens)
        )


@dataclass(frozen=True)
class Call:
    """An operator and all arguments of a call."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Call:
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        return cls(function, {**defaults, **arguments})

    def changed(self, **changes: Any) -> Call:
        return replace(self, arguments={**self.arguments, **changes})


class Caller:
    """Calls operators and says what came of it, in words that are the same for all calls that do the same."""

    def __init__(self, runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
        self.runtime, self.standin, self.memory = runtime, standin, memory
        self.by_place = True  # addresses in a plan's own workspace are places there, as plans of other sizes share it

    def outcome(self, call: Call) -> Outcome:
        """Its launches and result, or its error; made tensors are called by their number."""
        self.standin.clear_log()
        before = len(self.memory.made)
        try:
            result = call.function(**call.arguments)
        except (CubinRuntimeError, TypeError, ValueError, AttributeError) as error:
            message, launched = str(error), len(self.standin.calls("cuLaunchKernelEx"))
            message += f" after {launched} launches" if launched else ""
            for number, (_, view) in enumerate(self.memory.made[before:]):
                message = message.replace(str(view.pointer), f"<made {number}>")
            return (type(error).__name__, message)
        made = [view for _, view in self.memory.made[before:]]
        launches = [launch.seen for launch in self.standin.calls("cuLaunchKernelEx")]
        kept = [[(key, value) for key, value in seen.items() if key != "aligned0"] for seen in launches]
        text = _numbered(kept, made)
        return (placed(text, self.runtime) if self.by_place else text, self._named(result, call.arguments, made))

    def in_full(self, call: Call) -> Outcome:
        """The same by the full path alone."""
        with suspended():
            return self.outcome(call)

    def _named(self, result: Any, arguments: Mapping[str, Any], made: Sequence[TensorView]) -> Any:
        if type(result) is tuple:
            return tuple(self._named(part, arguments, made) for part in result)
        names = [name for name, value in arguments.items() if value is result]
        return names[0] if names and result is not None else made.index(result) if result in made else repr(result)


def placed(launches: str, runtime: Runtime) -> str:
    """The text of launches with the addresses in the own workspaces of a runtime's plans as places there."""
    pools = [plan._pool for plan in runtime.plans._plans.values() if isinstance(plan, OperatorPlan)]
    places = [(held.address, held.nbytes) for pool in pools for held in pool.held.values()]

    def named(words: re.Match[str]) -> str:
        return "".join([named_word(word) for word in re.findall(".{1,16}", words[0])])

    def named_word(word: str) -> str:
        value = int.from_bytes(bytes.fromhex(word), "little")
        offsets = [value - address for address, nbytes in places if address <= value < address + nbytes]
        return f"<scratch + {offsets[0]}>" if offsets else word

    return re.sub("(?:[0-9a-f]{2}){32,}", named, launches)


def _numbered(launches: Any, made: Sequence[TensorView]) -> str:
    text = repr(launches)
    for number, view in enumerate(made):
        for region in (0, REGION_ALIGNMENT):  # those that a call places in what it makes
            address = (view.pointer + region).to_bytes(8, "little").hex()
            text = text.replace(address, f"<made {number} + {region}>")
    return text


class FullPaths:
    """Counts the calls that took the full path."""

    count = 0


def is_suspended() -> bool:
    """Whether all calls take the full path."""
    return bool(sys.modules[suspend.__module__]._state.suspended)


@contextmanager
def suspended() -> Iterator[None]:
    """Let all calls take the full path."""
    suspend(1)
    try:
        yield
    finally:
        suspend(-1)


def _context(memory: MadeUpMemory, **changes: Any) -> Arguments:
    given = {
        "q": memory.tensor("bfloat16", 300, 8, 128),
        "k": memory.tensor("bfloat16", 100, 64, 2, 128),
        "v": memory.tensor("bfloat16", 100, 64, 2, 128),
        "page_table": memory.tensor("int32", 4, 16),
        "seq_lens": memory.tensor("int32", 4),
        "q_cu_seq_lens": memory.tensor("int32", 5),
        "max_seq_len": 1000,
        "out": memory.tensor("bfloat16", 300, 8, 128),
    }
    return {**given, **changes}


def _paged(memory: MadeUpMemory, **changes: Any) -> Arguments:
    given = {
        "q": memory.tensor("bfloat16", 4, 64, 128),
        "k_cache": memory.tensor("bfloat16", 100, 64, 8, 128),
        "v_cache": memory.tensor("bfloat16", 100, 64, 8, 128),
        "page_table": memory.tensor("int32", 4, 16),
        "seq_lens": memory.tensor("int32", 4),
        "max_seq_len": 1000,
        "out": memory.tensor("bfloat16", 4, 64, 128),
    }
    return {**given, **changes}


def _paged_full(memory: MadeUpMemory) -> Arguments:
    return _paged(
        memory,
        q=memory.tensor("bfloat16", 4, 3, 64, 128),
        out=memory.tensor("bfloat16", 4, 3, 64, 128),
        lse=memory.tensor("float32", 4, 3, 64),
        mask=memory.tensor("uint16", 4, 3, 2),
        sinks=memory.tensor("float32", 64),
        softmax_scale=memory.tensor("float32", 1),
        output_scale=memory.tensor("float32", 1),
    )


def _paged_ragged(memory: MadeUpMemory) -> Arguments:
    tokens = {name: memory.tensor("bfloat16", 23, 64, 128) for name in ("q", "out")}
    sums = memory.tensor("int32", 5)
    return _paged(memory, **tokens, q_cu_seq_lens=sums, max_q_len=9, batch_invariant=True, softmax_scale=0.5)


def _latent(memory: MadeUpMemory, **changes: Any) -> Arguments:
    given = {
        "q": memory.tensor("bfloat16", 4, 16, 576),
        "kv_cache": memory.tensor("bfloat16", 100, 64, 576),
        "page_table": memory.tensor("int32", 4, 16),
        "seq_lens": memory.tensor("int32", 4),
        "max_seq_len": 1000,
        "softmax_scale": 0.1,
        "out": memory.tensor("bfloat16", 4, 16, 512),
    }
    return {**given, **changes}


def _latent_full(memory: MadeUpMemory) -> Arguments:
    return _latent(
        memory,
        lse=memory.tensor("float32", 4, 16),
        sinks=memory.tensor("float32", 16),
        softmax_scale=memory.tensor("float32", 1),
        output_scale=0.25,
    )


def _latent_parts(memory: MadeUpMemory) -> Arguments:
    return _latent(memory, q=memory.tensor("bfloat16", 4, 16, 512), q_rope=memory.tensor("bfloat16", 4, 16, 64))


def _of_a_rank(memory: MadeUpMemory, **changes: Any) -> Arguments:
    counts = memory.tensor("int32", 4)
    return trtllm_arguments(memory, 12, cp_world=4, cp_rank=1, causal_seqlens_kv_global=counts, **changes)


def _of_a_rank_ragged(memory: MadeUpMemory) -> Arguments:
    sums = memory.tensor("int32", 5)
    return _of_a_rank(memory, cum_seq_lens_q=sums, max_q_len=9, q_len_per_req=None, out=None)


def _append(memory: MadeUpMemory, **changes: Any) -> Arguments:
    given = {
        "k": memory.tensor("bfloat16", 23, 8, 128),
        "v": memory.tensor("bfloat16", 23, 8, 128),
        "k_cache": memory.tensor("bfloat16", 100, 64, 8, 128),
        "v_cache": memory.tensor("bfloat16", 100, 64, 8, 128),
        "page_table": memory.tensor("int32", 4, 16),
        "seq_lens": memory.tensor("int32", 4),
        "q_cu_seq_lens": memory.tensor("int32", 5),
    }
    return {**given, **changes}


def _append_quantised(memory: MadeUpMemory) -> Arguments:
    caches = {name: memory.tensor("float8_e4m3fn", 100, 64, 8, 128) for name in ("k_cache", "v_cache")}
    return _append(memory, **caches, k_scale=0.5, v_scale=memory.tensor("float32", 1))


def _append_latent(memory: MadeUpMemory) -> Arguments:
    cache = memory.tensor("bfloat16", 100, 64, 576)
    return {
        "k": memory.tensor("bfloat16", 23, 512),
        "v": memory.tensor("bfloat16", 23, 64),
        "k_cache": replace(cache, shape=(100, 64, 512)),
        "v_cache": replace(cache, pointer=cache.pointer + 1024, shape=(100, 64, 64)),
        "page_table": memory.tensor("int32", 300),
        "page_indptr": memory.tensor("int32", 5),
        "positions": memory.tensor("int32", 23),
        "batch_indices": memory.tensor("int32", 23),
    }


def _merge(memory: MadeUpMemory, **changes: Any) -> Arguments:
    given = {
        "parts": memory.tensor("bfloat16", 23, 3, 8, 128),
        "part_lses": memory.tensor("float32", 23, 3, 8),
        "out": memory.tensor("float16", 23, 8, 128),
        "lse": memory.tensor("float32", 23, 8),
    }
    return {**given, **changes}


def _merge_in_place(memory: MadeUpMemory) -> Arguments:
    v, s = memory.tensor("bfloat16", 23, 8, 128), memory.tensor("float32", 23, 8)
    other = {"other": memory.tensor("bfloat16", 23, 8, 128), "other_lse": memory.tensor("float32", 23, 8)}
    more = {"sinks": memory.tensor("float32", 8), "mask": memory.tensor("uint8", 23), "lse_base": "e"}
    return {"parts": v, "part_lses": s, "out": v, "lse": s, **other, **more}


def _sparse(memory: MadeUpMemory, **changes: Any) -> Arguments:
    given = {
        "q": memory.tensor("bfloat16", 5, 16, 576),
        "kv_cache": memory.tensor("uint8", 20, 64, 656),
        "indices": memory.tensor("int32", 5, 128),
        "out": memory.tensor("bfloat16", 5, 16, 512),
        "lse": memory.tensor("float32", 5, 16),
        "topk_lens": memory.tensor("int32", 5),
        "softmax_scale": 0.1,
    }
    return {**given, **changes}


def _run_of(
    planned: Callable[..., Any], make: Callable[[MadeUpMemory], Arguments], *, options: bool = True
) -> Callable[..., Call]:
    """Runs of a plan; without ``options`` it has those that it was planned with."""

    def call(memory: MadeUpMemory, runtime: Runtime) -> Call:
        given = make(memory)
        plan = planned(**given, runtime=runtime)
        parameters = inspect.signature(plan.run).parameters.values()
        names = [p.name for p in parameters if options or p.kind is not p.KEYWORD_ONLY]

        def run(**arguments: Any) -> None:
            """What the plan has as its method now, which without fast paths is that of its class."""
            (type(plan).run.__get__(plan) if is_suspended() else plan.run)(**arguments)

        call = Call.of(plan.run, {name: value for name, value in given.items() if name in names})
        return replace(call, function=run)

    return call


def _call_of(function: Callable[..., Any], make: Callable[..., Arguments], **more: Any) -> Callable[..., Call]:
    def call(memory: MadeUpMemory, runtime: Runtime) -> Call:
        own = {"runtime": runtime} if "runtime" in inspect.signature(function).parameters else {}
        return Call.of(function, {**make(memory, **more), **own})

    return call


ON_SM90: dict[str, Callable[[MadeUpMemory, Runtime], Call]] = {
    "paged_decode": _call_of(paged_decode, _paged),
    "paged_decode without out": _call_of(paged_decode, _paged, out=None),
    "paged_decode with all tensors": _call_of(paged_decode, _paged_full),
    "paged_decode of ragged queries": _call_of(paged_decode, _paged_ragged),
    "mla_decode": _call_of(mla_decode, _latent),
    "mla_decode with all tensors": _call_of(mla_decode, _latent_full),
    "mla_decode of rope columns elsewhere": _call_of(mla_decode, _latent_parts),
    "context_attention": _call_of(context_attention, _context),
    "context_attention without out": _call_of(context_attention, _context, out=None),
    "context plan.run": _run_of(plan_context_attention, _context),
    "plan.run": _run_of(plan_paged_decode, _paged),
    "plan.run without options": _run_of(plan_paged_decode, _paged, options=False),
    "plan.run with all tensors": _run_of(plan_paged_decode, _paged_full),
    "plan.run of two launches": _run_of(plan_paged_decode, _paged_ragged),
    "mla plan.run": _run_of(plan_mla_decode, _latent),
    "mla plan.run of rope columns elsewhere": _run_of(plan_mla_decode, _latent_parts),
    "append_kv": _call_of(append_kv, _append),
    "append_kv that quantises": _call_of(append_kv, _append_quantised),
    "append_kv of a latent cache": _call_of(append_kv, _append_latent),
    "append plan.run": _run_of(plan_append_kv, _append_quantised),
    "merge_states": _call_of(merge_states, _merge),
    "merge_states without out": _call_of(merge_states, _merge, out=None),
    "merge_states in place": _call_of(merge_states, _merge_in_place),
    "merge plan.run": _run_of(plan_merge_states, _merge),
    "sparse_mla_decode": _call_of(sparse_mla_decode, _sparse),
    "sparse_mla_decode without out": _call_of(sparse_mla_decode, _sparse, out=None),
    "sparse mla plan.run": _run_of(plan_sparse_mla_decode, _sparse),
    "plain xqa": _call_of(flashinfer.xqa, xqa_arguments),
    "plain xqa_batch_decode": _call_of(flashinfer.xqa_batch_decode_with_kv_cache, xqa_batch_arguments),
    "plain xqa_batch_decode_mla": _call_of(flashinfer.xqa_batch_decode_with_kv_cache_mla, mla_batch_arguments),
    "trtllm_batch_decode_mla over lists": _call_of(
        flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_list_arguments, return_lse=True
    ),
    "trtllm_batch_decode_mla over lists of rows of 656 bytes": _call_of(
        flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_list_arguments_of_656_bytes
    ),
    "trtllm_batch_decode_mla over lists of ragged queries": _call_of(
        flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_list_arguments_of_ragged_queries
    ),
    "plain trtllm_batch_decode": _call_of(flashinfer.trtllm_batch_decode_with_kv_cache, trtllm_arguments),
    "trtllm_batch_decode of a rank": _call_of(
        flashinfer.trtllm_batch_decode_with_kv_cache, _of_a_rank, q_len_per_req=3
    ),
    "trtllm_batch_decode of a rank's ragged queries": _call_of(
        flashinfer.trtllm_batch_decode_with_kv_cache, _of_a_rank_ragged
    ),
    "plain trtllm_batch_context": _call_of(flashinfer.trtllm_batch_context_with_kv_cache, context_arguments),
    "trtllm_ragged that returns lse": _call_of(
        flashinfer.trtllm_ragged_attention_deepseek, native_ragged_arguments, return_lse=True
    ),
    **{name: _call_of(function, make) for name, (function, make) in ON_NATIVE_KERNELS.items()},
}
ON_SM100: dict[str, Callable[[MadeUpMemory, Runtime], Call]] = {
    "plain decode": _call_of(flashinfer.trtllm_batch_decode_with_kv_cache, decode_arguments),
    "decode that returns lse": _call_of(
        flashinfer.trtllm_batch_decode_with_kv_cache, decode_arguments, return_lse=True
    ),
    "plain mla": _call_of(flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_arguments),
    "plain context": _call_of(flashinfer.trtllm_batch_context_with_kv_cache, context_arguments),
    "plain ragged": _call_of(flashinfer.trtllm_ragged_attention_deepseek, ragged_arguments),
    **{name: _call_of(function, make) for name, (function, make) in ON_TRTLLM_GEN_KERNELS.items()},
}


class Stream:
    """A stream of another library."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


_SAME_SIZE = {"bfloat16": "float16", "int32": "uint32", "uint32": "int32", "float32": "int32", "uint16": "float16"}
_BOUNDS = (-1, 0, 1, 2, 3, 63, 64, 65, 512, 513, 1024, 1025, 4096, 1 << 31)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, math.nan, math.inf, -math.inf, 1.7e38, -(2.0**127), 1e39, 5e-324, 1e-40)
_OTHERS = (True, False, 0, 1, 1.0, None, "x", object)


def others_of(call: Call, name: str, caller: Caller) -> list[Any]:  # noqa: C901
    """What else an argument may be: likely values, and ones of every other kind."""
    value, tensors = call.arguments[name], _tensors(call.arguments)
    if name == "runtime":
        return []
    if name == "stream":
        stream = caller.runtime.driver.create_stream()
        return [0, 1, 2, stream, Stream(stream), Stream(0), -1, True, "x", 1.0]
    if name == "workspace":
        return _workspaces(caller)
    if isinstance(value, TensorView):
        return [*_forms(value), *_aliases(value, tensors), (value,), [value, value], None, 1.0, "x"]
    if isinstance(value, tuple):
        first, *rest = value
        if not isinstance(first, TensorView):  # scales and blocks of SageAttention
            return [tuple(reversed(value)), list(value), (tensors[0], *rest), (first, first), (*value, first), (), None]
        turned = [tuple(reversed(value)), list(value), (first, first), (first,), (*value, first), first, (), None]
        return [*turned, *((other, *rest) for other in _forms(first)), *((*rest, other) for other in _forms(first))]
    values: list[Any] = [other for other in _OTHERS if other is not value]
    if type(value) is int:
        values += [*_BOUNDS, value - 1, value + 1, value * 2, value // 2, value // 2 + 1, float(value)]
    if type(value) is float or "scale" in name:
        values += [*_FLOATS, *(replace(tensors[0], dtype="float32", shape=s, strides=(7,) * len(s)) for s in _SCALES)]
    if type(value) is str:
        values += ["NHD", "HND", "auto", "native", "hopper", "xqa", "trtllm-gen", ""]
    if value is None:
        values += [tensors[0], replace(tensors[0], dtype="float32", shape=(4, 64), strides=(64, 1))]
        values += ["bfloat16", "float16", 16]
    return values


_SCALES = ((), (1,), (1, 1), (2,))


def _tensors(arguments: Mapping[str, Any]) -> list[TensorView]:
    flat = [part for value in arguments.values() for part in (value if isinstance(value, tuple) else (value,))]
    return [value for value in flat if isinstance(value, TensorView)]


def _forms(view: TensorView) -> Iterator[TensorView]:
    pointer, shape, strides = view.pointer, view.shape, view.strides
    yield from (replace(view, pointer=pointer + by) for by in (1, 2, 4, 8, 16, 64, 128, 256, 1 << 20))
    yield replace(view, pointer=0)
    yield replace(view, device=1)
    yield from (replace(view, dtype=dtype) for dtype in (_SAME_SIZE.get(view.dtype, "int8"), "uint8", "float8_e4m3fn"))
    for place in range(len(shape)):
        yield from (
            replace(view, shape=_with(shape, place, size)) for size in (0, 1, shape[place] - 1, shape[place] * 2)
        )
        step = strides[place]
        yield from (replace(view, strides=_with(strides, place, s)) for s in (0, step + 1, step * 2, -step))
    yield replace(view, shape=(*shape, 1), strides=(*strides, 1))
    yield replace(view, shape=(1, *shape), strides=(0, *strides))


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _aliases(view: TensorView, tensors: Sequence[TensorView]) -> Iterator[TensorView]:
    """At the address of another tensor, inside of it, and right behind it."""
    for other in tensors:
        nbytes = math.prod(other.shape) * ITEM_BYTES[other.dtype]
        yield from (replace(view, pointer=other.pointer + by) for by in (0, 256, nbytes // 2 & ~255, nbytes))


def _workspaces(caller: Caller) -> list[Any]:
    driver, context = caller.runtime.driver, caller.runtime.driver.primary_context(0)
    buffers = {"semaphores": (0x7F_F100_0000_00, 8 << 20), "scratch": (0x7F_F200_0000_00, 64 << 20)}
    return [
        Workspace.allocate(driver, context, 64 << 20),
        Workspace.allocate(driver, context, 16),
        SemaphoreWorkspace(**buffers),
        SemaphoreWorkspace(**buffers, context=context),
        SemaphoreWorkspace(**{**buffers, "scratch": (0x7F_F200_0000_00, 16)}),
        caller.memory.tensor("uint8", 64 << 20),
        1,
    ]
