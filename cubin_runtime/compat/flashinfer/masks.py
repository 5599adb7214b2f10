"""Masks of draft tokens beside a sliding window, which FlashInfer and native kernels count from different places."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

from ...attention.decode_call import MASK_WORDS
from ...attention.fast_path.notes import note_unrepeatable
from ...errors import UsageError
from ...tensor import TensorView, view_of
from .arguments import Arguments


def check_window_of_mask(
    given: Arguments,
    window: str,
    q: TensorView,
    batch: int,
    q_len: int,
    q_cu_seq_lens: Any,
    *,
    left: int,
    bound: int,
    capacity: int,
) -> None:
    """Raise ``UsageError`` unless native kernels count the window of every query token from where FlashInfer does.

    FlashInfer counts it from the token's place among its request's query tokens, native kernels from the number of
    those that its mask lets it see. That is the same where token i sees i + 1 of them, as in a causal mask. So a mask
    beside a window that can hide keys is read back, which waits for the device.

    Args:
        window: the window's argument and its value, for the message.
        q: the query, of ``batch`` requests with ``q_len`` tokens each, or as ``q_cu_seq_lens`` says.
        left: keys before its own that a query token sees; below 0: all.
        bound: on the KV lengths.
        capacity: what the page table holds, which is the same in every call of this form.
    """
    if given.mask is None or not 0 <= left < capacity - 1:
        return
    note_unrepeatable()  # another call of this form may have another mask, or a bound beyond the window
    if left >= bound - 1:
        return
    view, tokens = view_of(given.mask, "mask"), batch * q_len if q_cu_seq_lens is None else q.shape[0]
    words = MASK_WORDS.get(view.dtype, 0)
    if words == 0 or prod(view.shape) != tokens * words:
        return  # the operator refuses it
    memory, driver = given.runtime.memory, given.runtime.driver
    with driver.using(driver.context_on(q.device)):
        if driver.is_capturing(memory.current_stream(given.query)):
            raise UsageError(f"mask: given with {window} while a stream captures, expected None, which is causal")
    try:
        values = memory.to_host(given.mask)
        starts = range(0, tokens + 1, q_len) if q_cu_seq_lens is None else memory.to_host(q_cu_seq_lens)
    except UsageError as error:
        raise UsageError(f"mask: cannot be read with {window}, expected None, which is causal: {error}") from error
    for request, (begin, end) in enumerate(pairwise(starts)):
        for place in range(end - begin):
            bits = values[(begin + place) * words : (begin + place + 1) * words]
            row = sum(word << 16 * number for number, word in enumerate(bits))
            seen = (row & ((1 << (end - begin)) - 1)).bit_count()
            if seen != place + 1:
                raise UsageError(
                    f"mask: query token {place} of request {request} sees {seen} of the query tokens, expected "
                    f"{place + 1} with {window}: from there on, native kernels count windows differently"
                )
