"""Attention of many query tokens in float64, request by request and head by head."""

import math

import torch


def context(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
    q,
    k,
    v,
    softmax_scale,
    output_scale,
    out_dtype,
    with_lse,
    causal=True,
    window_left=-1,
    window_right=-1,
    logit_soft_cap=0.0,
    lse_base="2",
    lse_sink=True,
    page_table=None,
    seq_lens=None,
    q_cu_seq_lens=None,
    kv_cu_seq_lens=None,
    sinks=None,
    softmax_scale_device=None,
    output_scale_device=None,
    k_scale=None,
    v_scale=None,
    **bounds,
):
    """Output, or output and log-sum-exp, of the arguments of ``run``; the last query token stands at the last key."""
    heads, head_dim = q.shape[-2:]
    kv_heads, value_dim = v.shape[-2:]
    queries = q.reshape(-1, heads, head_dim)
    tokens = queries.shape[0]
    if softmax_scale_device is not None:
        softmax_scale = softmax_scale * softmax_scale_device.item()
    if output_scale_device is not None:
        output_scale = output_scale * output_scale_device.item()
    kv_begins = None if kv_cu_seq_lens is None else kv_cu_seq_lens.tolist()
    if seq_lens is not None:
        lengths = seq_lens.tolist()
    else:
        lengths = [k.shape[1]] * k.shape[0] if kv_begins is None else kv_cu_seq_lens.diff().tolist()
    batch = len(lengths)
    one = torch.ones(1, dtype=torch.float64, device=q.device)
    of_keys, of_values = ((one if by is None else by.double()).expand(batch, kv_heads) for by in (k_scale, v_scale))
    begins = [b * tokens // batch for b in range(batch + 1)] if q_cu_seq_lens is None else q_cu_seq_lens.tolist()
    out = torch.zeros(tokens, heads, value_dim, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64, device=q.device)
    for b, length in enumerate(lengths):
        begin, end = begins[b], begins[b + 1]
        position = torch.arange(end - begin, device=q.device)[:, None] + length - (end - begin)
        key = torch.arange(length, device=q.device)[None]
        seen = (key <= position) if causal else torch.ones_like(key <= position)
        if window_left >= 0:
            seen &= key >= position - window_left
        if not causal and window_right >= 0:
            seen &= key <= position + window_right
        if page_table is not None:
            page_size = k.shape[1]
            used = seen.any(dim=0).nonzero()  # entries in front of a window, and behind a length, are not read
            first = int(used[0]) if len(used) else length
            at = torch.arange(first, length, device=q.device)
            table = page_table[b].long()
            k_pages, v_pages = (table, table) if table.dim() == 1 else table
            keys, values = k[k_pages[at // page_size], at % page_size], v[v_pages[at // page_size], at % page_size]
            seen = seen[:, first:]
        elif kv_begins is not None:
            keys, values = (side[kv_begins[b] : kv_begins[b] + length] for side in (k, v))
        else:
            keys, values = k[b, :length], v[b, :length]
        for head in range(heads):
            of = head // (heads // kv_heads)
            scores = queries[begin:end, head].double() @ keys[:, of].double().T * (softmax_scale * of_keys[b, of])
            if logit_soft_cap:
                scores = logit_soft_cap * torch.tanh(scores / logit_soft_cap)
            scores = scores.masked_fill(~seen, -math.inf)
            scores_lse = total = torch.logsumexp(scores, dim=1)
            if sinks is not None:
                total = torch.logaddexp(scores_lse, sinks.reshape(heads)[head].double())
            weights = torch.where(total[:, None].isneginf(), 0.0, torch.exp(scores - total[:, None]))
            out[begin:end, head] = weights @ values[:, of].double() * (output_scale * of_values[b, of])
            lse[begin:end, head] = total if lse_sink else scores_lse
    if lse_base == "2":
        lse = lse / math.log(2)
    if out_dtype == torch.float8_e4m3fn:
        out = out.clamp(-448, 448)
    out = out.reshape(*q.shape[:-1], value_dim).to(out_dtype)
    return (out, lse.reshape(q.shape[:-1]).float()) if with_lse else out
