"""A sparse MLA case in device memory: views as a caller passes them, the plan, runs, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from cubin_runtime.attention import Runtime, SparseMlaDecodePlan, TensorView, plan_sparse_mla_decode
from cubin_runtime.testing.compare import assert_attention_close
from cubin_runtime.testing.device import GUARD, DeviceArrays
from tests.gpu.decode_device import DeviceCase
from tests.gpu.decode_queries import lse_view, output_view, tokens_view, with_gaps
from tests.gpu.decode_values import values_of
from tests.gpu.sparse_mla_cases import (
    LATENT,
    SparseMlaCase,
    SparseMlaHost,
    out_kind,
    score_rounding,
    sparse_mla_host,
    sparse_mla_reference,
)


class SparseMlaDeviceCase(DeviceCase):
    """A case on the device; ``tensors`` are q, cache, lists, out, LSE."""

    def __init__(self, runtime: Runtime, case: SparseMlaCase, host: SparseMlaHost, arrays: DeviceArrays) -> None:
        self.runtime, self.driver = runtime, runtime.driver
        self.case, self.host, self.arrays = case, host, arrays
        self.out_buffer, out = output_view(case, arrays, LATENT)
        self.tensors = (
            tokens_view(case, "bfloat16", arrays.upload(with_gaps(case, host.q)), case.columns),
            _cache_view(case, host.memory, arrays.upload(host.memory)),
            TensorView.contiguous(arrays.upload(host.indices), "int32", host.indices.shape),
            out,
            lse_view(case, arrays),
        )

        def optional(array: np.ndarray | None, dtype: str) -> TensorView | None:
            return None if array is None else TensorView.contiguous(arrays.upload(array), dtype, array.shape)

        def scale(value: float) -> TensorView | float:
            return optional(np.array([value], np.float32), "float32") if case.device_scales else value

        self.options = {
            "topk_lens": optional(host.lens, "int32"),
            "sinks": optional(host.sinks, "float32"),
            "softmax_scale": scale(case.scale),
            "output_scale": scale(case.output_scale),
        }
        self.plan: SparseMlaDecodePlan = plan_sparse_mla_decode(
            *self.tensors,
            **self.options,
            lse_base=case.lse_base,
            lse_sink=case.lse_sink,
            batch_invariant=case.batch_invariant,
            enable_pdl=case.pdl,
            runtime=runtime,
        )

    @property
    def lse(self) -> TensorView | None:
        return self.tensors[4]

    @cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        return sparse_mla_reference(self.case, self.host)

    def assert_right(self) -> float:
        out, lse = self.result()
        return assert_attention_close(
            values_of(self.case.out_type, out),
            self.expected[0],
            dtype=out_kind(self.case),
            kv_dtype="float8_e4m3fn" if self.case.cache == "scaled_e4m3" else "bfloat16",
            lse=lse,
            expected_lse=self.expected[1],
            output_scale=self.case.output_scale,
            score_error=score_rounding(self.case, self.host),
        )

    def load(self, host: SparseMlaHost) -> None:
        """Other content of the same shapes in the same memory: what replays of a graph meet."""
        pairs = [(self.tensors[1], host.memory), (self.tensors[2], host.indices), (self.options["sinks"], host.sinks)]
        pairs += [(self.tensors[0], with_gaps(self.case, host.q)), (self.options["topk_lens"], host.lens)]
        for view, array in pairs:
            if view is not None:
                self.driver.copy_to_device(view.pointer, np.ascontiguousarray(array))
        self.host = host
        self.__dict__.pop("expected", None)


@contextmanager
def sparse_mla_on_device(
    runtime: Runtime,
    case: SparseMlaCase,
    rng: np.random.Generator,
    host: SparseMlaHost | None = None,
    guard: int = GUARD,
) -> Iterator[SparseMlaDeviceCase]:
    """The case in device memory, planned."""
    runtime.driver.set_current(runtime.driver.primary_context(0))
    arrays = DeviceArrays(runtime.driver, guard)
    try:
        yield SparseMlaDeviceCase(runtime, case, host or sparse_mla_host(case, rng), arrays)
    finally:
        arrays.close()


def _cache_view(case: SparseMlaCase, memory: np.ndarray, address: int) -> TensorView:
    dtype = case.byte_dtype if case.cache == "scaled_e4m3" else "bfloat16"
    width = case.row_bytes if case.cache == "scaled_e4m3" else case.columns
    pages, room, _ = memory.shape
    page, row = room * width, width
    shape, strides = {
        "pages": ((pages, case.page_size, width), (page, row, 1)),
        "one head after": ((pages, case.page_size, 1, width), (page, row, row, 1)),
        "one head before": ((pages, 1, case.page_size, width), (page, page, row, 1)),
        "rows": ((pages * case.page_size, width), (row, 1)),
    }[case.view]
    return TensorView(address, dtype, shape, strides)
