"""Verify a tree of draft tokens in one decode: each token sees its ancestors alone, by a mask of 32 bits.

    make install  # in a clone, then the line with which it ends
    python examples/speculative_tree.py

The target model then accepts one path from the root; the last lines show which keys stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from cubin_runtime.testing import require_module

require_module("numpy", "pip install numpy")

import numpy as np

from cubin_runtime import draft_mask, paged_decode
from cubin_runtime.testing import Device, assert_attention_close, on_first_device, paged_case

# The parent of each draft token; -1 is the root. Requests may have trees of other shapes and sizes.
TREES = (
    (-1, 0, 0, 1, 1, 2, 3),
    (-1, 0, 1, 2),  # a chain: what a causal mask says
    (-1, 0, 0, 0),
)
LENGTHS = (1000, 257, 65)  # keys of each request, its draft tokens included


def main(device: Device) -> None:
    """Decode all draft tokens of three requests, and check each row against float64."""
    case = paged_case(seed=0, lengths=LENGTHS, q_lens=[len(parents) for parents in TREES])
    tensors = case.on(device)
    packed = draft_mask(parents=TREES)  # on the host; trees of the device are packed there
    paged_decode(**tensors, mask=device.array(packed), max_q_len=max(map(len, TREES)), max_seq_len=case.max_seq_len)

    words = packed.view(np.uint32)[:, 0]
    own_words = np.split(words, case.q_cu_seq_lens[1:-1])
    for request, parents in enumerate(TREES):
        print(f"request {request}: {LENGTHS[request]} keys, {len(parents)} draft tokens")
        for token, (parent, word) in enumerate(zip(parents, map(int, own_words[request]), strict=True)):
            position = LENGTHS[request] - len(parents) + word.bit_count() - 1
            bits = format(word, f"0{len(parents)}b")[::-1].replace("0", ".")
            above = "root" if parent < 0 else f"below {parent}"
            print(f"  draft {token} {above:8s} position {position:4d}  sees {bits}")
    if device.computes:
        expected, lse = case.reference(mask=words)
        out = device.numpy(tensors["out"])
        error = assert_attention_close(out, expected, lse=device.numpy(tensors["lse"]), expected_lse=lse)
        print(f"compared with float64: relative error {error:.1e}")
    accepted = accept(TREES[0], {0, 2, 5})
    first = LENGTHS[0] - len(TREES[0])
    print(f"request 0: draft tokens {accepted} accepted; their keys move to {first} ... {first + len(accepted) - 1}")


def accept(parents: Sequence[int], right: set[int]) -> list[int]:
    """The longest path from the root whose tokens are all ``right``."""
    paths: list[list[int]] = []
    for token, parent in enumerate(parents):
        before = paths[parent] if parent >= 0 else []
        paths.append([*before, token] if token in right and len(before) == depth(parents, parent) else [])
    return max(paths, key=len)


def depth(parents: Sequence[int], token: int) -> int:
    """How many tokens lead to ``token``, itself included."""
    return 0 if token < 0 else 1 + depth(parents, parents[token])


if __name__ == "__main__":
    on_first_device(main)
