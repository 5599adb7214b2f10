"""An MLA case in device memory: views as a caller passes them, the plan, runs, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from decode_device import DeviceCase
from decode_values import KINDS
from mla_cases import MlaCase, MlaHost, mla_host, mla_reference_of

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import MlaDecodePlan, Runtime, TensorView, plan_mla_decode
from cubin_runtime.testing.device import GUARD, DeviceArrays

OPERATION = "paged_mla_decode"


class MlaDeviceCase(DeviceCase):
    """A case on the device; made by ``mla_on_device``. ``tensors`` are q, cache, table, lengths, out, LSE."""

    def __init__(self, runtime: Runtime, case: MlaCase, host: MlaHost, arrays: DeviceArrays) -> None:
        self.runtime = runtime
        self.driver = runtime.driver
        self.case = case
        self.host = host
        self.arrays = arrays
        kind = KINDS[case.out_dtype]
        shape = (case.tokens, case.heads + case.strided, case.latent)
        address = arrays.empty(prod(shape) * np.dtype(kind.bits).itemsize)
        self.out_buffer = TensorView.contiguous(address, kind.view, shape)
        self.tensors = (
            *_inputs(case, host, arrays),
            _of_tokens(case, kind.view, address, case.latent),
            _lse_view(case, arrays),
        )
        self.options = _options(case, host, arrays)
        self.plan: MlaDecodePlan = plan_mla_decode(
            *self.tensors,
            **self.options,
            max_seq_len=case.max_seq_len,
            max_q_len=case.q_bound if case.q_lens is not None else None,
            batch_invariant=case.batch_invariant,
            enable_pdl=case.pdl,
            runtime=runtime,
        )

    @property
    def lse(self) -> TensorView | None:
        return self.tensors[5]

    @cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        return mla_reference_of(self.case, self.host)

    @property
    def of_scores(self) -> float:
        return self.case.of_scores

    def load(self, host: MlaHost) -> None:
        """Other content of the same shapes in the same memory: what replays of a graph meet."""
        q, cache, table, lens = self.tensors[:4]
        for own, new in ((self.host.q, host.q), (self.host.page_table, host.page_table), (self.host.pool, host.pool)):
            assert own.shape == new.shape, (own.shape, new.shape)
        self.driver.copy_to_device(q.pointer, _with_gaps(self.case, host.q))
        self.driver.copy_to_device(cache.pointer, host.pool)
        self.driver.copy_to_device(table.pointer, host.page_table)
        self.driver.copy_to_device(lens.pointer, host.seq_lens)
        for name in ("q_cu_seq_lens", "mask", "sinks"):
            if self.options[name] is not None:
                self.driver.copy_to_device(self.options[name].pointer, getattr(host, name))
        self.host = host
        self.__dict__.pop("expected", None)


@contextmanager
def mla_on_device(
    runtime: Runtime,
    case: MlaCase,
    rng: np.random.Generator,
    host: MlaHost | None = None,
    guard: int = GUARD,
) -> Iterator[MlaDeviceCase]:
    """The case in device memory, planned."""
    runtime.driver.set_current(runtime.driver.primary_context(0))
    arrays = DeviceArrays(runtime.driver, guard)
    try:
        yield MlaDeviceCase(runtime, case, host or mla_host(case, rng), arrays)
    finally:
        arrays.close()


def mla_kernels(runtime: Runtime) -> list[NativeKernel]:
    """The MLA kernels that were built for this very device."""
    major, minor = runtime.driver.device(0).capability
    own = runtime.native_release().kernels
    return [k for k in own if k.operation == OPERATION and k.sm.rstrip("af") == f"{major}{minor}"]


def mla_types(runtime: Runtime) -> dict[str, tuple[str, ...]]:
    """What q may be by the dtype of the cache, as the kernels of this device say."""
    types: dict[str, set[str]] = {}
    for kernel in mla_kernels(runtime):
        types.setdefault(str(kernel.traits["dtype"]), set()).update(str(kernel.traits["q_dtypes"]).split(","))
    return {dtype: tuple(sorted(q_dtypes)) for dtype, q_dtypes in types.items()}


def _inputs(case: MlaCase, host: MlaHost, arrays: DeviceArrays) -> tuple[TensorView, ...]:
    word = "uint32" if case.unsigned else "int32"
    pages, page, columns = host.pool.shape
    shape, strides = (pages, page, case.width), (page * columns, columns, 1)
    if case.nested:
        shape, strides = (pages, 1, page, case.width), (strides[0], strides[0], *strides[1:])
    return (
        _of_tokens(case, KINDS[case.q_dtype].view, arrays.upload(_with_gaps(case, host.q)), case.width),
        TensorView(arrays.upload(host.pool), KINDS[case.kv_dtype].view, shape, strides),
        TensorView.contiguous(arrays.upload(host.page_table), "int32", host.page_table.shape),
        TensorView.contiguous(arrays.upload(host.seq_lens), word, host.seq_lens.shape),
    )


def _options(case: MlaCase, host: MlaHost, arrays: DeviceArrays) -> dict[str, Any]:
    def tensor(array: np.ndarray | None, dtype: str, shape: tuple[int, ...]) -> TensorView | None:
        return None if array is None else TensorView.contiguous(arrays.upload(array), dtype, shape)

    def scale(value: float) -> Any:
        return tensor(np.array([value], np.float32), "float32", (1,)) if case.device_scales else value

    lead = (case.tokens,) if case.q_lens is not None else (case.batch, case.q_len)
    mask = ("uint16", (*lead, 2)) if case.mask_itemsize == 2 else ("uint32", (*lead, 1))
    return {
        "q_cu_seq_lens": tensor(host.q_cu_seq_lens, "uint32" if case.unsigned else "int32", (case.batch + 1,)),
        "mask": tensor(host.mask, *mask),
        "sinks": tensor(host.sinks, "float32", (case.heads,) if case.flat_q else (1, case.heads)),
        "softmax_scale": scale(case.scale),
        "output_scale": scale(case.output_scale),
    }


def _with_gaps(case: MlaCase, q: np.ndarray) -> np.ndarray:
    if not case.strided:
        return q
    wide = np.full((len(q), case.heads + 1, case.width), KINDS[case.q_dtype].nan, q.dtype)
    wide[:, : case.heads] = q
    return wide


def _of_tokens(case: MlaCase, dtype: str, address: int, columns: int) -> TensorView:
    """q or out as the caller passes it: with ``strided``, one head of other content lies between tokens."""
    token = (case.heads + case.strided) * columns
    lead = (case.q_len * token, token) if len(case.lead) == 2 else (token,)
    return TensorView(address, dtype, (*case.lead, case.heads, columns), (*lead, columns, 1))


def _lse_view(case: MlaCase, arrays: DeviceArrays) -> TensorView | None:
    if not case.with_lse:
        return None
    address, shape = arrays.empty(4 * case.tokens * case.heads), (*case.lead, case.heads)
    if not case.strided:
        return TensorView.contiguous(address, "float32", shape)
    return TensorView(address, "float32", shape, (*((case.q_len, 1) if len(shape) == 3 else (1,)), case.tokens))
