"""A step of an engine over a paged KV cache: requests that decode, a token or drafts of it, then parts of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..attention.operators.context_attention import context_attention
from ..attention.operators.paged_decode import paged_decode
from ..attention.paged_cache import MAX_GROUP, PAGE_SIZES
from ..errors import UsageError
from ..kernels.native.prefill.select import SEGMENT_HEAD_DIMS
from .scratch import are_few, launch

if TYPE_CHECKING:
    from .scratch import SharedScratch

# The head sizes that both operators have kernels for, in bf16 and fp16.
HEAD_SIZES = (64, 128, 256)
BLOCK_SIZES = PAGE_SIZES
# Of how many rows, query tokens times the query heads of a KV head, decode kernels still read keys but once.
_FEW_ROWS = {64: 64, 128: 64, 256: 32}
_FEW_TOKENS = 16
# From so many KV heads of all requests on few splits of each give work to all multiprocessors; of fewer, long requests
# have more than one CTA merges as fast as a launch for that.
_ENOUGH_HEADS = 8
# KV heads of all requests times the bound on keys, where a launch of few tokens numbers its tiles in 31 bits.
_MOST_PAIRS = 1 << 33


class Part(NamedTuple):
    """Requests whose query tokens follow one another.

    ``sums`` are the running sums of their query tokens, int32 ``[requests + 1]`` from 0; None: each has ``max_q_len``.
    ``table`` is int32 ``[requests, columns]``, ``lengths`` int32 ``[requests]``: keys, the new ones included. ``mask``
    says which of its request's query tokens each sees, as ``paged_decode`` takes it, where they are no chain; only
    those that decode have one.
    """

    first_row: int
    rows: int
    table: Any
    lengths: Any
    sums: Any
    max_q_len: int
    max_seq_len: int
    mask: Any = None

    @property
    def where(self) -> slice:
        """The rows of the part among those of the step."""
        return slice(self.first_row, self.first_row + self.rows)


@dataclass
class PagedBatch:
    """The parts of a step; None: there is none of the kind.

    A plain dataclass, as engines have it: vLLM sets attributes of its own, and copies the fields into subclasses.
    ``slot_mapping``: where the step's new keys and values go; only for those who write them.
    """

    decodes: Part | None
    prefills: Part | None
    slot_mapping: Any = None


@dataclass
class DealtBatch(PagedBatch):
    """A step over keys that are dealt to ranks: ``table`` and ``lengths`` count those on this rank.

    Decodes have a token each, which is among their keys. The keys of ``prefills`` are those before the new tokens;
    without ``has_context`` no request has any. All ranks have the same parts and the same ``has_context``.
    """

    has_context: bool = False


class LayerOptions(NamedTuple):
    """Options of a layer; ``window_left`` counts the keys before a token's own, -1: all. ``sinks`` are float32.

    With ``batch_invariant`` the bits of a token do not depend on the other requests, on how its prompt is cut into
    chunks, and on whether it is decoded or belongs to a prompt. ``scratch``: None: each plan has its own. ``k_scale``
    and ``v_scale`` are factors of e4m3 keys and values, as ``context_attention`` takes them; None: 1.
    """

    softmax_scale: float
    window_left: int
    soft_cap: float
    sinks: Any
    batch_invariant: bool
    scratch: SharedScratch | None = None
    k_scale: Any = None
    v_scale: Any = None


def attend(
    q: Any, k_cache: Any, v_cache: Any, kv_layout: str, batch: PagedBatch, options: LayerOptions, out: Any
) -> None:
    """Attention of all parts of a step, whose keys and values are in the cache already.

    Args:
        q: ``[rows, heads, head_dim]``; rows of no part are left out. ``out`` alike.
        k_cache, v_cache: ``[pages, kv_heads, page_size, head_dim]`` with ``kv_layout`` "HND", else with tokens before
            heads; any strides, so K and V may be views of one tensor.

    Raises:
        as ``paged_decode`` and ``context_attention``.
    """
    for part in (batch.decodes, batch.prefills):
        if part is None or part.rows == 0:
            continue
        queries, result = (q, out) if part.rows == q.shape[0] else (q[part.where], out[part.where])
        sizes = q.shape[1], k_cache.shape[1 if kv_layout == "HND" else 2], q.shape[2]
        bound = _decode_bound(part, part is batch.decodes, *sizes, options)
        # As many tokens of each request need no running sums, and the decode of one token no dimension for it.
        if part.sums is None and bound != 1:
            queries, result = (states.unflatten(0, (-1, part.max_q_len)) for states in (queries, result))
        shared = {
            "max_seq_len": part.max_seq_len,
            "softmax_scale": options.softmax_scale,
            "k_scale": options.k_scale,
            "v_scale": options.v_scale,
            "window_left": options.window_left,
            "sinks": options.sinks,
            "kv_layout": kv_layout,
            "batch_invariant": options.batch_invariant,
            "q_cu_seq_lens": part.sums,
            "max_q_len": None if part.sums is None else bound or part.max_q_len,
            "out": result,
        }
        states = (queries, k_cache, v_cache)
        if bound is not None:
            masked = shared if part.mask is None else {**shared, "mask": part.mask}
            launch_part(paged_decode, (*states, part.table, part.lengths), masked, part, options)
        else:
            pages = {"page_table": part.table, "seq_lens": part.lengths, "logit_soft_cap": options.soft_cap}
            launch_part(context_attention, states, {**shared, **pages}, part, options)


def _decode_bound(
    part: Part, decodes: bool, heads: int, kv_heads: int, head_size: int, options: LayerOptions
) -> int | None:
    """The bound on query tokens with which a part runs on ``paged_decode``; None: it runs on ``context_attention``.
    ``decodes``: its requests decode."""
    if decodes:
        return part.max_q_len if decodes_directly(heads, kv_heads, head_size, options) else None
    if part.max_q_len > _FEW_TOKENS:  # as most prompts have, in whose steps nothing else is asked for each layer
        return None
    few = few_tokens(heads, kv_heads, head_size, options)
    requests, window = part.table.shape[0], options.window_left
    # One bound for all, as each needs fast paths.
    return few if part.max_q_len <= few and is_decoded(requests, kv_heads, part.max_seq_len, window) else None


def launch_part(
    operator: Callable[..., Any],
    states: Sequence[Any],
    arguments: Mapping[str, Any],
    part: Part,
    options: LayerOptions,
) -> None:
    """Call ``operator`` with its first arguments, the others by name, and the scratch that layers share."""
    scratch = options.scratch
    workspace = None if scratch is None else scratch.of_launch(part.table.shape[0], part.rows, part.max_seq_len)
    launch(operator, workspace, *states, **arguments)


def check_layer(head_size: int, value_size: int, heads: int, kv_heads: int) -> None:
    """Refuse a layer that has no kernels.

    Raises:
        UsageError: the sizes; the message names them.
    """
    if head_size not in HEAD_SIZES or value_size != head_size:
        raise UsageError(f"head_size={head_size}, values of {value_size}: expected one of {HEAD_SIZES} for both")
    if kv_heads < 1 or heads % kv_heads or heads > 64 * kv_heads:
        raise UsageError(f"num_heads={heads}, num_kv_heads={kv_heads}: expected 1 to 64 query heads per KV head")


def decodes_directly(heads: int, kv_heads: int, head_size: int, options: LayerOptions) -> bool:
    """Return whether requests that decode run on ``paged_decode``, not on ``context_attention``."""
    # Elsewhere a decode's bits are not those of a prompt, so that only one of the operators may be used.
    alike = not options.batch_invariant or head_size in SEGMENT_HEAD_DIMS
    return alike and options.soft_cap == 0 and heads <= MAX_GROUP * kv_heads


def few_tokens(heads: int, kv_heads: int, head_size: int, options: LayerOptions) -> int:
    """The most new tokens of a request with which parts of prompts are launched as decodes; 0: none are."""
    # The bits of a prompt's token may not depend on how many tokens its step has.
    if options.batch_invariant or not decodes_directly(heads, kv_heads, head_size, options):
        return 0
    return min(_FEW_TOKENS, _FEW_ROWS[head_size] * kv_heads // heads)


def is_decoded(requests: int, kv_heads: int, max_seq_len: int, window_left: int) -> bool:
    """Return whether prompts with new tokens as few as ``few_tokens`` are launched as decodes.

    Behind cached keys, few tokens are bound by the reading of these, which the decode kernels do faster.
    """
    heads, keys = requests * kv_heads, max_seq_len if window_left < 0 else min(max_seq_len, window_left + 1)
    return (are_few(keys) or heads >= _ENOUGH_HEADS) and heads * max_seq_len <= _MOST_PAIRS
