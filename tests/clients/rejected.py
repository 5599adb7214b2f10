"""Mistakes that type checkers must reject: the ones that a line names in its comment, and no others."""

from __future__ import annotations

from cubin_runtime import TensorView, append_kv, merge_states, mla_decode, paged_decode, plan_paged_decode
from cubin_runtime.compat import flashinfer


def mistakes(t: TensorView) -> None:
    paged_decode("a", 1, t, t, t, max_seq_len=64)  # type-var, arg-type
    paged_decode(t, t, t, t, t, max_seq_len=64, kv_layout="BHND")  # arg-type
    paged_decode(t, t, t, t, t, max_seq_len=64, backend="cuda")  # arg-type
    paged_decode(t, t, t, t, t, max_seq_len=64, stream="main")  # arg-type
    paged_decode(t, t, t, t, [1, 2], max_seq_len=64)  # arg-type
    paged_decode(t, t, t, t, t)  # call-arg
    mla_decode(t, t, t, t, max_seq_len=64, softmax_scale=None)  # arg-type
    plan_paged_decode(t, t, t, t, t, t, max_seq_len="64")  # arg-type
    plan_paged_decode(t, t, t, t, t, t, max_seq_len=64).run(t, t, t, t, t, None)  # arg-type
    flashinfer.xqa_batch_decode_with_kv_cache(t, t, t, t, t, 64, kv_layout="BHND")  # arg-type
    merge_states(t, t, lse_base="10")  # arg-type
    append_kv(t, t, t, t, t, kv_layout="HDN")  # arg-type
    TensorView.contiguous(0, "bf16", (1,))  # arg-type
    paged_decode(t, t, t, t, t, max_seq_len=64).upper()  # attr-defined
