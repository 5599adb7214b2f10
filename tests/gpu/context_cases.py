"""Context attention cases: what a call has, the host tensors of it, drawn at random or stated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cubin_runtime.attention.context_reference import context_attention_reference
from cubin_runtime.kernels.native.prefill import select
from tests.gpu.decode_values import KINDS, bits_of, normal_bits, values_of
from tests.gpu.kv_scales import FORMS as FORMS_OF_SCALES
from tests.gpu.kv_scales import draw_kv_scales

FORMS = ("ragged", "paged", "even")
HEAD_DIMS = (64, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 48, 64)
PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)
SPANS = (1, 20, 130, 300, 700, 1500)
# What the reference may take: multiplications of both products.
MOST_PRODUCTS = 60_000_000


@dataclass(frozen=True)
class ContextCase:
    """A context attention.

    ``amplitude`` is that of queries and keys. ``joined``: K and V are views of one tensor; ``separate``: their pages
    have tables of their own. ``e4m3``: keys and values are; ``kv_scales`` is the form of their scales.
    """

    form: str = "ragged"
    dtype: str = "bf16"
    head_dim: int = 128
    kv_heads: int = 2
    group: int = 4
    q_lens: tuple[int, ...] = (70,)
    kv_lens: tuple[int, ...] = (200,)
    page_size: int = 64
    kv_layout: str = "NHD"
    joined: bool = False
    separate: bool = False
    strided: bool = False
    unsigned: bool = False
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logit_soft_cap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    output_scale: float = 1.0
    device_scales: bool = False
    with_lse: bool = True
    lse_base: str = "2"
    lse_sink: bool = True
    batch_invariant: bool = False
    pdl: bool = False
    amplitude: float = 1.0
    e4m3: bool = False
    kv_scales: str = ""
    spare: int = 0  # by how much bounds and tensors exceed what is used

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def value_dim(self) -> int:
        return 128 if self.head_dim == 192 else self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def cache_dtype(self) -> str:
        return "e4m3" if self.e4m3 else self.dtype

    # what the comparison of decodes asks
    @property
    def kv_dtype(self) -> str:  # that of the products, whatever the cache has
        return self.dtype

    @property
    def out_type(self) -> str:
        return self.dtype

    def first_key(self, request: int) -> int:
        """The first key of a request that some row sees; those in front may be gone."""
        if self.window_left < 0:
            return 0
        return min(max(0, self.kv_lens[request] - self.q_lens[request] - self.window_left), self.kv_lens[request])


@dataclass(frozen=True)
class ContextHost:
    """Bits on the host: queries ``[tokens, heads, D]``, keys and values of each request ``[kv_len, kv_heads, D]``."""

    q: np.ndarray
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]
    sinks: np.ndarray | None
    kv_scales: tuple[np.ndarray, np.ndarray] | None = None  # of keys and of values, in the form that the call has


def context_host(case: ContextCase, rng: np.random.Generator) -> ContextHost:
    def drawn(*shape: int, amplitude: float = 1.0, dtype: str = case.cache_dtype) -> np.ndarray:
        bits = normal_bits(dtype, rng, shape)
        if amplitude == 1.0:
            return bits
        return bits_of(dtype, values_of(dtype, bits) * amplitude)

    keys = [(length, case.kv_heads, case.head_dim) for length in case.kv_lens]
    values = [(length, case.kv_heads, case.value_dim) for length in case.kv_lens]
    return ContextHost(
        q=drawn(case.tokens, case.heads, case.head_dim, amplitude=case.amplitude, dtype=case.dtype),
        k=tuple(drawn(*shape, amplitude=case.amplitude) for shape in keys),
        v=tuple(drawn(*shape) for shape in values),
        sinks=rng.standard_normal(case.heads).astype(np.float32) * 3 if case.sinks else None,
        kv_scales=draw_kv_scales(case.kv_scales, len(case.kv_lens), case.kv_heads, rng),
    )


def context_reference_of(case: ContextCase, host: ContextHost) -> tuple[np.ndarray, np.ndarray]:
    k, v = (values_of(case.cache_dtype, np.concatenate(side)) for side in (host.k, host.v))
    k_scale, v_scale = host.kv_scales or (1.0, 1.0)
    return context_attention_reference(
        values_of(case.dtype, host.q),
        k,
        v,
        case.q_lens,
        case.kv_lens,
        case.softmax_scale,
        causal=case.causal,
        window_left=case.window_left,
        window_right=case.window_right,
        logit_soft_cap=case.logit_soft_cap,
        sinks=host.sinks,
        output_scale=case.output_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        lse_base=case.lse_base,
        lse_sink=case.lse_sink,
    )


def random_context_case(rng: np.random.Generator, **fixed: Any) -> ContextCase:
    """A case drawn from everything that kernels take, every option apart from the others; ``fixed`` ones are given."""
    causal, windows = _flag(rng), rng.random() < 0.4
    draw: dict[str, Any] = {
        "form": _one(rng, FORMS),
        "dtype": _one(rng, ("bf16", "fp16")),
        "head_dim": _one(rng, HEAD_DIMS),
        "kv_heads": _one(rng, (1, 1, 2, 3)),
        "group": _one(rng, GROUPS),
        "page_size": _one(rng, PAGE_SIZES),
        "kv_layout": _one(rng, ("NHD", "HND")),
        "joined": _flag(rng),
        "separate": _flag(rng),
        "strided": bool(rng.random() < 0.3),
        "unsigned": _flag(rng),
        "causal": causal,
        "window_left": _one(rng, (-1, 0, 1, 17, 128, 300)) if windows else -1,
        "window_right": _one(rng, (-1, 0, 5, 130)) if windows and not causal else -1,
        "logit_soft_cap": _one(rng, (0.0, 0.0, 0.0, 5.0, 30.0)),
        "sinks": _flag(rng),
        "scale": _one(rng, (None, None, None, 0.02, 0.3, -0.1, 0.0)),
        "output_scale": _one(rng, (1.0, 1.0, 0.37, 2.5)),
        "device_scales": _flag(rng),
        "with_lse": _flag(rng),
        "lse_base": _one(rng, ("2", "e")),
        "lse_sink": _flag(rng),
        "batch_invariant": _flag(rng),
        "pdl": _flag(rng),
        "amplitude": _one(rng, (1.0, 1.0, 6.0)),
        "spare": _one(rng, (0, 0, 1, 200)),
        **_drawn_e4m3(rng, fixed.get("e4m3")),
        **fixed,
    }
    if draw["sinks"]:
        draw["amplitude"] = 1.0  # far above all scores a sink leaves outputs too small for fp32
    batch, span = _one(rng, (1, 1, 2, 3, 5, 9, 40)), _one(rng, SPANS)
    kv_lens = [_length(rng, span) for _ in range(batch)]
    q_lens = [_one(rng, (0, min(1, n), n, int(rng.integers(0, n + 1)))) for n in kv_lens]
    kind = rng.random()
    if kind < 0.2:  # queries that have nothing to do with the keys
        q_lens = [_length(rng, span) for _ in range(batch)]
    elif kind < 0.3:
        q_lens = [1] * batch
    if draw["form"] == "even":
        q_lens = [max(1, q_lens[0])] * batch
    if not sum(q_lens):
        q_lens[-1] = 1
    if draw["form"] != "paged":
        # Ragged tensors hold a token at least.
        kv_lens[0] = max(1, kv_lens[0])
    case = _affordable(ContextCase(**draw, q_lens=tuple(q_lens), kv_lens=tuple(kv_lens)))
    if rng.random() < 0.1 and "page_size" not in fixed:  # a page holds a request, and is of any size
        case = replace(case, page_size=max(1, max(case.kv_lens) + case.spare + _one(rng, (0, 1, 100))))
    return case


def _drawn_e4m3(rng: np.random.Generator, e4m3: bool | None) -> dict[str, Any]:
    if e4m3 is None:
        e4m3 = bool(rng.random() < 0.3)
    return {"e4m3": e4m3, "kv_scales": _one(rng, ("", *FORMS_OF_SCALES)) if e4m3 else _one(rng, ("", "", "number"))}


def _affordable(case: ContextCase) -> ContextCase:
    """Fewer requests, then shorter ones, until the reference takes it in its stride."""
    while case.heads * case.head_dim * sum(q * k for q, k in zip(case.q_lens, case.kv_lens, strict=True)) > (
        MOST_PRODUCTS
    ):
        if len(case.q_lens) > 1:
            half = len(case.q_lens) // 2
            case = replace(case, q_lens=(max(1, case.q_lens[0]), *case.q_lens[1:half]), kv_lens=case.kv_lens[:half])
        else:
            case = replace(case, q_lens=(case.q_lens[0] // 2 + 1,), kv_lens=(case.kv_lens[0] // 2 + 1,))
    return case


def _length(rng: np.random.Generator, span: int) -> int:
    return int(_one(rng, (0, 1, span, int(rng.integers(0, span + 1)), span // 128 * 128)))


def _one(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _flag(rng: np.random.Generator) -> bool:
    return bool(rng.integers(2))


def splits_up_to(parts: int) -> Callable[..., int]:
    """In place of ``select._splits``: so many parts, or as many as there is room for, wherever keys may be split."""

    def splits(shape: select.ContextShape, device: Any, _: int) -> int:
        most = min(parts, select._most_splits(shape, device))
        return most if most > 1 else 0

    return splits


def nan_of(case: ContextCase) -> int:
    return KINDS[case.cache_dtype].nan
