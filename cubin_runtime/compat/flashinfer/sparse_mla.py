"""MLA decoding over lists of cache rows on native kernels: ``sparse_mla_top_k`` and the arguments that go with it."""

from __future__ import annotations

from typing import Any

from ...attention.fast_path.notes import note_bounds
from ...attention.operators.sparse_mla_decode import sparse_mla_decode
from ...attention.trtllm_gen.checks import check_vector
from ...errors import UsageError
from ...kernels.native.sparse_mla.select import ROW_FORMS
from ...tensor import TensorView, view_of
from .arguments import TrtllmMlaArguments, tensor_or_none
from .layouts import flat_tokens, latent_cache
from .lengths import batch_of, query_lengths
from .native import launch_batch
from .outputs import Output, lse_of, with_lse
from .scales import factor_of

_SCALE_FORMATS = ("auto", "pow2_fp32", "arbitrary_fp32")  # of rows of 656 bytes, whose kernel takes any float32
_SCALED_ROW_BYTES = ROW_FORMS["scaled_e4m3"][1]
_INT32_MAX = 2**31 - 1


def decode_lists(call: TrtllmMlaArguments, query: TensorView, output: Output) -> Any:
    """Decode over the lists in ``block_tables``; (output, lse), or output.

    Args:
        query: ``[batch, q_len, heads, columns]``, or ``[tokens, heads, columns]`` with ``cum_seq_lens_q``.
        output: shaped like ``query``.

    Raises:
        UsageError: an option is not honoured with lists, or a tensor has another shape than they ask for.
        as ``sparse_mla_decode``.
    """
    cache = latent_cache(call.kv_cache)
    scaled_rows = cache.shape[-1] == _SCALED_ROW_BYTES
    _refuse(call, scaled_rows)
    q = _by_token(query, "query", 2)
    tokens, heads, _ = q.shape
    batch = _batch(call, query)
    max_q, sums = query_lengths(call, query.shape[1] if len(query.shape) == 4 else None, batch, q)
    lists = view_of(call.block_tables, "block_tables")
    expected = (*query.shape[:-2], call.sparse_mla_top_k)
    if lists.shape != expected:
        raise UsageError(f"shape {lists.shape}, expected {expected} with sparse_mla_top_k", argument="block_tables")
    lse = lse_of(call, (tokens, heads))
    lse_view = tensor_or_none(lse, "lse", q.device, written=True)
    name, lens = _list_lengths(call, q.device, (batch, tokens), None if sums else max_q, scaled_rows)
    launch_batch(
        sparse_mla_decode,
        call,
        {"indices": "block_tables", "topk_lens": name},
        (q, cache, _by_token(lists, "block_tables", 1)),
        topk_lens=lens,
        out=_by_token(output.view, "out", 2),
        lse=None if lse_view is None else _by_token(lse_view, "lse", 1),
        lse_base="e" if call.return_lse_base == "basee" else "2",
        output_scale=factor_of("bmm2_scale", call.bmm2_scale, q.device),
    )
    note_bounds(1, _INT32_MAX)  # the launch does not depend on ``max_seq_len``
    return with_lse(call, output, lse)


def _refuse(call: TrtllmMlaArguments, scaled_rows: bool) -> None:
    """Refuse options that are not honoured with lists."""
    if call.enable_dcp:
        raise UsageError("enable_dcp with sparse_mla_top_k: a list names keys of its own rank alone, expected False")
    if not call.uses_shared_paged_kv_idx:
        raise UsageError("uses_shared_paged_kv_idx=False with sparse_mla_top_k: a list names rows, expected True")
    if call.skip_softmax_threshold_scale_factor:
        raise UsageError("skip_softmax_threshold_scale_factor with sparse_mla_top_k: sparse MLA skips no softmax")
    if not scaled_rows:
        call.refuse("kv_scale_format")
    elif call.kv_scale_format not in _SCALE_FORMATS:
        formats = " or ".join(map(repr, _SCALE_FORMATS))
        raise UsageError(f"expected {formats}", argument="kv_scale_format", value=repr(call.kv_scale_format))
    if not 1 <= call.max_seq_len <= _INT32_MAX:
        raise UsageError(f"expected 1 to {_INT32_MAX}", argument="max_seq_len", value=call.max_seq_len)


def _batch(call: TrtllmMlaArguments, query: TensorView) -> int:
    """The number of requests: of ``query``, or where queries are ragged of ``seq_lens``, or else of their sums."""
    if call.cum_seq_lens_q is None:
        return query.shape[0]
    if call.seq_lens is not None:
        return batch_of(view_of(call.seq_lens, "seq_lens"))
    sums = view_of(call.cum_seq_lens_q, "cum_seq_lens_q").shape
    return max(0, sums[0] - 1) if len(sums) == 1 else 0


def _by_token(view: TensorView, name: str, trailing: int) -> TensorView:
    """``[batch, q_len, ...]`` as ``[tokens, ...]``, which it may be already; ``trailing`` dimensions follow those."""
    return flat_tokens(view, name) if len(view.shape) == trailing + 2 else view


def _list_lengths(
    call: TrtllmMlaArguments, device: int, sizes: tuple[int, int], q_len: int | None, scaled_rows: bool
) -> tuple[str, Any]:
    """The lengths of the lists, int32 ``[tokens]``, None if all entries count, and the argument that they are from.

    FlashInfer counts the entries of a list that are within the keys of its query token. One length for each query token
    is that count already; one for each request is that of its last query token. Lengths may exceed the lists.

    Args:
        sizes: the numbers of requests and of query tokens.
        q_len: the query tokens of each request; None: ``cum_seq_lens_q``.
        scaled_rows: whether the cache has rows of 656 bytes. FlashInfer's kernel for them takes the lengths of requests
            for those of their keys and does not count by them, so there is no meaning that all kernels share.
    """
    batch, tokens = sizes
    if call.seq_lens is None:
        return "sparse_mla_top_k_lens", _lens_of_tokens(call, tokens, device)
    view = view_of(call.seq_lens, "seq_lens")
    by_token = q_len is not None and view.shape in ((batch, q_len), (tokens,))
    if not by_token and view.shape != (batch,):
        raise UsageError(
            f"shape {view.shape}, expected {(batch,)}" + (f" or {(batch, q_len)}" * bool(q_len)), argument="seq_lens"
        )
    view = _by_token(view, "seq_lens", 0) if by_token else view
    check_vector("seq_lens", view, tokens if by_token else batch, "int32", device)
    if call.sparse_mla_top_k_lens is not None:
        return "sparse_mla_top_k_lens", _lens_of_tokens(call, tokens, device)
    if by_token:
        return "seq_lens", view
    if scaled_rows:
        by_lists = f"shape {(batch, q_len)}" if q_len else "sparse_mla_top_k_lens"
        raise UsageError(
            f"shape {view.shape} with {tokens} query tokens and rows of 656 bytes, expected {by_lists}: the "
            "lengths of lists",
            argument="seq_lens",
        )
    sums = call.cum_seq_lens_q if q_len is None else q_len
    return "seq_lens", call.runtime.memory.causal("seq_lens", call.seq_lens, sums, tokens)


def _lens_of_tokens(call: TrtllmMlaArguments, tokens: int, device: int) -> TensorView | None:
    """The view of ``sparse_mla_top_k_lens``, if there are such."""
    if call.sparse_mla_top_k_lens is None:
        return None
    lens = view_of(call.sparse_mla_top_k_lens, "sparse_mla_top_k_lens")
    check_vector("sparse_mla_top_k_lens", lens, tokens, "int32", device)
    return lens
