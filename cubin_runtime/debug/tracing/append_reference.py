"""Writing new keys and values into pages, token by token."""

import torch


def append(  # type: ignore[no-untyped-def]
    k,
    v,
    k_cache,
    v_cache,
    page_table,
    lengths_include_new,
    seq_lens=None,
    q_cu_seq_lens=None,
    positions=None,
    batch_indices=None,
    page_indptr=None,
    k_scale=None,
    v_scale=None,
):
    """The caches after the call, as new tensors, of the arguments of ``run``."""
    k, v = (side.reshape(-1, *side.shape[-2:]) for side in (k, v))
    count, at = k.shape[0], []
    if positions is not None:
        at = list(zip(range(count), positions.tolist(), batch_indices.tolist(), strict=True))
    else:
        batch = len(seq_lens)
        begins = [b * count // batch for b in range(batch + 1)] if q_cu_seq_lens is None else q_cu_seq_lens.tolist()
        for request, length in enumerate(seq_lens.tolist()):
            begin, end = begins[request], begins[request + 1]
            first = length - (end - begin) if lengths_include_new else length
            at += [(token, first + token - begin, request) for token in range(begin, min(end, count))]
    new_k, new_v = k_cache.clone(), v_cache.clone()
    pages, page_size, kv_heads = k_cache.shape[:3]
    batch = max([1, *(request + 1 for _, _, request in at)])
    scales = [torch.as_tensor(1.0 if s is None else s).float().expand(batch, kv_heads) for s in (k_scale, v_scale)]
    rows = None if page_indptr is None else page_indptr.tolist()
    for token, position, request in at:
        if position < 0 or request < 0:
            continue
        table = page_table[request] if rows is None else page_table[rows[request] : rows[request + 1]]
        column, slot = divmod(position, page_size)
        if column >= len(table) or not 0 <= int(table[column]) < pages:
            continue
        for cache, source, scale in ((new_k, k, scales[0]), (new_v, v, scales[1])):
            row = source[token]
            if row.dtype != cache.dtype:
                row = (row.float() * (1 / scale[request, :, None].to(row.device))).clamp(-448, 448)
            cache[int(table[column]), slot] = row.to(cache.dtype)
    return new_k, new_v
