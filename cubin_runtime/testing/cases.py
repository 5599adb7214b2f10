"""Random decode cases on the host, by seed: paged caches, ragged batches, and their float64 references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention.reference import mla_decode_reference, paged_decode_reference
from ..errors import UsageError
from ..values import dataclass
from .values import from_bits, to_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..protocols import DTypeName
    from ..tensor import TensorView
    from .device import Device

    Array = NDArray[Any]

_NAN = {"bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F}


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """A decode on the host, as the bits that a device reads.

    ``q`` is ``[tokens, heads, width]``, the requests' tokens one after another, ``cache`` the K and V caches ``[pages,
    page_size, kv_heads, head_dim]``, or the one latent cache ``[pages, page_size, width]``. Rows past a length and
    unused pages are NaN. ``q_cu_seq_lens`` states where each request's tokens begin. ``latent``: columns of a value
    of MLA.
    """

    dtype: DTypeName
    q: Array
    cache: tuple[Array, ...]
    page_table: Array
    seq_lens: Array
    q_cu_seq_lens: Array
    max_seq_len: int
    softmax_scale: float
    latent: int | None = None

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.seq_lens)

    def on(self, device: Device) -> dict[str, TensorView]:
        """The case on a device as arguments of the operator, with poisoned ``out`` and ``lse``."""
        names = ("k_cache", "v_cache") if len(self.cache) == 2 else ("kv_cache",)
        width = self.latent or self.q.shape[2]
        tensors = {"q": device.array(self.q, self.dtype)}
        tensors |= {name: device.array(cache, self.dtype) for name, cache in zip(names, self.cache, strict=True)}
        tensors |= {"page_table": device.array(self.page_table), "seq_lens": device.array(self.seq_lens)}
        tensors["out"] = device.poisoned((*self.q.shape[:2], width), self.dtype)
        tensors["lse"] = device.poisoned(self.q.shape[:2], "float32")
        if not np.array_equal(self.q_cu_seq_lens, np.arange(self.batch + 1)):  # other than a token of each request
            tensors["q_cu_seq_lens"] = device.array(self.q_cu_seq_lens)
        return tensors

    def reference(self, *, latent: int | None = None, **options: Any) -> tuple[Array, Array]:
        """Output and log-sum-exp in float64; ``options`` as for ``paged_decode_reference``, ``latent`` for MLA."""
        q, *caches = (from_bits(self.dtype, part) for part in (self.q, *self.cache))
        options = {"q_cu_seq_lens": self.q_cu_seq_lens, **options}
        where = (self.page_table, self.seq_lens, self.softmax_scale)
        if len(caches) == 1:
            columns = latent or self.latent or q.shape[-1]
            return mla_decode_reference(q, caches[0], *where, latent=columns, **options)
        return paged_decode_reference(q, caches[0], caches[1], *where, **options)


def paged_case(
    seed: int,
    lengths: Sequence[int],
    *,
    q_lens: Sequence[int] | int = 1,
    q_heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 64,
    max_seq_len: int | None = None,
    dtype: DTypeName = "bfloat16",
) -> DecodeCase:
    """A paged decode of requests with these ``lengths`` in keys and ``q_lens`` query tokens, normal values.

    Pages are in a random order; ``max_seq_len`` (None: the longest) is the bound that the page table holds.

    Raises:
        UsageError: there is no request, or a number of keys or query tokens is out of range.
    """
    heads = ((q_heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim))
    return _case(seed, lengths, q_lens, heads, page_size, max_seq_len, dtype, 1 / math.sqrt(head_dim))


def mla_case(
    seed: int,
    lengths: Sequence[int],
    *,
    q_lens: Sequence[int] | int = 1,
    heads: int = 128,
    latent: int = 512,
    rope: int = 64,
    page_size: int = 64,
    max_seq_len: int | None = None,
    dtype: DTypeName = "bfloat16",
) -> DecodeCase:
    """As ``paged_case``, for MLA; the softmax scale is that of a head dimension of 128 + 64 before the projection."""
    shapes = ((heads, latent + rope), (latent + rope,))
    case = _case(seed, lengths, q_lens, shapes, page_size, max_seq_len, dtype, 1 / math.sqrt(192))
    return replace(case, latent=latent)


def _case(
    seed: int,
    lengths: Sequence[int],
    q_lens: Sequence[int] | int,
    shapes: tuple[tuple[int, ...], ...],
    page_size: int,
    max_seq_len: int | None,
    dtype: DTypeName,
    softmax_scale: float,
) -> DecodeCase:
    rng = np.random.default_rng(seed)
    tokens = [q_lens] * len(lengths) if isinstance(q_lens, int) else list(q_lens)
    for name, numbers in (("lengths", lengths), ("q_lens", tokens)):
        if len(numbers) != len(lengths) or min(numbers, default=-1) < 0:
            raise UsageError("expected 0 or more, of each of 1 request or more", argument=name, value=list(numbers))
    bound = max_seq_len or max(1, *lengths)
    if bound < max(lengths):
        raise UsageError(f"expected at least {max(lengths)}, the longest length", argument="max_seq_len", value=bound)
    used = [-(-length // page_size) for length in lengths]
    order = rng.permutation(sum(used) + 1).astype(np.int32)  # one page is unused
    table = np.full((len(lengths), -(-bound // page_size)), -1, dtype=np.int32)
    caches = tuple(_poisoned(dtype, (len(order), page_size, *shape)) for shape in shapes[1:])
    first = 0
    for request, (length, count) in enumerate(zip(lengths, used, strict=True)):
        pages = table[request, :count] = order[first : first + count]
        first += count
        for cache in caches:
            rows = cache[pages].reshape(-1, *cache.shape[2:])
            rows[:length] = to_bits(dtype, rng.standard_normal((length, *cache.shape[2:]), dtype=np.float32))
            cache[pages] = rows.reshape(-1, page_size, *cache.shape[2:])
    return DecodeCase(
        dtype=dtype,
        q=to_bits(dtype, rng.standard_normal((sum(tokens), *shapes[0]), dtype=np.float32)),
        cache=caches,
        page_table=table,
        seq_lens=np.array(lengths, dtype=np.int32),
        q_cu_seq_lens=np.cumsum([0, *tokens]).astype(np.int32),
        max_seq_len=bound,
        softmax_scale=softmax_scale,
    )


def _poisoned(dtype: DTypeName, shape: tuple[int, ...]) -> Array:
    bits = to_bits(dtype, np.zeros(1, dtype=np.float32))
    return np.full(shape, _NAN.get(dtype, np.nan), dtype=bits.dtype)
