"""Decodes of an engine over a paged latent cache (MLA): requests with one new token, or with a few draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..attention.operators.mla_decode import mla_decode
from ..errors import UsageError
from ..kernels.native.mla.select import COLUMNS, MAX_HEADS, MAX_QUERIES, WIDE_ROWS
from ..kernels.native.problem import Dealing
from ..kernels.native.sparse_mla.select import MAX_WIDTH
from .scratch import launch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .scratch import SharedScratch

# Tokens of a page, as of the engines' other MLA kernels.
PAGE_SIZE = 64
# Latent and rope columns of layers; how engines write a cache without rope columns is untested.
LAYER_COLUMNS = tuple(columns for columns in COLUMNS if columns[1] > 0)
MAX_TOKENS = MAX_QUERIES
# The same where each query token attends to the rows of a list.
LISTED_LATENT, LISTED_ROPE = 512, 64
# Up to about so many new tokens, decode does less work than to project the whole context of a request up.
SHORT_PROMPT_TOKENS = 128


class LatentDecodes(NamedTuple):
    """Requests whose query tokens follow one another.

    ``sums`` are the running sums of their query tokens, int32 ``[requests + 1]`` from 0, and ``q_len`` bounds those of
    a request; without ``sums`` each has ``q_len``. ``table`` is int32 ``[requests, columns]``, ``lengths`` int32
    ``[requests]``: keys on this rank, the new ones included; ``global_lengths``: those on all ranks, None: as many.
    ``mask`` says which query tokens of its request each sees, as ``mla_decode`` takes it; None: the earlier ones.
    """

    table: Any
    lengths: Any
    sums: Any
    q_len: int
    max_seq_len: int
    global_lengths: Any = None
    mask: Any = None


class LatentOptions(NamedTuple):
    """Options of a layer; with an e4m3 cache the scales of cache and queries belong to both factors.

    ``scratch``: None: each plan has its own.
    """

    softmax_scale: float
    output_scale: float
    batch_invariant: bool
    dealing: Dealing = Dealing()  # of the keys to ranks; ``LatentDecodes.global_lengths`` with more than one
    scratch: SharedScratch | None = None


def even_q_len(q_lens: list[int], rows: int) -> int:
    """The query tokens of each request where all have the same number; 0: they differ.

    Args:
        q_lens: query tokens of each request; requests that pad a captured step follow with none.
        rows: query tokens in all, those of the padding included.
    """
    q_len = max(q_lens, default=0)
    if q_len == 0 or rows % q_len or rows // q_len > len(q_lens):
        return 0
    even = rows // q_len
    full = q_lens.count(q_len)
    return q_len if full <= even and not any(q_lens[full:]) else 0


def chunk_of(heads: int) -> int:
    """The query tokens of a chunk, whose rows fill one row tile, of requests with more tokens than decodes have.

    Under a bound of more rows the CTAs of a group would idle.
    """
    return min(MAX_TOKENS, max(1, WIDE_ROWS // heads))


class LatentChunks(NamedTuple):
    """Chunks of the query tokens of a step's requests, in order, each of which is computed like a request.

    ``sums`` are the running sums of their query tokens, int32 ``[chunks + 1]`` from 0; ``requests`` their requests and
    ``behind`` the query tokens of these after the chunk, which it must not see, both int32 ``[chunks]``.
    """

    sums: NDArray[np.int32]
    requests: NDArray[np.int32]
    behind: NDArray[np.int32]


def chunks_of(q_lens: Sequence[int], chunk: int) -> LatentChunks:
    """Cut requests with ``q_lens`` query tokens into chunks of at most ``chunk``; requests with none have no chunk."""
    lens = np.asarray(q_lens, dtype=np.int32)
    counts = -(-lens // chunk)
    requests = np.repeat(np.arange(len(lens), dtype=np.int32), counts)
    nth = np.arange(len(requests), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    ends = np.minimum((nth + 1) * chunk, lens[requests])
    sums = np.zeros(len(requests) + 1, dtype=np.int32)
    np.cumsum(ends - nth * chunk, out=sums[1:])
    return LatentChunks(sums, requests, lens[requests] - ends)


def attend_latent(
    q: Any, kv_cache: Any, decodes: LatentDecodes, options: LatentOptions, out: Any, lse: Any = None, q_rope: Any = None
) -> None:
    """Latent attention of the requests' query tokens, whose rows are in the cache already.

    Args:
        q: ``[rows, heads, latent + rope]``, contiguous; ``out`` ``[rows, heads, latent]``, ``lse`` ``[rows, heads]``.
        kv_cache: ``[pages, page_size, latent + rope]``; any strides.
        q_rope: the rope columns of the queries, ``[rows, heads, rope]``, if ``q`` has the latent ones alone; both with
            any strides.

    Raises:
        as ``mla_decode``.
    """
    requests, rows = decodes.table.shape[0], q.shape[0]
    ragged, scratch = decodes.sums is not None, options.scratch
    if not ragged and decodes.q_len > 1:
        lead = (requests, decodes.q_len, q.shape[1])
        q, out = q.view(*lead, q.shape[-1]), out.view(*lead, out.shape[-1])
        lse = None if lse is None else lse.view(lead)
        q_rope = None if q_rope is None else q_rope.view(*lead, q_rope.shape[-1])
    dealing = options.dealing
    launch(
        mla_decode,
        scratch.of_launch(requests, rows, decodes.max_seq_len) if scratch else None,
        q,
        kv_cache,
        decodes.table,
        decodes.lengths,
        max_seq_len=decodes.max_seq_len,
        softmax_scale=options.softmax_scale,
        output_scale=options.output_scale,
        q_cu_seq_lens=decodes.sums,
        max_q_len=decodes.q_len if ragged else None,
        mask=decodes.mask,
        global_seq_lens=decodes.global_lengths,
        cp_world=dealing.world,
        cp_rank=dealing.rank,
        cp_interleave=dealing.interleave,
        batch_invariant=options.batch_invariant,
        out=out,
        lse=lse,
        q_rope=q_rope,
    )


def unserved(latent: int, rope: int, heads: int, q_len: int) -> str | None:
    """Return the reason why no kernel takes a layer of these sizes with ``q_len`` query tokens per request, or None."""
    if (latent, rope) not in LAYER_COLUMNS:
        return f"MLA with kv_lora_rank={latent}, qk_rope_head_dim={rope} not supported"
    if not 1 <= heads <= MAX_HEADS:
        return f"MLA with {heads} heads on a rank not supported"
    return None if q_len <= MAX_TOKENS else f"{q_len - 1} draft tokens not supported"


def unserved_lists(latent: int, rope: int, heads: int, width: int) -> str | None:
    """The same where each query token has a list of ``width`` rows (sparse MLA)."""
    if latent != LISTED_LATENT:
        return f"sparse MLA with kv_lora_rank={latent} not supported"
    if not 1 <= width <= MAX_WIDTH:
        return f"sparse MLA with lists of {width} rows not supported"
    return unserved(latent, rope, heads, 1)


def check_latent_layer(latent: int, rope: int, heads: int, q_len: int = 1) -> None:
    """Refuse a layer that has no kernels.

    Raises:
        UsageError: the sizes; the message names them.
    """
    reason = unserved(latent, rope, heads, q_len)
    if reason is not None:
        raise UsageError(reason)
