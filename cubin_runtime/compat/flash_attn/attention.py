"""Attention over keys in requests of one size, ragged, or in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...attention.checks import integer
from ...attention.operators.context_attention import context_attention
from ...errors import UsageError, WorkspaceError
from ..renaming import renamed
from ..shapes import shape_of
from .options import Options
from .tensors import (
    differences,
    divided,
    for_each_part,
    new_lse,
    permuted,
    repeated,
    requests_of,
    with_zeros,
    without_keys,
)


def attend(
    q: Any, k: Any, v: Any, options: Options, operator: Callable[..., Any] | None = None, **where: Any
) -> tuple[Any, Any]:
    """``context_attention``, its output and, if it is wanted, the log-sum-exp in base e; ``where`` are its lengths.

    The log-sum-exp is ``[heads, tokens]`` for queries ``[tokens, heads, head_dim]``, else ``[batch, heads, q_len]``.
    Another ``operator`` may take its place.

    Raises:
        as ``context_attention``, in the caller's names.
    """
    shape = shape_of(q, "q", 3, 4)
    lse = of_tokens = None
    if options.returns_lse:
        # By head, then by token: so all tokens lie at one stride, as the operator takes them.
        new = new_lse(q, (shape[-2], *shape[:-2]))
        of_tokens = permuted(new, (1, 0) if len(shape) == 3 else (1, 2, 0))
        lse = new if len(shape) == 3 else permuted(new, (1, 0, 2))
    left, right = options.window
    try:
        out = (operator or context_attention)(
            q,
            k,
            v,
            causal=bool(options.causal),
            window_left=left,
            window_right=right,
            logit_soft_cap=options.softcap,
            sinks=options.sinks,
            softmax_scale=options.softmax_scale,
            k_scale=options.k_descale,
            v_scale=options.v_descale,
            lse_base="e",
            batch_invariant=options.batch_invariant,
            out=options.out,
            lse=of_tokens,
            **where,
        )
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, options.names) from error
    return out, lse


def attend_ragged(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any = None,
    seqused_k: Any = None,
    table: Any = None,
) -> tuple[Any, Any]:
    """Attention of queries ``[tokens, heads, head_dim]`` over ragged keys, or with a page ``table``; as ``attend``.

    The lengths in pages are ``seqused_k``, else they are made from ``cu_seqlens_k``. With ``seqused_q`` the query
    tokens of a request that are not used become a request without keys.
    """
    shape_of(q, "q", 3)
    batch = requests_of(cu_seqlens_q)
    if seqused_q is not None:
        cu_seqlens_q = divided(cu_seqlens_q, seqused_q, batch)
        options = options._replace(
            k_descale=for_each_part(options.k_descale, "k_descale", batch),
            v_descale=for_each_part(options.v_descale, "v_descale", batch),
        )
    where = {"q_cu_seq_lens": cu_seqlens_q, "max_q_len": integer("max_seqlen_q", max_seqlen_q)}
    bound = integer("max_seqlen_k", max_seqlen_k)
    if table is None:
        shape_of(cu_seqlens_k, "cu_seqlens_k", 1)
        most = shape_of(k, "k", 3)[0]
        if seqused_q is not None:
            cu_seqlens_k = without_keys(cu_seqlens_k, batch)
            seqused_k = None if seqused_k is None else with_zeros(seqused_k, batch)
        return attend(
            q, k, v, options, kv_cu_seq_lens=cu_seqlens_k, seq_lens=seqused_k, max_seq_len=min(bound, most), **where
        )
    if seqused_k is None:
        seqused_k = differences(cu_seqlens_k, "cu_seqlens_k", batch)
    if seqused_q is not None:
        seqused_k, table = with_zeros(seqused_k, batch), repeated(table, options.names["page_table"])
    columns = shape_of(table, options.names["page_table"], 2)[1]
    most = columns * shape_of(k, "k", 4)[1]
    return attend(q, k, v, options, page_table=table, seq_lens=seqused_k, max_seq_len=min(bound, most), **where)
