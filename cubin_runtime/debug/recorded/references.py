"""The float64 reference of a recorded call, from its elements alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ...attention.context_reference import context_attention_reference
from ...attention.decode_rules import DEALING_OPTIONS
from ...attention.paged_cache import KV_SCALES
from ...attention.reference import bfloat16_values, e4m3_values, mla_decode_reference, paged_decode_reference
from ...attention.tolerances import probability_dtype
from ...errors import CorruptError
from ...kernels.native.problem import LOG2_E
from .call import RecordedCall
from .described import TRTLLM_GEN
from .snapshot import array_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MLA_WIDTHS = {576: 512, 320: 256}


class NoReferenceError(Exception):
    """A call of this kind has no reference; the message states why."""


class Reference(NamedTuple):
    """The result that a call should have, and the distance from it that kernels may have.

    ``out`` is ``[tokens, heads, head_dim]``, ``lse`` ``[tokens, heads]``, base 2. ``notes`` tell of inputs outside
    their bounds, which kernels clamp: the output is then no attention. ``of_scores`` is what scores may be off by where
    e4m3 queries are multiplied by e4m3 keys; ``probabilities`` the dtype that probabilities are rounded to.
    """

    out: NDArray[Any]
    lse: NDArray[Any]
    notes: tuple[str, ...]
    of_scores: float
    probabilities: str


def reference_of(call: RecordedCall) -> Reference:
    """The reference; needs numpy.

    Raises:
        NoReferenceError: the operator or an option of the call has none.
        CorruptError: tensors and options of the call contradict each other.
    """
    compute = _REFERENCES.get(call.operator)
    if compute is None:
        raise NoReferenceError(f"there is no reference for {call.operator}")
    import numpy as np

    inputs = _Inputs(call)
    try:
        with np.errstate(all="ignore"):
            reference = compute(inputs)
        starts = inputs.starts()
        owned = None if starts is None else int(starts[-1])  # no request owns what is behind them
        return reference._replace(out=reference.out[:owned], lse=reference.lse[:owned])
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise CorruptError(f"a call of {call.operator} with inconsistent arguments: {error!r}") from error


class _Inputs:
    """A call's tensors as arrays; narrow floats as float32."""

    def __init__(self, call: RecordedCall) -> None:
        self.call = call
        self.options: Mapping[str, Any] = call.options

    def array(self, name: str) -> NDArray[Any]:
        import numpy as np

        tensor = self.call.tensors[name]
        shape = tensor.view.shape
        stored = (len(self.call.page_ids), *shape[1:]) if tensor.paged else shape
        array = array_of(tensor.view, tensor.data, stored)
        if tensor.view.dtype == "bfloat16":
            return bfloat16_values(array)
        if tensor.view.dtype == "float8_e4m3fn":
            return e4m3_values(array)
        return array.astype(np.float32) if tensor.view.dtype == "float16" else array

    def optional(self, name: str) -> NDArray[Any] | None:
        return self.array(name) if name in self.call.tensors else None

    def number(self, name: str) -> float:
        """A scalar on the device, 1 if there is none."""
        value = self.optional(name)
        return 1.0 if value is None else float(value.reshape(-1)[0])

    def kv_scales(self) -> dict[str, Any]:
        """The scales of keys and values that are tensors."""
        return {name: scale for name in KV_SCALES if (scale := self.optional(name)) is not None}

    def starts(self) -> NDArray[Any] | None:
        """Return where each request's query tokens begin; None: all have the same number.

        Raises:
            ValueError: they decrease, or are not from 0 to the tokens of the queries.
        """
        sums = self.optional("q_cu_seq_lens" if "q_cu_seq_lens" in self.call.tensors else "cum_seq_lens_q")
        if sums is None:
            return None
        starts = sums.reshape(-1).astype(int)
        queries = self.call.tensors["q" if "q" in self.call.tensors else "query"].view.shape
        if starts[0] != 0 or starts[-1] > prod(queries[:-2]) or (starts[1:] < starts[:-1]).any():
            raise ValueError(f"query tokens of requests begin at {starts.tolist()[:20]}")
        return starts

    def lengths(self, bound: int, notes: list[str], capacity: int) -> NDArray[Any]:
        """The lengths within the bound, which never exceeds ``capacity``, what the tensors hold."""
        import numpy as np

        bound = min(bound, capacity)
        lengths = self.array("seq_lens").astype(np.int64).reshape(-1)
        wrong = int(((lengths < 0) | (lengths > bound)).sum())
        if wrong:
            notes.append(f"seq_lens: {wrong} of {lengths.size} are outside 0 to {bound}, the bound")
        return np.clip(lengths, 0, bound)

    def table(self, name: str, lengths: NDArray[Any], cache: str, page_size: int, notes: list[str]) -> NDArray[Any]:
        """Page numbers among the pages that are stored."""
        import numpy as np

        ids, pages = self.array(name).astype(np.int64), self.call.tensors[cache].view.shape[0]
        read = np.arange(ids.shape[-1]) < np.ceil(lengths / page_size)[:, None]
        if ids.ndim == 3:  # of keys and of values
            read = read[:, None]
        outside = read & ((ids < 0) | (ids >= pages))
        if outside.any():
            notes.append(f"{name}: {int(outside.sum())} entries that are read are outside the {pages} pages")
        stored = np.array(self.call.page_ids, dtype=np.int64)
        if not stored.size and read.any():
            raise NoReferenceError(f"{name}: all entries that are read are outside the {pages} pages")
        if not stored.size:
            return np.zeros_like(ids)
        return np.clip(np.searchsorted(stored, ids), 0, stored.size - 1)

    def score_error(self, q: NDArray[Any], keys: NDArray[Any], scale: float, q_name: str, k_name: str) -> float:
        """The most that tensor cores drop of sums of e4m3 products; see ``comparison``."""
        import numpy as np

        dtypes = {self.call.tensors[name].view.dtype for name in (q_name, k_name)}
        if dtypes != {"float8_e4m3fn"} or not q.size or not keys.size:
            return 0.0
        norms = [float(np.linalg.norm(np.nan_to_num(array), axis=-1).max()) for array in (q, keys)]
        return 2.0**-12 * norms[0] * norms[1] * abs(scale) * LOG2_E


def _mask(inputs: _Inputs) -> NDArray[Any] | None:
    words = inputs.optional("mask")
    if words is None:
        return None
    import numpy as np

    bits = 8 * words.itemsize
    parts = words.reshape(-1, words.shape[-1]).astype(np.uint64)
    shifts = np.arange(0, bits * parts.shape[1], bits, dtype=np.uint64)
    joined: NDArray[Any] = np.bitwise_or.reduce(parts << shifts, axis=1)
    return joined


def _native(inputs: _Inputs, cache: str, page_size: int) -> tuple[dict[str, Any], list[str]]:
    """The arguments of both native references besides queries and caches, and notes."""
    notes: list[str] = []
    capacity = inputs.call.tensors["page_table"].view.shape[-1] * page_size
    lengths = inputs.lengths(inputs.options["max_seq_len"], notes, capacity)
    sinks = inputs.optional("sinks")
    return {
        "page_table": inputs.table("page_table", lengths, cache, page_size, notes),
        "seq_lens": lengths,
        "softmax_scale": inputs.options["softmax_scale"] * inputs.number("softmax_scale"),
        "output_scale": inputs.options["output_scale"] * inputs.number("output_scale"),
        "q_cu_seq_lens": inputs.starts(),
        "mask": _mask(inputs),
        "sinks": None if sinks is None else sinks.reshape(-1),
        "global_seq_lens": inputs.optional("global_seq_lens"),
        **{name: inputs.options[name] for name in DEALING_OPTIONS if name in inputs.options},
    }, notes


def _paged_decode(inputs: _Inputs) -> Reference:
    import numpy as np

    q, k, v = (inputs.array(name) for name in ("q", "k_cache", "v_cache"))
    q = q.reshape(-1, *q.shape[-2:])
    common, notes = _native(inputs, "k_cache", k.shape[1])
    window = {name: inputs.options[name] for name in ("window_left", "draft_position") if name in inputs.options}
    scales = inputs.kv_scales()
    out, lse = paged_decode_reference(q, k, v, **window, **scales, **common)
    largest = float(np.abs(scales.get("k_scale", 1.0)).max())
    off = inputs.score_error(q, k, common["softmax_scale"] * largest, "q", "k_cache")
    return Reference(out, lse, tuple(notes), off, probability_dtype(inputs.call.tensors["k_cache"].view.dtype))


def _mla_decode(inputs: _Inputs) -> Reference:
    import numpy as np

    q, rows = inputs.array("q"), inputs.array("kv_cache")
    if "q_rope" in inputs.call.tensors:
        q = np.concatenate([q, inputs.array("q_rope")], axis=-1)
    q, rows = q.reshape(-1, *q.shape[-2:]), rows.reshape(*rows.shape[:2], rows.shape[-1])
    latent = inputs.call.tensors["out"].view.shape[-1]
    common, notes = _native(inputs, "kv_cache", rows.shape[1])
    values = inputs.array("v_cache").reshape(*rows.shape[:2], latent) if "v_cache" in inputs.call.tensors else None
    out, lse = mla_decode_reference(q, rows, latent=latent, v_cache=values, **common)
    off = inputs.score_error(q, rows, common["softmax_scale"], "q", "kv_cache")
    return Reference(out, lse, tuple(notes), off, probability_dtype(inputs.call.tensors["kv_cache"].view.dtype))


def _context_attention(inputs: _Inputs) -> Reference:
    import numpy as np

    notes, options = list[str](), inputs.options
    q, k, v = (inputs.array(name) for name in ("q", "k", "v"))
    starts, key_starts, table = inputs.starts(), inputs.optional("kv_cu_seq_lens"), inputs.optional("page_table")
    q_lens = np.full(len(q), q.shape[1]) if starts is None else np.diff(starts)
    even = table is None and key_starts is None
    capacity = k.shape[1] * (1 if table is None else table.shape[-1]) if key_starts is None else len(k)
    if "seq_lens" in inputs.call.tensors:
        kv_lens = inputs.lengths(options["max_seq_len"], notes, capacity)
    else:
        kv_lens = np.full(len(q_lens), capacity) if key_starts is None else np.diff(key_starts.astype(np.int64))
    if key_starts is not None:
        k, v = (_rows(side, key_starts[:-1].astype(int), kv_lens) for side in (k, v))
    elif even:
        firsts = np.arange(len(k)) * k.shape[1]
        k, v = (_rows(side.reshape(-1, *side.shape[2:]), firsts, kv_lens) for side in (k, v))
    sinks = inputs.optional("sinks")
    scale = options["softmax_scale"] * inputs.number("softmax_scale")
    names = ("causal", "window_left", "window_right", "logit_soft_cap", "lse_sink")
    out, lse = context_attention_reference(
        q.reshape(-1, *q.shape[-2:]),
        k,
        v,
        q_lens,
        kv_lens,
        scale,
        page_table=table,
        sinks=None if sinks is None else sinks.reshape(-1),
        output_scale=options["output_scale"] * inputs.number("output_scale"),
        **inputs.kv_scales(),
        lse_base=options["lse_base"],
        **{name: options[name] for name in names},
    )
    return Reference(out, lse, tuple(notes), 0.0, inputs.call.tensors["q"].view.dtype)


def _rows(tensor: NDArray[Any], firsts: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """Rows of each request, one after another."""
    import numpy as np

    return np.concatenate([tensor[at : at + count] for at, count in zip(firsts, counts, strict=True)])


def _trtllm_gen(inputs: _Inputs) -> Reference:
    """Dense attention of trtllm-gen calls on 16- and 8-bit tensors."""
    import numpy as np

    options, tensors, notes = inputs.options, inputs.call.tensors, list[str]()
    for name in ("key_scales", "value_scales", "out_scales.scales", "top_k_lens", *(f"sage.{part}" for part in "qkpv")):
        if name in tensors:
            raise NoReferenceError(f"there is no reference for calls with {name}")
    if options.get("top_k") or options["skip_softmax_factor"]:
        raise NoReferenceError("there is no reference for sparse or skipped keys")
    q, k, v = (inputs.array(name) for name in ("query", "key", "value"))
    latent, paged = _MLA_WIDTHS.get(q.shape[-1]), tensors["key"].paged
    if latent and paged and options["max_q"] > 1:
        raise NoReferenceError("there is no reference for MLA with several query tokens per request")
    capacity = tensors["block_tables"].view.shape[-1] * k.shape[2] if paged else len(k)
    lengths = inputs.lengths(options["max_kv"], notes, capacity)
    if paged:
        k, v = k.transpose(0, 2, 1, 3), (k if latent else v).transpose(0, 2, 1, 3)
        v = v[..., :latent] if latent else v
        table = inputs.table("block_tables", lengths, "key", k.shape[1], notes)
    else:
        starts = inputs.array("cum_seq_lens_kv").astype(np.int64)[:-1]
        table = np.minimum(starts[:, None] + np.arange(max(1, int(lengths.max(initial=0)))), len(k) - 1)
        k, v = k[:, None], v[:, None]
    on_device = "bmm1" in tensors
    scale = inputs.number("bmm1") / LOG2_E if on_device else options["bmm1"]
    out, lse = paged_decode_reference(
        q,
        k,
        v,
        table,
        lengths,
        scale,
        output_scale=inputs.number("bmm2") if "bmm2" in tensors else options["bmm2"],
        q_cu_seq_lens=inputs.starts(),
        sinks=inputs.optional("sinks"),
        window_left=options["window_left"],
        causal=bool(options.get("causal", True)),
    )
    off = inputs.score_error(q, k, scale, "query", "key")
    return Reference(out, lse, tuple(notes), off, tensors["query"].view.dtype)


_REFERENCES: Mapping[str, Callable[[_Inputs], Reference]] = {
    "paged_decode": _paged_decode,
    "mla_decode": _mla_decode,
    "context_attention": _context_attention,
    **dict.fromkeys((TRTLLM_GEN + kind for kind in ("DecodeCall", "ContextCall", "RaggedCall")), _trtllm_gen),
}
