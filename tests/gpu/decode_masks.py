"""Masks of draft tokens, and which keys each row sees: written from what the decode promises, key by key."""

from __future__ import annotations

import numpy as np

MASKS = ("none", "chain", "tree", "any")


def mask_words(kind: str, rng: np.random.Generator, q_len: int) -> np.ndarray | None:
    """uint64 ``[q_len]``, bit j of word i: row i sees draft token j; None for "none"."""
    if kind == "none":
        return None
    own = np.uint64(1) << np.arange(q_len, dtype=np.uint64)
    if kind == "any":
        # Every pattern counts: rows that see later tokens, rows that see nothing, bits past the draft.
        words = rng.integers(0, 1 << 64, size=q_len, dtype=np.uint64)
        words[rng.random(q_len) < 0.15] = 0
        return words
    words = own.copy()
    for i in range(1, q_len):
        parent = i - 1 if kind == "chain" else int(rng.integers(-1, i))
        if parent >= 0:
            words[i] |= words[parent]
    return words


def packed_words(words: np.ndarray, bound: int) -> np.ndarray:
    """uint32 ``[tokens, ceil(bound / 32)]`` as operators take masks, of uint64 ``[tokens]``."""
    return np.ascontiguousarray(words.astype("<u8").view("<u4").reshape(-1, 2)[:, : -(-bound // 32)])


def positions_of(kv_len: int, q_len: int, words: np.ndarray | None, by_index: bool = False) -> np.ndarray:
    """Where each row stands among the keys: causal by default, else by how many draft tokens it sees, or its index."""
    if words is None or by_index:
        return kv_len - q_len + np.arange(q_len)
    within = words & np.uint64((1 << q_len) - 1)
    return kv_len - q_len + np.array([int(word).bit_count() for word in within], dtype=np.int64) - 1


def visible_keys(
    kv_len: int, q_len: int, words: np.ndarray | None = None, window_left: int = -1, by_index: bool = False
) -> np.ndarray:
    """bool ``[q_len, kv_len]``: the keys that each row sees."""
    rows, keys = np.arange(q_len), np.arange(kv_len)
    draft = keys - (kv_len - q_len)
    if words is None:
        seen = draft[None] <= rows[:, None]
    else:
        bits = words[:, None].astype(np.uint64) >> np.clip(draft, 0, 63)[None].astype(np.uint64) & np.uint64(1)
        seen = (draft[None] < 0) | (bits == 1)
    if window_left >= 0:
        seen = seen & (keys[None] >= positions_of(kv_len, q_len, words, by_index)[:, None] - window_left)
    seen[: max(0, q_len - kv_len)] = False
    return seen


def keys_before_windows(
    kv_len: int, q_len: int, words: np.ndarray | None, window_left: int, by_index: bool = False
) -> int:
    """How many keys lie before every row's window: pages of them alone may be freed."""
    if window_left < 0:
        return 0
    rows = positions_of(kv_len, q_len, words, by_index)[max(0, q_len - kv_len) :]
    return int(np.clip(rows.min() - window_left, 0, kv_len)) if len(rows) else kv_len
