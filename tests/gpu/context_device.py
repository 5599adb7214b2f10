"""A context attention case in device memory: views as a caller passes them, the plan, runs, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from cubin_runtime.attention import ContextAttentionPlan, Runtime, TensorView, plan_context_attention
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing.device import GUARD, POISON, DeviceArrays
from tests.gpu.context_cases import ContextCase, ContextHost, context_host, context_reference_of, nan_of
from tests.gpu.decode_device import DeviceCase
from tests.gpu.decode_values import KINDS
from tests.gpu.kv_scales import kv_scale_arguments


class ContextDeviceCase(DeviceCase):
    """A case on the device; made by ``context_on_device``. All that no row may use is NaN."""

    plan: ContextAttentionPlan  # type: ignore[assignment]

    def __init__(
        self, runtime: Runtime, case: ContextCase, host: ContextHost, arrays: DeviceArrays, rng: np.random.Generator
    ) -> None:
        self.runtime, self.driver = runtime, runtime.driver
        self.case, self.host, self.arrays = case, host, arrays
        kind = KINDS[case.dtype].view
        self.out_address = arrays.empty(2 * case.tokens * (case.heads + case.strided) * case.value_dim)
        self.lse_address = arrays.empty(4 * case.tokens * case.heads)
        lead = self._lead
        self.given: dict[str, Any] = {
            "q": self._of_tokens(kind, arrays.upload(self._with_gaps(host.q)), case.head_dim),
            "out": self._of_tokens(kind, self.out_address, case.value_dim),
            "lse": TensorView.contiguous(self.lse_address, "float32", (*lead, case.heads)) if case.with_lse else None,
            **self._keys(rng),
            **self._options(),
        }
        if case.form != "even":
            self.given["q_cu_seq_lens"] = self._integers(np.cumsum([0, *case.q_lens]))
        self.plan = plan_context_attention(
            **self.given,
            max_seq_len=self._bound,
            max_q_len=max(case.q_lens) + case.spare if case.form != "even" and case.spare != 1 else None,
            causal=case.causal,
            window_left=case.window_left,
            window_right=case.window_right,
            logit_soft_cap=case.logit_soft_cap,
            kv_layout=self._layout,
            lse_base=case.lse_base,
            lse_sink=case.lse_sink,
            batch_invariant=case.batch_invariant,
            enable_pdl=case.pdl,
            runtime=runtime,
        )

    @cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        return context_reference_of(self.case, self.host)

    def run(self, stream: int = 0, workspace: Workspace | None = None, **options: Any) -> None:
        self.plan.run(**{**self.given, **options}, workspace=workspace or self.plan.prepare(stream), stream=stream)

    def poison(self, stream: int = 0) -> None:
        case = self.case
        elements = case.tokens * (case.heads + case.strided) * case.value_dim
        self.driver.fill(self.out_address, POISON, 2 * elements, stream)
        self.driver.fill(self.lse_address, POISON, 4 * case.tokens * case.heads, stream)

    def load(self, kv_lens: tuple[int, ...]) -> None:
        """Shorter lengths over the same memory: what replays of a graph meet."""
        self.driver.copy_to_device(self.given["seq_lens"].pointer, np.array(kv_lens, np.int32))
        longest = self.__dict__.setdefault("longest", self.host)
        k, v = (tuple(a[:n] for a, n in zip(side, kv_lens, strict=True)) for side in (longest.k, longest.v))
        self.case, self.host = replace(self.case, kv_lens=kv_lens), replace(longest, k=k, v=v)
        self.__dict__.pop("expected", None)

    def result(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Output bits and the log-sum-exp."""
        case = self.case
        shape = (case.tokens, case.heads + case.strided, case.value_dim)
        out = self.arrays.download(TensorView.contiguous(self.out_address, "uint16", shape), np.uint16)
        if case.strided:
            assert (out[:, case.heads :] == 0xFFFF).all(), "written between tokens of the output"
        lse = self.given["lse"]
        own = None if lse is None else self.arrays.download(lse, np.float32).reshape(case.tokens, case.heads)
        return out[:, : case.heads], own

    @property
    def of_scores(self) -> float:
        """Large scores are sums of fp32 products whose last bits count."""
        return 1e-4 * self.case.amplitude

    @property
    def _lead(self) -> tuple[int, ...]:
        case = self.case
        return (len(case.q_lens), case.q_lens[0]) if case.form == "even" else (case.tokens,)

    @property
    def _layout(self) -> str:
        return "NHD" if self.case.form == "ragged" else self.case.kv_layout

    @property
    def _bound(self) -> int:
        case, longest = self.case, max(self.case.kv_lens)
        if case.form == "paged":
            return longest + case.spare
        return min(longest + case.spare, sum(case.kv_lens) + case.spare if case.form == "ragged" else longest + 3)

    def _keys(self, rng: np.random.Generator) -> dict[str, Any]:
        case = self.case
        if case.form == "paged":
            return self._paged_keys(rng)
        if case.form == "ragged":
            k, v = (np.concatenate(side) for side in (self.host.k, self.host.v))
            k, v = (np.pad(side, ((0, case.spare), (0, 0), (0, 0)), constant_values=nan_of(case)) for side in (k, v))
            return {**self._views(k, v), "kv_cu_seq_lens": self._integers(np.cumsum([0, *case.kv_lens]))}
        shape = (len(case.kv_lens), max(case.kv_lens) + 3, case.kv_heads)
        bits = KINDS[case.cache_dtype].bits
        k, v = (np.full((*shape, n), nan_of(case), bits) for n in (case.head_dim, case.value_dim))
        for request, length in enumerate(case.kv_lens):
            k[request, :length], v[request, :length] = self.host.k[request], self.host.v[request]
        return {**self._views(k, v), "seq_lens": self._integers(np.array(case.kv_lens))}

    def _paged_keys(self, rng: np.random.Generator) -> dict[str, Any]:
        case, page = self.case, self.case.page_size
        counts = [-(-length // page) for length in case.kv_lens]
        ids = np.array([rng.permutation(sum(counts) + 3) for _ in range(1 + case.separate)])
        columns = max(1, -(-self._bound // page))
        table = np.full((len(counts), len(ids), columns), -1, np.int32)  # which would be reported
        shape = (ids.shape[1], page, case.kv_heads)
        bits = KINDS[case.cache_dtype].bits
        k, v = (np.full((*shape, n), nan_of(case), bits) for n in (case.head_dim, case.value_dim))
        used = 0
        for request, count in enumerate(counts):
            own, length, first = ids[:, used : used + count], case.kv_lens[request], case.first_key(request)
            used += count
            for column, at in enumerate(own.T):
                begin, end = max(first, column * page), min(length, (column + 1) * page)
                if begin < end:
                    table[request, :, column] = at
                    to = slice(begin - column * page, end - column * page)
                    k[at[0], to], v[at[-1], to] = self.host.k[request][begin:end], self.host.v[request][begin:end]
        if not case.separate:
            table = np.ascontiguousarray(table[:, 0])
        table_view = TensorView.contiguous(self.arrays.upload(table), "int32", table.shape)
        return {**self._views(k, v), "page_table": table_view, "seq_lens": self._integers(np.array(case.kv_lens))}

    def _views(self, k: np.ndarray, v: np.ndarray) -> dict[str, TensorView]:
        """K and V in the case's layout, apart or side by side."""
        case, kind = self.case, KINDS[self.case.cache_dtype].view
        if self._layout == "HND":
            k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if not case.joined:
            return {n: TensorView.contiguous(self.arrays.upload(a), kind, a.shape) for n, a in (("k", k), ("v", v))}
        both = np.concatenate([k, v], axis=-1)
        address = self.arrays.upload(both)
        strides = TensorView.contiguous(0, kind, both.shape).strides
        return {
            n: TensorView(address + at * both.itemsize * case.head_dim, kind, a.shape, strides)
            for at, (n, a) in enumerate((("k", k), ("v", v)))
        }

    def _options(self) -> dict[str, Any]:
        case = self.case

        def scale(value: float) -> Any:
            array = np.array([value], np.float32)
            return TensorView.contiguous(self.arrays.upload(array), "float32", (1,)) if case.device_scales else value

        sinks = self.host.sinks
        return {
            "sinks": None
            if sinks is None
            else TensorView.contiguous(self.arrays.upload(sinks), "float32", sinks.shape),
            "softmax_scale": scale(case.softmax_scale),
            "output_scale": scale(case.output_scale),
            **kv_scale_arguments(case.kv_scales, self.host.kv_scales, len(case.kv_lens), self.arrays),
        }

    def _integers(self, values: np.ndarray) -> TensorView:
        word = "uint32" if self.case.unsigned else "int32"
        return TensorView.contiguous(self.arrays.upload(values.astype(np.int32)), word, values.shape)

    def _with_gaps(self, q: np.ndarray) -> np.ndarray:
        if not self.case.strided:
            return q
        return np.pad(q, ((0, 0), (0, 1), (0, 0)), constant_values=KINDS[self.case.dtype].nan)

    def _of_tokens(self, dtype: str, address: int, columns: int) -> TensorView:
        """q or out: with ``strided``, one head of other content lies between tokens."""
        case = self.case
        token = (case.heads + case.strided) * columns
        steps = (case.q_lens[0] * token, token) if case.form == "even" else (token,)
        return TensorView(address, dtype, (*self._lead, case.heads, columns), (*steps, columns, 1))


@contextmanager
def context_on_device(
    runtime: Runtime, case: ContextCase, rng: np.random.Generator, host: ContextHost | None = None, guard: int = GUARD
) -> Iterator[ContextDeviceCase]:
    """The case in device memory, planned."""
    runtime.driver.set_current(runtime.driver.primary_context(0))
    arrays = DeviceArrays(runtime.driver, guard)
    try:
        yield ContextDeviceCase(runtime, case, host or context_host(case, rng), arrays, rng)
    finally:
        arrays.close()
