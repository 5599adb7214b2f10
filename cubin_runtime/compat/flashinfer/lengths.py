"""KV lengths, query lengths and their bounds, in the forms that FlashInfer takes."""

from __future__ import annotations

from typing import Any

from ...attention.checks import shown
from ...attention.trtllm_gen.checks import check_running_sum, check_vector
from ...errors import UsageError
from ...tensor import TensorView, view_of
from .arguments import DecodeArguments, MlaArguments
from .layouts import without


def lengths_of(seq_lens: Any) -> TensorView:
    """KV lengths as ``[batch]``, which dimensions of 1 may follow; raises ``UsageError`` for another shape."""
    view = whole = view_of(seq_lens, "seq_lens")
    while len(view.shape) > 1 and view.shape[-1] == 1:
        view = without(view, len(view.shape) - 1)
    if len(view.shape) != 1:
        raise UsageError(f"shape {whole.shape}, expected [batch] or [batch, 1]", argument="seq_lens")
    return view


def batch_of(seq_lens: TensorView) -> int:
    """The batch size; raises ``UsageError`` unless ``seq_lens`` is a vector."""
    if len(seq_lens.shape) != 1:
        raise UsageError(
            f"shape {seq_lens.shape}, expected one dimension, a length for each request", argument="seq_lens"
        )
    return seq_lens.shape[0]


def check_batch(batch_size: int, seq_lens: TensorView) -> None:
    """Raise ``UsageError`` unless ``batch_size`` is the length of ``seq_lens``."""
    if batch_size != batch_of(seq_lens):
        raise UsageError(f"seq_lens has {batch_of(seq_lens)} requests", argument="batch_size", value=batch_size)


def check_none_empty(name: str, lengths: Any) -> None:
    """Raise ``UsageError`` if one of the lengths known on the host is 0 or less."""
    if lengths is None:
        return
    try:
        numbers = [int(length) for length in lengths]
    except Exception:  # whatever an object of another library raises
        raise UsageError(f"got {shown(lengths)}, expected the lengths of all requests", argument=name) from None
    for request, length in enumerate(numbers):
        if length < 1:
            raise UsageError(
                f"request {request} has {length} tokens, expected at least 1 with ragged keys", argument=name
            )


def query_lengths(
    call: DecodeArguments | MlaArguments, q_len: int | None, batch: int, q: TensorView
) -> tuple[int, TensorView | None]:
    """The bound on the query lengths, and the view of ``cum_seq_lens_q`` or, where all are ``q_len``, None.

    Without ``max_q_len``, ``cum_seq_lens_q`` is read back, which waits for the device.

    Raises:
        UsageError: both ``q_len`` and ``cum_seq_lens_q`` are given, or neither; or the latter is not a vector of
            int32 on the device of ``q`` that increases to its number of tokens, or would be read back while a stream
            captures.
    """
    max_q_len, cum_seq_lens_q = call.max_q_len, call.cum_seq_lens_q
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            raise UsageError(
                f"max_q_len={max_q_len} without cum_seq_lens_q, which assigns tokens to requests; expected both or none"
            )
        if q_len is None:
            raise UsageError(
                "None without cum_seq_lens_q; expected the query tokens of a request", argument="q_len_per_req"
            )
        return q_len, None
    if q_len is not None:
        raise UsageError(f"q_len_per_req={q_len} with cum_seq_lens_q: expected None where lengths differ")
    view = view_of(cum_seq_lens_q, "cum_seq_lens_q")
    check_vector("cum_seq_lens_q", view, batch + 1, "int32", q.device)
    if max_q_len is not None:
        return max_q_len, view
    memory, driver = call.runtime.memory, call.runtime.driver
    stream = memory.current_stream(cum_seq_lens_q)
    with driver.using(driver.context_on(view.device)):
        if driver.is_capturing(stream):
            raise UsageError(
                "None while a stream captures; expected the bound on every query length", argument="max_q_len"
            )
    return max(1, check_running_sum("cum_seq_lens_q", memory.to_host(cum_seq_lens_q), q.shape[0])), view
