"""A prompt in device memory, and the bits that prefill and decode give its tokens under batch_invariant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubin_runtime.attention import Runtime, TensorView, plan_context_attention, plan_paged_decode
from cubin_runtime.testing.device import POISON, DeviceArrays
from tests.gpu.decode_values import KINDS, bits_of, values_of
from tests.gpu.kv_scales import draw_kv_scales, kv_scale_arguments


@dataclass(frozen=True)
class Prompt:
    """Tokens of a request and options; its pages lie in any order, all else there is NaN."""

    tokens: int
    head_dim: int = 128
    dtype: str = "bf16"
    kv_heads: int = 2
    group: int = 4
    page_size: int = 64
    window_left: int = -1
    sinks: bool = False
    amplitude: float = 1.0  # of the queries: how far scores lie apart
    softmax_scale: float | None = None
    device_scales: bool = False  # the kernels read both scales from memory
    e4m3: bool = False  # keys and values
    kv_scales: str = ""  # a form of them

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def kv_dtype(self) -> str:
        return "e4m3" if self.e4m3 else self.dtype


Bits = tuple[np.ndarray, np.ndarray]  # of outputs, [tokens, heads, head_dim], and of the log-sum-exp, [tokens, heads]


class PromptOnDevice:
    """The prompt's tensors; made by ``prompt_on_device``."""

    def __init__(self, runtime: Runtime, prompt: Prompt, rng: np.random.Generator, arrays: DeviceArrays) -> None:
        self.runtime, self.prompt, self.arrays = runtime, prompt, arrays
        self.kind = KINDS[prompt.dtype]
        shape = (prompt.tokens, prompt.heads, prompt.head_dim)
        self.q = bits_of(prompt.dtype, rng.standard_normal(shape) * prompt.amplitude)
        shape = (prompt.tokens, prompt.kv_heads, prompt.head_dim)
        self.k, self.v = (bits_of(prompt.kv_dtype, rng.standard_normal(shape)) for _ in range(2))
        self.kv_scales = draw_kv_scales(prompt.kv_scales, 1, prompt.kv_heads, rng)
        self.sinks = self._view(rng.standard_normal(prompt.heads).astype(np.float32), "float32")
        self.scale = prompt.head_dim**-0.5 if prompt.softmax_scale is None else prompt.softmax_scale
        scales = {"softmax_scale": self.scale, "output_scale": 0.75}
        self.scales = {name: self._view(np.array([scale], np.float32), "float32") for name, scale in scales.items()}
        self.caches = {page: self._caches(page, rng) for page in {prompt.page_size, 16}}

    def _view(self, array: np.ndarray, dtype: str) -> TensorView:
        return TensorView.contiguous(self.arrays.upload(array), dtype, array.shape)

    def _caches(self, page: int, rng: np.random.Generator) -> tuple[TensorView, TensorView, np.ndarray]:
        prompt = self.prompt
        columns = -(-prompt.tokens // page)
        ids = rng.permutation(columns + 3)[:columns].astype(np.int32)
        caches = []
        for side in (self.k, self.v):
            kind = KINDS[prompt.kv_dtype]
            cache = np.full((columns + 3, page, *side.shape[1:]), kind.nan, side.dtype)
            for column, at in enumerate(ids):
                piece = side[column * page : (column + 1) * page]
                cache[at, : len(piece)] = piece
            caches.append(self._view(cache, kind.view))
        return caches[0], caches[1], ids

    def _keys(self, lengths: Sequence[int], page: int) -> tuple[TensorView, TensorView, dict[str, TensorView]]:
        k, v, ids = self.caches[page]
        table = np.broadcast_to(ids, (len(lengths), len(ids)))
        tensors = {
            "page_table": self._view(np.ascontiguousarray(table), "int32"),
            "seq_lens": self._view(np.array(lengths, np.int32), "int32"),
            **kv_scale_arguments(self.prompt.kv_scales, self.kv_scales, len(lengths), self.arrays),
        }
        return k, v, tensors

    def prefill(self, cuts: Sequence[int], page: int | None = None) -> Bits:
        """The bits of the tokens from the first to the last of ``cuts``, which are chunks between them."""
        chosen = np.arange(cuts[0], cuts[-1])
        k, v, tensors = self._keys(cuts[1:], page or self.prompt.page_size)
        tensors["q_cu_seq_lens"] = self._view(np.array(cuts, np.int32) - np.int32(cuts[0]), "int32")
        return self._run(plan_context_attention, chosen, k, v, tensors)

    def decode(self, steps: Sequence[tuple[int, int]], page: int | None = None, spare: int = 0) -> Bits:
        """The bits of drafts, each a first token and a number of them, in one batch. ``spare``: over the bound."""
        chosen = np.concatenate([np.arange(first, first + count) for first, count in steps])
        k, v, tensors = self._keys([first + count for first, count in steps], page or self.prompt.page_size)
        counts = [count for _, count in steps]
        if len(set(counts)) > 1:
            tensors["q_cu_seq_lens"] = self._view(np.array([0, *np.cumsum(counts)], np.int32), "int32")
            return self._run(plan_paged_decode, chosen, k, v, tensors, max_q_len=max(counts), spare=spare)
        return self._run(plan_paged_decode, chosen, k, v, tensors, lead=(len(steps), counts[0]), spare=spare)

    def _run(
        self,
        make: Any,
        chosen: np.ndarray,
        k: TensorView,
        v: TensorView,
        tensors: dict[str, TensorView],
        *,
        lead: tuple[int, ...] | None = None,
        spare: int = 0,
        **options: Any,
    ) -> Bits:
        prompt, driver = self.prompt, self.runtime.driver
        shape = (len(chosen), prompt.heads, prompt.head_dim)
        sizes = int(np.prod(shape)) * 2, int(np.prod(shape[:2])) * 4
        addresses = [self.arrays.empty(size) for size in sizes]
        for address, size in zip(addresses, sizes, strict=True):
            driver.fill(address, POISON, size, 0)
        lead = lead or (len(chosen),)
        form = (*lead, prompt.heads, prompt.head_dim)
        names = ("k", "v") if make is plan_context_attention else ("k_cache", "v_cache")
        given: dict[str, Any] = {
            "q": TensorView.contiguous(self.arrays.upload(self.q[chosen]), self.kind.view, form),
            **dict(zip(names, (k, v), strict=True)),
            "out": TensorView.contiguous(addresses[0], self.kind.view, form),
            "lse": TensorView.contiguous(addresses[1], "float32", form[:-1]),
            **tensors,
        }
        if prompt.sinks:
            given["sinks"] = self.sinks
        if prompt.device_scales:
            given |= self.scales
        elif prompt.softmax_scale is not None:
            options["softmax_scale"] = prompt.softmax_scale
        bound = min(prompt.tokens + spare, tensors["page_table"].shape[1] * k.shape[1])
        options |= {"window_left": prompt.window_left, "max_seq_len": bound, "runtime": self.runtime}
        plan = make(**given, **options, batch_invariant=True)
        for _ in range(2):  # again, as counters reset themselves
            plan.run(**given, workspace=plan.prepare(0), stream=0)
        out = self.arrays.download(TensorView.contiguous(addresses[0], "uint16", shape), np.uint16)
        lse = self.arrays.download(TensorView.contiguous(addresses[1], "uint32", shape[:2]), np.uint32)
        return out, lse

    def expected(self, tokens: Sequence[int]) -> np.ndarray:
        """The outputs of tokens in float64."""
        prompt = self.prompt
        q = values_of(prompt.dtype, self.q).astype(np.float64)
        k, v = (values_of(prompt.kv_dtype, x).astype(np.float64) for x in (self.k, self.v))
        if self.kv_scales is not None:
            k, v = (x * scale.reshape(-1, 1) for x, scale in zip((k, v), self.kv_scales, strict=True))
        sinks = self.arrays.download(self.sinks, np.float32).astype(np.float64)
        out = []
        for token in tokens:
            first = 0 if prompt.window_left < 0 else max(0, token - prompt.window_left)
            own_k, own_v = (np.repeat(x[first : token + 1], prompt.group, axis=1) for x in (k, v))
            scores = np.einsum("hd,khd->hk", q[token], own_k) * self.scale
            top = scores.max(axis=1)
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1) + (np.exp(sinks - top) if prompt.sinks else 0.0)
            out.append(np.einsum("hk,khd->hd", weights, own_v) / total[:, None])
        return np.array(out) * (0.75 if prompt.device_scales else 1.0)


@contextmanager
def prompt_on_device(runtime: Runtime, prompt: Prompt, seed: object) -> Iterator[PromptOnDevice]:
    arrays = DeviceArrays(runtime.driver)
    try:
        yield PromptOnDevice(runtime, prompt, np.random.default_rng(seed), arrays)
    finally:
        arrays.close()


def picked(bits: Bits, tokens: Sequence[int]) -> Bits:
    return bits[0][list(tokens)], bits[1][list(tokens)]


def assert_same(found: Bits, expected: Bits, what: object) -> None:
    for name, one, other in zip(("output", "log-sum-exp"), found, expected, strict=True):
        wrong = np.argwhere((one != other).reshape(*one.shape[:2], -1).any(axis=2))
        counted = f"{len(wrong)} of {one[..., 0].size} rows differ, first {wrong[:4].tolist()}"
        assert len(wrong) == 0, f"{what}: {name}: {counted}"
