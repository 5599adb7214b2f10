"""Paged decode on a real device: made-up tensors, a float64 reference, and the comparison. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubin_runtime.attention import PagedDecodePlan, Runtime, TensorView, plan_paged_decode
from cubin_runtime.attention.reference import bfloat16_bits, bfloat16_values, paged_decode_reference
from cubin_runtime.launch.driver import Driver

HEAD_DIM = 128
NAN_BITS = 0x7FC0
POISON = 0xA5
# bf16 inputs, bf16 P, fp32 sums: of the output's largest element, and of the norm.
ELEMENT_TOLERANCE = 2.0e-2
NORM_TOLERANCE = 6.0e-3
LSE_TOLERANCE = 4.0e-3


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Sizes and options of one decode; ``lengths`` are of each request, ``spare_pages`` lie unused in the pool."""

    lengths: tuple[int, ...]
    max_seq_len: int
    kv_heads: int
    group: int
    page_size: int
    kv_layout: str = "NHD"
    combined: bool = True
    with_lse: bool = True
    pdl: bool = False
    scale: float = 1 / math.sqrt(HEAD_DIM)
    spare_pages: int = 3

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True, slots=True)
class HostTensors:
    """What a case is made of, on the host: bf16 as bits, caches as ``[pages, page_size, kv_heads, 128]`` views."""

    q: np.ndarray
    pool: tuple[np.ndarray, ...]
    k: np.ndarray
    v: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray


def make_host(case: DecodeCase, rng: np.random.Generator) -> HostTensors:
    """Random tensors; pages permuted, table entries past a length -1, cache rows past a length NaN."""
    used = [-(-length // case.page_size) for length in case.lengths]
    pages = sum(used) + case.spare_pages
    inner = (case.page_size, case.kv_heads) if case.kv_layout == "NHD" else (case.kv_heads, case.page_size)
    shape = (pages, 2, *inner, HEAD_DIM) if case.combined else (pages, *inner, HEAD_DIM)
    pool = tuple(random_bits(rng, shape) for _ in range(1 if case.combined else 2))
    k, v = (pool[0][:, 0], pool[0][:, 1]) if case.combined else pool
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    columns = max(1, -(-case.max_seq_len // case.page_size))
    table = np.full((len(case.lengths), columns), -1, dtype=np.int32)
    order = rng.permutation(pages).astype(np.int32)
    taken = 0
    for b, (length, count) in enumerate(zip(case.lengths, used, strict=True)):
        table[b, :count] = order[taken : taken + count]
        taken += count
        rest = length % case.page_size
        if rest:
            k[table[b, count - 1], rest:] = NAN_BITS
            v[table[b, count - 1], rest:] = NAN_BITS
    q = random_bits(rng, (len(case.lengths), case.q_heads, HEAD_DIM))
    return HostTensors(q, pool, k, v, table, np.asarray(case.lengths, dtype=np.int32))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal values as bf16 bits."""
    return bfloat16_bits(rng.standard_normal(shape, dtype=np.float32))


class DeviceArrays:
    """Host arrays copied to the device, freed at the end."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._held: list[int] = []

    def upload(self, array: np.ndarray) -> int:
        address = self.empty(array.nbytes)
        self.driver.copy_to_device(address, np.ascontiguousarray(array))
        return address

    def empty(self, nbytes: int) -> int:
        """Poisoned memory."""
        address = self.driver.allocate(max(16, nbytes))
        self._held.append(address)
        self.driver.fill(address, POISON, max(16, nbytes), 0)
        return address

    def download(self, view: TensorView, dtype: Any) -> np.ndarray:
        host = np.empty(view.shape, dtype=dtype)
        self.driver.copy_to_host(host, view.pointer)
        return host

    def close(self) -> None:
        for address in self._held:
            self.driver.free(address)
        self._held.clear()


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """A case on the device: views, the plan, and what must come out."""

    case: DecodeCase
    host: HostTensors
    arrays: DeviceArrays
    plan: PagedDecodePlan
    tensors: tuple[TensorView, ...]
    expected: tuple[np.ndarray, np.ndarray]

    @property
    def out(self) -> TensorView:
        return self.tensors[5]

    def run(self, stream: int = 0, workspace: Any = None, **options: Any) -> None:
        """One launch on ``stream``."""
        scratch = workspace or self.plan.prepare(stream)
        self.plan.run(*self.tensors, workspace=scratch, stream=stream, **options)

    def poison(self) -> None:
        """Overwrite the output and the LSE."""
        out = self.out
        self.arrays.driver.fill(out.pointer, POISON, int(np.prod(out.shape)) * 2, 0)
        if len(self.tensors) > 6:
            lse = self.tensors[6]
            self.arrays.driver.fill(lse.pointer, POISON, int(np.prod(lse.shape)) * 4, 0)
        self.arrays.driver.synchronize(0)

    def output_bits(self) -> np.ndarray:
        return self.arrays.download(self.out, np.uint16)

    def result(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Output as float32 and the LSE if the case wants it."""
        out = bfloat16_values(self.output_bits())
        lse = self.arrays.download(self.tensors[6], np.float32) if self.case.with_lse else None
        return out, lse


@contextmanager
def on_device(
    runtime: Runtime, case: DecodeCase, rng: np.random.Generator, host: HostTensors | None = None
) -> Iterator[DeviceCase]:
    """The case in device memory, planned, with its reference."""
    driver = runtime.driver
    driver.ensure_context(0)
    host = host or make_host(case, rng)
    arrays = DeviceArrays(driver)
    try:
        addresses = [arrays.upload(part) for part in host.pool]
        k_address, v_address = addresses if len(addresses) == 2 else (addresses[0], addresses[0])
        k = cache_view(host.k, host.pool[0], k_address, case.kv_layout)
        v = cache_view(host.v, host.pool[-1], v_address, case.kv_layout)
        tensors = [
            TensorView.contiguous(arrays.upload(host.q), "bfloat16", host.q.shape),
            k,
            v,
            TensorView.contiguous(arrays.upload(host.page_table), "int32", host.page_table.shape),
            TensorView.contiguous(arrays.upload(host.seq_lens), "int32", host.seq_lens.shape),
            TensorView.contiguous(arrays.empty(host.q.nbytes), "bfloat16", host.q.shape),
        ]
        if case.with_lse:
            shape = host.q.shape[:2]
            tensors.append(TensorView.contiguous(arrays.empty(4 * shape[0] * shape[1]), "float32", shape))
        plan = plan_paged_decode(
            *tensors,
            max_seq_len=case.max_seq_len,
            softmax_scale=case.scale,
            kv_layout=case.kv_layout,
            enable_pdl=case.pdl,
            runtime=runtime,
        )
        yield DeviceCase(case, host, arrays, plan, tuple(tensors), reference_of(host, case.scale))
    finally:
        arrays.close()


def cache_view(cache: np.ndarray, pool: np.ndarray, address: int, kv_layout: str) -> TensorView:
    """A cache as the caller passes it (its own layout), at its place inside the pool's device copy."""
    own = cache if kv_layout == "NHD" else cache.transpose(0, 2, 1, 3)
    offset = own.__array_interface__["data"][0] - pool.__array_interface__["data"][0]
    strides = tuple(stride // 2 for stride in own.strides)
    return TensorView(address + offset, "bfloat16", own.shape, strides)


def reference_of(host: HostTensors, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE in float64."""
    values = (bfloat16_values(host.q), bfloat16_values(host.k), bfloat16_values(host.v))
    return paged_decode_reference(*values, host.page_table, host.seq_lens, scale)


def assert_close(got: tuple[np.ndarray, np.ndarray | None], expected: tuple[np.ndarray, np.ndarray]) -> float:
    """Hold a result against the reference; the relative error of the norm."""
    out, lse = got
    want_out, want_lse = expected
    assert np.isfinite(out).all(), "the output holds NaN or infinity"
    assert np.abs(out - want_out).max() <= ELEMENT_TOLERANCE * max(1.0, np.abs(want_out).max())
    norm = float(np.linalg.norm(want_out))
    error = float(np.linalg.norm(out - want_out)) / norm if norm else float(np.abs(out).max())
    assert error <= NORM_TOLERANCE, f"relative error {error:.2e}"
    if lse is not None:
        empty = np.isneginf(want_lse)
        assert np.array_equal(np.isneginf(lse), empty)
        assert np.abs(lse[~empty] - want_lse[~empty]).max(initial=0.0) <= LSE_TOLERANCE
    return error


def edge_lengths(page_size: int, max_seq_len: int) -> tuple[int, ...]:
    """0, 1, and around pages and tiles, within the bound."""
    edges = (0, 1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 127, 129, max_seq_len - 1, max_seq_len)
    return tuple(sorted({min(max(0, edge), max_seq_len) for edge in edges}))


def random_case(rng: np.random.Generator, longest: Sequence[int] = (1, 64, 300, 1500, 4000)) -> DecodeCase:
    """A case drawn from everything that the kernel takes."""
    page_size = int(rng.choice([16, 32, 64, 128, 256]))
    max_seq_len = int(rng.choice(longest))
    edges = edge_lengths(page_size, max_seq_len)
    batch = int(rng.choice([1, 2, 3, 7, 33]))
    lengths = tuple(
        int(rng.choice(edges)) if rng.random() < 0.5 else int(rng.integers(0, max_seq_len + 1)) for _ in range(batch)
    )
    return DecodeCase(
        lengths=lengths,
        max_seq_len=max_seq_len,
        kv_heads=int(rng.choice([1, 2, 3, 8])),
        group=int(rng.integers(1, 17)),
        page_size=page_size,
        kv_layout=str(rng.choice(["NHD", "HND"])),
        combined=bool(rng.integers(2)),
        with_lse=bool(rng.integers(2)),
        pdl=bool(rng.integers(2)),
        scale=float(rng.choice([1 / math.sqrt(HEAD_DIM), 0.3, 1.0])),
    )
