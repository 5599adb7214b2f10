"""What sparse MLA layers gave in an engine, beside float32 over the lists and the cache that they got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .trace import digests, weights

DECODED = 128  # query tokens of a call at most, so that it has no prompt
SAMPLES = 8  # query tokens of a call
LATENT, SCALES, ROPE = 512, 4, 64
NOTHING = {
    "calls": 0,
    "most_tokens_of_a_call": 0,
    "tokens": 0,
    "tokens_with_full_lists": 0,
    "relative_error": 0.0,
    "mean_relative_error": 0.0,
    "absolute_error": 0.0,
}


@contextmanager
def _replaced(layer_class: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Have layers of a class call another method, which calls theirs."""
    inner = getattr(layer_class, name)
    setattr(layer_class, name, method)
    try:
        yield
    finally:
        setattr(layer_class, name, inner)


@contextmanager
def listed_layers(layer_class: Any) -> Iterator[dict[str, float]]:
    """Count calls of layers of a class, and the largest errors of some of their query tokens.

    A relative error is that of the norm over all heads of a token.
    """
    counted: dict[str, float] = dict(NOTHING)
    with _replaced(layer_class, "attend", _counting(layer_class.attend, counted)):
        yield counted


def _counting(inner: Callable[..., Any], counted: dict[str, float]) -> Callable[..., Any]:
    """A layer's method ``inner`` whose calls are counted."""

    def attend(own: Any, q: Any, kv_cache: Any, indices: Any, *given: Any) -> Any:
        out = inner(own, q, kv_cache, indices, *given)
        count(counted, q, kv_cache, indices, own.scale, out)
        return out

    return attend


@contextmanager
def flash_mla_layers(layer_class: Any) -> Iterator[dict[str, float]]:
    """Count the same of layers of vLLM's FlashMLA, by the methods that call its kernels for the two kinds of cache."""
    of_bytes: Callable[..., Any] = layer_class._fp8_flash_mla_kernel
    counted: dict[str, float] = dict(NOTHING)

    def packed(own: Any, *, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, **named: Any) -> Any:
        out, lse = of_bytes(own, q=q, kv_c_and_k_pe_cache=kv_c_and_k_pe_cache, topk_indices=topk_indices, **named)
        queries, indices, made = (each.flatten(0, 1) for each in (q, topk_indices, out))
        count(counted, queries, kv_c_and_k_pe_cache, indices, own.scale, made)
        return out, lse

    with (
        _replaced(layer_class, "_bf16_flash_mla_kernel", _counting(layer_class._bf16_flash_mla_kernel, counted)),
        _replaced(layer_class, "_fp8_flash_mla_kernel", packed),
    ):
        yield counted


@contextmanager
def listed_bits(layer_class: Any) -> Iterator[dict[str, Any]]:
    """Count query tokens of decodes, those that had the queries and rows of an earlier one, and other outputs of these.

    Rows are compared by their digests, in the order of the list; where a list's rows lie does not matter.
    ``repeated_by_layer`` tells after which layer the queries and rows of the same tokens part.
    """
    inner: Callable[..., Any] = layer_class.attend
    counted: dict[str, Any] = {"rows": 0, "repeated": 0, "attention": 0, "repeated_by_layer": []}
    known: dict[int, int] = {}
    layers: dict[int, int] = {}

    def attend(own: Any, q: Any, kv_cache: Any, indices: Any, *given: Any) -> Any:
        out = inner(own, q, kv_cache, indices, *given)
        if len(out) <= DECODED:
            pairs = zip(_digests_of_lists(q, kv_cache, indices).tolist(), digests(out.flatten(1)).tolist(), strict=True)
            layer = layers.setdefault(id(own), len(layers))
            counted["repeated_by_layer"] += [0] * (len(layers) - len(counted["repeated_by_layer"]))
            for given, made in pairs:
                counted["rows"] += 1
                counted["repeated"] += given in known
                counted["repeated_by_layer"][layer] += given in known
                counted["attention"] += known.setdefault(given, made) != made
        return out

    with _replaced(layer_class, "attend", attend):
        yield counted


def _digests_of_lists(q: Any, kv_cache: Any, indices: Any) -> Any:
    """A number for the queries of each token and the rows of its list, holes included."""
    import torch

    q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    rows = kv_cache.reshape(-1, kv_cache.shape[-1])
    listed = torch.stack([digests(rows[slots]) for slots in indices.clamp(min=0).long()])
    return digests(q.flatten(1)) + (listed * (indices >= 0) * weights(indices.shape[1], q.device)).sum(1)


def count(counted: dict[str, float], q: Any, kv_cache: Any, indices: Any, scale: float, out: Any) -> None:
    """Count a call, and the errors of some of its query tokens."""
    import torch

    q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    rows = kv_cache.reshape(-1, kv_cache.shape[-1])
    counted["calls"] += 1
    counted["most_tokens_of_a_call"] = max(counted["most_tokens_of_a_call"], q.shape[0])
    for token in range(0, q.shape[0], -(-q.shape[0] // SAMPLES)):
        slots = indices[token][indices[token] >= 0].long()
        if not len(slots):
            continue
        keys = _float32(rows[slots])
        probabilities = torch.softmax(q[token].float() @ keys.T * scale, -1)
        exact = probabilities @ keys[:, :LATENT]
        difference = out[token].float() - exact
        relative = float(difference.norm() / exact.norm())
        counted["tokens"] += 1
        counted["tokens_with_full_lists"] += len(slots) == indices.shape[1]
        counted["relative_error"] = max(counted["relative_error"], round(relative, 6))
        counted["mean_relative_error"] += (relative - counted["mean_relative_error"]) / counted["tokens"]
        counted["absolute_error"] = max(counted["absolute_error"], round(float(difference.abs().max()), 6))


def _float32(rows: Any) -> Any:
    """Rows of the cache ``[rows, 576]``, of bf16 or of 656 bytes."""
    import torch

    if rows.dtype == torch.bfloat16:
        return rows.float()
    parts = rows.view(torch.uint8).split([LATENT, 4 * SCALES, 2 * ROPE], dim=-1)
    values, scales, rope = (part.contiguous() for part in parts)
    factors = scales.view(torch.float32).repeat_interleave(LATENT // SCALES, dim=-1)
    return torch.cat((values.view(torch.float8_e4m3fn).float() * factors, rope.view(torch.bfloat16).float()), dim=-1)
