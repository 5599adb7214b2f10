"""An MLA case in device memory: views as a caller passes them, the plan, runs, and what came out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import MlaDecodePlan, Runtime, TensorView, plan_mla_decode
from cubin_runtime.testing.device import GUARD, DeviceArrays
from tests.gpu.decode_device import DeviceCase, only_kernels
from tests.gpu.decode_queries import lse_view, options_of, output_view, tokens_view, with_gaps
from tests.gpu.decode_values import KINDS
from tests.gpu.mla_cases import GAP, MlaCase, MlaHost, mla_host, mla_reference_of

OPERATION = "paged_mla_decode"


class MlaDeviceCase(DeviceCase):
    """A case on the device; made by ``mla_on_device``. ``tensors`` are q, cache, table, lengths, out, LSE."""

    def __init__(self, runtime: Runtime, case: MlaCase, host: MlaHost, arrays: DeviceArrays) -> None:
        self.runtime = runtime
        self.driver = runtime.driver
        self.case = case
        self.host = host
        self.arrays = arrays
        self.out_buffer, out = output_view(case, arrays, case.latent)
        self.tensors = (*_inputs(case, host, arrays), out, lse_view(case, arrays))
        self.options = options_of(case, host, arrays, (case.heads,) if case.flat_q else (1, case.heads))
        if case.separate_rope:
            self.options["q_rope"] = _rope(case, arrays.upload(_rope_rows(case, host.q)))
        if host.value_pool is not None:
            self.options["v_cache"] = _cache(case, host.value_pool, case.latent, arrays)
        with only_kernels(runtime, {kernel.name for kernel in kernels_for(case, mla_kernels(runtime))}, OPERATION):
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

    def load_queries(self, q: np.ndarray) -> None:
        """As of any decode; rope columns may lie in memory of their own."""
        super().load_queries(q[..., : self.tensors[0].shape[-1]])
        if self.case.separate_rope:
            gap = GAP * self.case.strided * q.itemsize
            self.driver.copy_to_device(self.options["q_rope"].pointer - gap, _rope_rows(self.case, q))

    @staticmethod
    def pools_of(host: MlaHost) -> tuple[np.ndarray, ...]:
        return (host.pool,) if host.value_pool is None else (host.pool, host.value_pool)


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


def is_portable(kernel: NativeKernel) -> bool:
    return not kernel.sm.endswith("a")


def kernels_for(case: MlaCase, kernels: Iterable[NativeKernel]) -> list[NativeKernel]:
    """Those of the kernels that the case asks for."""
    return [kernel for kernel in kernels if is_portable(kernel) == case.portable]


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
    columns = case.latent if case.separate_rope else case.width
    return (
        tokens_view(case, KINDS[case.q_type].view, arrays.upload(with_gaps(case, host.q[..., :columns])), columns),
        _cache(case, host.pool, case.width, arrays),
        TensorView.contiguous(arrays.upload(host.page_table), "int32", host.page_table.shape),
        TensorView.contiguous(arrays.upload(host.seq_lens), word, host.seq_lens.shape),
    )


def _rope_rows(case: MlaCase, q: np.ndarray) -> np.ndarray:
    """Memory of the rope columns of queries; with ``strided`` the last ones of wider rows, as projections give them."""
    gap = ((0, 0), (0, 0), (GAP * case.strided, 0))
    return np.pad(q[..., case.latent :], gap, constant_values=KINDS[case.q_type].nan)


def _rope(case: MlaCase, address: int) -> TensorView:
    """The rope columns of queries in such memory."""
    kind, gap = KINDS[case.q_type], GAP * case.strided
    columns = gap + case.rope
    token = case.heads * columns
    lead = (case.q_len * token, token) if len(case.lead) == 2 else (token,)
    first = address + gap * np.dtype(kind.bits).itemsize
    return TensorView(first, kind.view, (*case.lead, case.heads, case.rope), (*lead, columns, 1))


def _cache(case: MlaCase, pool: np.ndarray, width: int, arrays: DeviceArrays) -> TensorView:
    """The first ``width`` columns of a pool's rows."""
    pages, page, columns = pool.shape
    shape, strides = (pages, page, width), (page * columns, columns, 1)
    if case.nested:
        shape, strides = (pages, 1, page, width), (strides[0], strides[0], *strides[1:])
    return TensorView(arrays.upload(pool), KINDS[case.kv_dtype].view, shape, strides)
