"""Decoding over pages in float64, request by request."""

import math

import torch


def decode(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    q,
    k_cache,
    v_cache,
    page_table,
    seq_lens,
    softmax_scale,
    output_scale,
    window_left,
    out_dtype,
    with_lse,
    q_cu_seq_lens=None,
    mask=None,
    sinks=None,
    softmax_scale_device=None,
    output_scale_device=None,
    k_scale=None,
    v_scale=None,
    global_seq_lens=None,
    cp_world=1,
    cp_rank=0,
    cp_interleave=1,
    by_index=False,
    **bounds,
):
    """Output, or output and log-sum-exp (base 2), of the arguments of ``run``."""
    heads, head_dim = q.shape[-2:]
    page_size, kv_heads = k_cache.shape[1:3]
    value_dim = v_cache.shape[3]
    queries = q.reshape(-1, heads, head_dim).double()
    tokens, batch = queries.shape[0], len(seq_lens)
    begins = [b * tokens // batch for b in range(batch + 1)] if q_cu_seq_lens is None else q_cu_seq_lens.tolist()
    words = None if mask is None else mask.reshape(tokens, -1).tolist()
    size = 0 if mask is None else 8 * mask.element_size()
    logits = None if sinks is None else sinks.reshape(heads, 1).double()
    if softmax_scale_device is not None:
        softmax_scale = softmax_scale * softmax_scale_device.item()
    if output_scale_device is not None:
        output_scale = output_scale * output_scale_device.item()
    one = torch.ones(1, dtype=torch.float64, device=q.device)
    of_keys, of_values = ((one if by is None else by.double()).expand(batch, kv_heads) for by in (k_scale, v_scale))
    out = torch.zeros(tokens, heads, value_dim, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        begin, rows = begins[b], begins[b + 1] - begins[b]
        every = length if global_seq_lens is None else int(global_seq_lens[b])
        rank_keys = [key for key in range(every) if key // cp_interleave % cp_world == cp_rank][:length]
        prefix = every - rows  # keys in front of the query tokens; below 0, that many tokens have no key
        pages = page_table[b, ..., : -(-length // page_size)].long()
        k_pages, v_pages = (pages, pages) if pages.dim() == 1 else pages
        keys = k_cache[k_pages].reshape(-1, kv_heads, head_dim)[: len(rank_keys)].double() * of_keys[b, None, :, None]
        values = v_cache[v_pages].reshape(-1, kv_heads, value_dim)[: len(rank_keys)].double()
        values = values * of_values[b, None, :, None]
        keys = keys.repeat_interleave(heads // kv_heads, dim=1)
        values = values.repeat_interleave(heads // kv_heads, dim=1)
        for row in range(rows):
            seen = [True] * max(prefix, 0)
            if words is None:
                word = (2 << row) - 1
            else:
                halves = words[begin + row]
                word = sum((half % (1 << size)) << (size * i) for i, half in enumerate(halves))
            bits = [bool(word >> j & 1) for j in range(rows)]
            seen += bits[max(-prefix, 0) :]
            position = prefix + (row if by_index else sum(bits) - 1)
            earliest = position - window_left if window_left >= 0 else 0
            visible = [row >= -prefix and seen[key] and key >= earliest for key in rank_keys]
            visible = torch.tensor(visible, dtype=torch.bool, device=q.device)
            scores = torch.einsum("hd,khd->hk", queries[begin + row], keys[visible]) * softmax_scale
            if logits is not None:
                scores = torch.cat([scores, logits], dim=1)
            if scores.shape[1]:
                lse[begin + row] = torch.logsumexp(scores, dim=1) / math.log(2)
                weights = torch.softmax(scores, dim=1)[:, : int(visible.sum())]
                out[begin + row] = torch.einsum("hk,khd->hd", weights, values[visible]) * output_scale
    if out_dtype == torch.float8_e4m3fn:
        out = out.clamp(-448, 448)
    out = out.reshape(*q.shape[:-1], value_dim).to(out_dtype)
    return (out, lse.reshape(q.shape[:-1]).float()) if with_lse else out
