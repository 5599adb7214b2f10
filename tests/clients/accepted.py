"""A client as strict type checkers must accept it; it is checked and never run."""

from __future__ import annotations

from typing import Any

from cubin_runtime import (
    Config,
    Runtime,
    TensorView,
    append_kv,
    merge_states,
    mla_decode,
    paged_decode,
    plan_paged_decode,
)
from cubin_runtime.attention import MlaDecodePlan, PagedDecodePlan
from cubin_runtime.compat import flashinfer


class OtherTensor:
    """A tensor of another library: DLPack, as torch writes it."""

    def __dlpack__(self, *, stream: Any = -1, max_version: tuple[int, int] | None = None) -> object:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise NotImplementedError


class OtherArray:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise NotImplementedError


class OtherStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        raise NotImplementedError


class TorchLikeStream:
    cuda_stream: int


class BindingsStream:
    def __int__(self) -> int:
        raise NotImplementedError

    def getPtr(self) -> int:
        raise NotImplementedError


def decode(q: OtherTensor, cache: TensorView, table: OtherArray, lengths: OtherTensor, out: TensorView) -> OtherTensor:
    made: OtherTensor = paged_decode(q, cache, cache, table, lengths, max_seq_len=4096)
    given: TensorView = paged_decode(cache, cache, cache, table, lengths, out=out, max_seq_len=4096, kv_layout="HND")
    mla_decode(q, cache, table, lengths, out=out, max_seq_len=4096, softmax_scale=0.1, stream=OtherStream())
    mla_decode(q, cache, table, lengths, out=out, max_seq_len=4096, softmax_scale=given, stream=TorchLikeStream())
    flashinfer.xqa_batch_decode_with_kv_cache(q, (cache, cache), q, table, lengths, 4096, kv_layout="NHD")
    append_kv(q, q, cache, cache, table, lengths, kv_layout="HND")
    merged: OtherTensor = merge_states(q, lengths, lse_base="e")
    return merged if merged is not made else made


def plan(runtime: Runtime, view: TensorView) -> tuple[PagedDecodePlan, type[MlaDecodePlan]]:
    made = plan_paged_decode(view, view, view, view, view, view, max_seq_len=64, backend="native", runtime=runtime)
    made.run(view, view, view, view, view, view, stream=7, softmax_scale=0.5)
    made.check(made.prepare(stream=OtherStream(), graphs=2))
    made.prepare(stream=BindingsStream())
    return made, MlaDecodePlan


def configured() -> TensorView:
    Runtime(Config.from_environment())
    return TensorView.contiguous(0, "bfloat16", (1, 2, 3))
