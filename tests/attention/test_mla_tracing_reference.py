"""The reference that recorded MLA definitions carry, run in torch, against ours in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention.attention_operator import AttentionCall
from cubin_runtime.attention.decode_rules import DecodeOptions
from cubin_runtime.attention.operators.mla_decode import MLA_DECODE
from cubin_runtime.attention.reference import mla_decode_reference
from cubin_runtime.debug.tracing.mla import traced_mla_decode

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from tests.attention.test_tracing_reference import agree, view_of  # noqa: E402  (it needs torch)

HEADS, LATENT, WIDTH, PAGE, LENGTHS = 3, 16, 80, 8, (21, 2, 0, 40)
NUMBERS = {"softmax_scale": 0.3, "output_scale": 0.7, "max_seq_len": 64}


def run(given: dict[str, Any], **numbers: Any) -> Any:
    """``run`` of the definition of a call with these tensors."""
    views = {arg.name: view_of(given[arg.name]) if arg.name in given else None for arg in MLA_DECODE.tensors}
    options = DecodeOptions(**{**NUMBERS, **numbers})
    call = traced_mla_decode(AttentionCall(MLA_DECODE.read(views, options), options))
    space: dict[str, Any] = {}
    exec(call.definition()["reference"], space)
    values = {**given, **NUMBERS, **numbers}
    return space["run"](*(values[part.name] for part in call.inputs))


def made(tokens: tuple[int, ...]) -> dict[str, Any]:
    """Random tensors of a decode with log-sum-exp; ``tokens`` are the leading dimensions of q."""
    made_by = torch.Generator().manual_seed(1)
    return {
        "q": torch.randn(*tokens, HEADS, WIDTH, generator=made_by),
        "kv_cache": torch.randn(30, PAGE, WIDTH, generator=made_by),
        "page_table": torch.randperm(30, generator=made_by)[:24].reshape(4, 6).int(),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "out": torch.empty(*tokens, HEADS, LATENT),
        "lse": torch.empty(*tokens, HEADS),
    }


def expected(given: dict[str, Any], words: Any = None, **more: Any) -> tuple[Any, Any]:
    q = given["q"].numpy().reshape(-1, HEADS, WIDTH)
    arrays = [given[name].numpy() for name in ("kv_cache", "page_table", "seq_lens")]
    return mla_decode_reference(q, *arrays, 0.3, latent=LATENT, output_scale=0.7, mask=words, **more)


def test_one_token_a_request() -> None:
    given = made((4,))
    agree(run(given), expected(given))


def test_rope_columns_in_memory_of_their_own() -> None:
    given = made((4,))
    q = given["q"]
    parts = {"q": q[..., :LATENT].contiguous(), "q_rope": q[..., LATENT:].contiguous()}
    agree(run({**given, **parts}), expected(given))


def test_drafts_with_a_mask_and_sinks() -> None:
    given, words = made((4, 3)), np.random.default_rng(2).integers(0, 8, 12).astype(np.uint32)
    sinks = torch.linspace(-1, 1, HEADS)
    halves = torch.from_numpy(words.view(np.int16).reshape(4, 3, 2).copy())
    found = run({**given, "mask": halves, "sinks": sinks})
    agree(found, expected(given, words, sinks=sinks.numpy()))


def test_drafts_of_different_length() -> None:
    given, starts = made((9,)), np.array([0, 4, 5, 5, 9], dtype=np.int32)
    found = run({**given, "q_cu_seq_lens": torch.from_numpy(starts)}, max_q_len=4)
    agree(found, expected(given, q_cu_seq_lens=starts))
