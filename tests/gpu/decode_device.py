"""A decode case in device memory: views as a caller passes them, the plan, runs, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import PagedDecodePlan, Runtime, TensorView, plan_paged_decode
from cubin_runtime.attention.paged_cache import KV_SCALES
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.decode import select
from cubin_runtime.kernels.native.decode.grids import Grid
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing.device import GUARD, POISON, DeviceArrays
from tests.gpu.decode_cases import DecodeCase, HostTensors, make_host, reference_of
from tests.gpu.decode_compare import assert_close, score_error
from tests.gpu.decode_masks import packed_words
from tests.gpu.decode_queries import lse_view, options_of, output_view, tokens_view, with_gaps
from tests.gpu.decode_values import KINDS
from tests.gpu.kv_scales import NUMBER, kv_scale_arguments

OPERATION = "paged_decode"


class DeviceCase:
    """A case on the device; made by ``on_device``."""

    def __init__(self, runtime: Runtime, case: DecodeCase, host: HostTensors, arrays: DeviceArrays) -> None:
        self.runtime = runtime
        self.driver = runtime.driver
        self.case = case
        self.host = host
        self.arrays = arrays
        self.out_buffer, out = output_view(case, arrays, case.head_dim)
        self.tensors = (*_inputs(case, host, arrays), out, lse_view(case, arrays))
        sinks = (case.q_heads,) if case.flat_q else (case.kv_heads, case.group)
        self.options = options_of(case, host, arrays, sinks)
        self.options |= kv_scale_arguments(case.kv_scales, host.kv_scales, case.batch, arrays)
        self.plan: PagedDecodePlan = plan_paged_decode(
            *self.tensors,
            **self.options,
            max_seq_len=case.max_seq_len,
            kv_layout=case.kv_layout,
            max_q_len=case.q_bound if case.q_lens is not None else None,
            window_left=case.window_left,
            draft_position=case.draft_position,
            batch_invariant=case.batch_invariant,
            enable_pdl=case.pdl,
            runtime=runtime,
        )

    @property
    def lse(self) -> TensorView | None:
        return self.tensors[6]

    @cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        return reference_of(self.case, self.host)

    @property
    def kernels(self) -> tuple[NativeKernel, ...]:
        return tuple(selection.kernel for selection in self.plan.selections)

    def dirty_workspace(self) -> Workspace:
        """A workspace of our own: poisoned, except for the regions that must be zero."""
        nbytes = self.plan.workspace_bytes
        context = self.driver.primary_context(0)
        workspace = Workspace(self.driver, context, self.arrays.empty(nbytes), nbytes)
        regions = self.plan.regions
        addresses = workspace.regions(regions)
        for region in regions:
            if region.zeroed and region.nbytes:
                self.driver.fill(addresses[region.name], 0, region.nbytes, 0)
        self.driver.synchronize(0)
        return workspace

    def assert_zeroed(self, workspace: Workspace) -> None:
        """The regions that must be zero before a launch are zero after it."""
        regions = self.plan.regions
        addresses = workspace.regions(regions)
        for region in regions:
            if region.zeroed and region.nbytes:
                assert not any(self.driver.read(addresses[region.name], region.nbytes)), f"{region.name} is left dirty"

    def run(self, stream: int = 0, workspace: Workspace | None = None, **options: Any) -> None:
        """One launch on ``stream``."""
        scratch = workspace or self.plan.prepare(stream)
        # The bounds and modes are the plan's; a step names tensors and scales.
        self.plan.run(*self.tensors, workspace=scratch, stream=stream, **{**self.options, **options})

    def poison(self, stream: int = 0) -> None:
        """Overwrite the output and the LSE, in stream order."""
        self.driver.fill(self.out_buffer.pointer, POISON, self.out_bytes, stream)
        lse = self.lse
        if lse is not None and prod(lse.shape):
            self.driver.fill(lse.pointer, POISON, 4 * prod(lse.shape), stream)

    @property
    def out_bytes(self) -> int:
        return prod(self.out_buffer.shape) * np.dtype(KINDS[self.case.out_type].bits).itemsize

    def result(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Output bits ``[tokens, q_heads, D]`` and LSE ``[tokens, q_heads]``; gaps of the output must be untouched."""
        case = self.case
        whole = self.arrays.download(self.out_buffer, KINDS[case.out_type].bits)
        gap = whole[:, case.q_heads :]
        assert (gap.view(np.uint8) == POISON).all(), "written between the tokens of the output"
        lse = self.lse
        if lse is None:
            return whole[:, : case.q_heads], None
        shape = (case.q_heads, case.tokens) if case.strided else (case.tokens, case.q_heads)
        values = self.arrays.download(TensorView.contiguous(lse.pointer, "float32", shape), np.float32)
        return whole[:, : case.q_heads], values.T if case.strided else values

    def result_bytes(self) -> tuple[bytes, bytes]:
        """The bits of output and LSE, to compare as they are."""
        out, lse = self.result()
        return out.tobytes(), b"" if lse is None else lse.tobytes()

    @property
    def of_scores(self) -> float:
        """What scores may be off by beyond rounding."""
        as_they_are = any(kernel.traits["q_dtypes"] == "e4m3" for kernel in self.kernels)
        largest = 1.0 if self.host.kv_scales is None else float(np.abs(self.host.kv_scales[0]).max())
        return score_error(self.case.head_dim, self.case.softmax_scale * largest) if as_they_are else 0.0

    def assert_right(self) -> float:
        """The result against float64."""
        return assert_close(self.case, self.result(), self.expected, self.of_scores)

    @staticmethod
    def pools_of(host: Any) -> tuple[np.ndarray, ...]:
        """The memory of the caches."""
        return host.pool

    def load_queries(self, q: np.ndarray) -> None:
        """Other queries in the same memory."""
        self.driver.copy_to_device(self.tensors[0].pointer, with_gaps(self.case, q))

    def load(self, host: HostTensors) -> None:
        """Other content of the same shapes in the same memory: what replays of a graph meet."""
        *caches, table, lens = self.tensors[1 : len(self.tensors) - 2]
        # A combined cache begins with its keys.
        pools = list(zip(self.pools_of(self.host), self.pools_of(host), strict=True))
        for own, new in ((self.host.q, host.q), (self.host.page_table, host.page_table), *pools):
            assert own.shape == new.shape, (own.shape, new.shape)
        for view, (_, part) in zip(caches, pools, strict=False):
            self.driver.copy_to_device(view.pointer, part)
        self.load_queries(host.q)
        self.driver.copy_to_device(table.pointer, host.page_table)
        self.driver.copy_to_device(lens.pointer, host.seq_lens)
        mask = None if host.mask is None else packed_words(host.mask, self.case.q_bound)
        for name, part in (("q_cu_seq_lens", host.q_cu_seq_lens), ("mask", mask), ("sinks", host.sinks)):
            if self.options[name] is not None:
                self.driver.copy_to_device(self.options[name].pointer, part)
        if host.kv_scales is not None and self.case.kv_scales == NUMBER:
            host = replace(host, kv_scales=self.host.kv_scales)
        elif host.kv_scales is not None:
            for name, part in zip(KV_SCALES, host.kv_scales, strict=True):
                self.driver.copy_to_device(self.options[name].pointer, part)
        self.host = host
        self.__dict__.pop("expected", None)


@contextmanager
def on_device(
    runtime: Runtime,
    case: DecodeCase,
    rng: np.random.Generator,
    host: HostTensors | None = None,
    guard: int = GUARD,
) -> Iterator[DeviceCase]:
    """The case in device memory, planned, on the kernel that it asks for where there is one and it may be chosen."""
    runtime.driver.set_current(runtime.driver.primary_context(0))
    arrays = DeviceArrays(runtime.driver, guard)
    try:
        host = host or make_host(case, rng)
        try:
            with only_kernels(runtime, _kernels_asked(runtime, case)), only_grids(case.clusters):
                made = DeviceCase(runtime, case, host, arrays)
        except UsageError:
            if case.rows is None:
                raise
            # Not every option may be served by every kernel.
            made = DeviceCase(runtime, case, host, arrays)
        yield made
    finally:
        arrays.close()


def decode_kernels(runtime: Runtime, case: DecodeCase) -> list[NativeKernel]:
    """The kernels of this device that take a case's dtypes and head_dim."""
    major, minor = runtime.driver.device(0).capability
    return [
        kernel
        for kernel in runtime.native_release().kernels
        if kernel.operation == OPERATION
        and kernel.sm.rstrip("af") == f"{major}{minor}"
        and (kernel.traits["dtype"], kernel.traits["head_dim"]) == (case.kv_dtype, case.head_dim)
        and case.q_type in str(kernel.traits["q_dtypes"]).split(",")
    ]


def _kernels_asked(runtime: Runtime, case: DecodeCase) -> set[str]:
    return {kernel.name for kernel in decode_kernels(runtime, case) if kernel.traits["rows"] == case.rows}


@contextmanager
def only_kernels(runtime: Runtime, names: set[str], operation: str = OPERATION) -> Iterator[None]:
    """Plans made inside choose among these kernels of the operation alone; all of them where none is named."""
    own = runtime.native_release()
    kept = tuple(kernel for kernel in own.kernels if kernel.operation != operation or kernel.name in names)
    runtime._native = replace(own, kernels=kept) if names else own
    try:
        yield
    finally:
        runtime._native = own


@contextmanager
def only_grids(clusters: bool | None) -> Iterator[None]:
    """Plans made inside choose among the grids with clusters alone, or those without, where a kernel has any."""
    every = select.grids_of

    def kept(*problem: Any) -> list[Grid]:
        grids = every(*problem)
        return [grid for grid in grids if clusters in (None, grid.cluster_size > 0)] or grids

    select.grids_of = kept
    try:
        yield
    finally:
        select.grids_of = every


def _inputs(case: DecodeCase, host: HostTensors, arrays: DeviceArrays) -> tuple[TensorView, ...]:
    addresses = [arrays.upload(part) for part in host.pool]
    word = "uint32" if case.unsigned else "int32"
    return (
        tokens_view(case, KINDS[case.q_type].view, arrays.upload(with_gaps(case, host.q)), case.head_dim),
        _cache_view(case, host.k, host.pool[0], addresses[0]),
        _cache_view(case, host.v, host.pool[-1], addresses[-1]),
        TensorView.contiguous(arrays.upload(host.page_table), "int32", host.page_table.shape),
        TensorView.contiguous(arrays.upload(host.seq_lens), word, host.seq_lens.shape),
    )


def _cache_view(case: DecodeCase, cache: np.ndarray, pool: np.ndarray, address: int) -> TensorView:
    """A cache in the caller's layout, at its place inside the pool's device copy."""
    own = cache if case.kv_layout == "NHD" else cache.transpose(0, 2, 1, 3)
    offset = own.__array_interface__["data"][0] - pool.__array_interface__["data"][0]
    strides = tuple(stride // own.itemsize for stride in own.strides)
    return TensorView(address + offset, KINDS[case.kv_dtype].view, own.shape, strides)
