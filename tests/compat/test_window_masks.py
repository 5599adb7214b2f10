"""Masks beside windows: passed on where FlashInfer and native kernels count windows alike, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from trtllm_calls import MadeUpMemory
from xqa_calls import HEAD_DIM, HEADS, sent, trtllm_arguments, xqa_arguments, xqa_batch_arguments

from cubin_runtime.attention import Runtime
from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import StandIn

pytestmark = pytest.mark.usefixtures("hopper")

CAUSAL = (1, 3, 7)
# Other drafts than the first ones, but as many: the window begins where a causal mask's does.
PERMUTED = (4, 5, 7)
FULL, TREE = (7, 7, 7), (1, 3, 5)
ALIKE, UNLIKE = [CAUSAL, PERMUTED], [(FULL, "token 0 .* sees 3 "), (TREE, "token 2 .* sees 2 ")]
Decode = Callable[..., dict[str, Any]]


def words_of(rows: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    return rows if dtype == "uint32" else tuple(word for row in rows for word in (row & 0xFFFF, row >> 16))


@pytest.fixture(params=["xqa", "xqa_batch", "trtllm"])
def decode(request: pytest.FixtureRequest, standin: StandIn, memory: MadeUpMemory) -> Decode:
    """Decode with three drafts of four requests under one of three names, with these masks and a window."""

    def call(rows: tuple[int, ...], window_left: int, dtype: str = "uint16", **changes: Any) -> dict[str, Any]:
        mask = memory.tensor(dtype, 4, 3, 2 if dtype == "uint16" else 1, values=words_of(rows * 4, dtype))
        if request.param == "xqa":
            q = memory.tensor("bfloat16", 4, 3, HEADS, HEAD_DIM)
            window = {"sliding_win_size": window_left + 1, "q_seq_len": 3}
            flashinfer.xqa(**xqa_arguments(memory, q=q, output=replace(q), mask=mask, **window, **changes))
        else:
            name, made = {
                "xqa_batch": ("xqa_batch_decode_with_kv_cache", xqa_batch_arguments),
                "trtllm": ("trtllm_batch_decode_with_kv_cache", trtllm_arguments),
            }[request.param]
            given = {"q_len_per_req": 3, "mask": mask, "window_left": window_left}
            getattr(flashinfer, name)(**made(memory, 12, **given, **changes))
        return sent(standin)

    return call


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("rows", ALIKE)
def test_a_mask_whose_tokens_see_one_more_each_goes_as_it_is(
    decode: Decode, memory: MadeUpMemory, rows: tuple[int, ...], dtype: str
) -> None:
    for _ in range(2):  # a mask is read in every call, as what it holds may change
        seen = decode(rows, 100, dtype)
        assert (seen["mask"], seen["window_left"]) == (memory.reads[-1], 100)
    assert len(memory.reads) == 2


@pytest.mark.parametrize(("rows", "words"), UNLIKE)
def test_a_mask_that_moves_windows_is_refused(
    decode: Decode, standin: StandIn, rows: tuple[int, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=f"^mask: query {words}.* with (window_left=100|sliding_win_size=101)"):
        decode(rows, 100)
    assert "cuLaunchKernelEx" not in standin.names()


@pytest.mark.parametrize("window_left", [-1, 1 << 20])
def test_a_mask_beside_a_window_that_hides_no_key_is_not_read(
    decode: Decode, memory: MadeUpMemory, window_left: int
) -> None:
    assert decode(FULL, window_left)["mask"] != 0
    assert memory.reads == []


def test_a_longer_bound_has_the_mask_read(standin: StandIn, memory: MadeUpMemory) -> None:
    mask = memory.tensor("uint32", 4, 3, 1, values=FULL * 4)
    given = xqa_batch_arguments(memory, 12, q_len_per_req=3, mask=mask, window_left=900)
    flashinfer.xqa_batch_decode_with_kv_cache(**{**given, "max_seq_len": 901})
    with pytest.raises(UsageError, match=r"^mask: query token 0 "):
        flashinfer.xqa_batch_decode_with_kv_cache(**{**given, "max_seq_len": 902})


def test_a_mask_cannot_be_read_while_a_stream_captures(
    decode: Decode, hopper: Runtime, memory: MadeUpMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper.driver, "is_capturing", lambda _: True)
    with pytest.raises(UsageError, match=r"^mask: given with .* while a stream captures, expected None"):
        decode(CAUSAL, 100)
    assert memory.reads == []


def test_a_mask_that_no_framework_reads_is_refused(memory: MadeUpMemory) -> None:
    mask = memory.tensor("uint32", 4, 3, 1)
    given = xqa_batch_arguments(memory, 12, q_len_per_req=3, mask=mask, window_left=100)
    with pytest.raises(UsageError, match=r"^mask: cannot be read with window_left=100, expected None"):
        flashinfer.xqa_batch_decode_with_kv_cache(**given)


@pytest.mark.parametrize(("rows", "fits"), [((1, 1, 3, 7, 1, 3), True), ((1, 1, 3, 7, 3, 3), False)])
def test_ragged_drafts_count_by_request(
    standin: StandIn, memory: MadeUpMemory, rows: tuple[int, ...], fits: bool
) -> None:
    starts = memory.tensor("int32", 5, values=(0, 1, 4, 4, 6))
    mask = memory.tensor("uint32", 6, 1, values=rows)
    given = xqa_batch_arguments(
        memory, 6, q_cu_seq_lens=starts, q_len_per_req=3, mask=mask, window_left=100, max_seq_len=1000
    )
    if fits:
        flashinfer.xqa_batch_decode_with_kv_cache(**given)
        assert sent(standin)["mask"] == mask.pointer
    else:
        with pytest.raises(UsageError, match=r"^mask: query token 0 of request 3 sees 2 "):
            flashinfer.xqa_batch_decode_with_kv_cache(**given)


def attended(rows: tuple[int, ...], window: int) -> tuple[Any, Any]:
    """Three drafts of one request by native kernels' reference, and by FlashInfer's rule, which counts by place."""
    rng = np.random.default_rng(0)
    length, tokens = 21, len(rows)
    q, keys, values = rng.standard_normal((tokens, 1, 8)), *rng.standard_normal((2, 32, 8))
    native, _ = paged_decode_reference(
        q,
        keys.reshape(2, 16, 1, 8),
        values.reshape(2, 16, 1, 8),
        np.array([[0, 1]]),
        np.array([length]),
        1.0,
        q_cu_seq_lens=np.array([0, tokens]),
        mask=np.array(rows, dtype=np.uint32),
        window_left=window,
    )
    place, key = np.arange(tokens)[:, None], np.arange(length)
    draft = key - (length - tokens)
    seen = (draft < 0) | (np.array(rows)[:, None] >> np.maximum(draft, 0) & 1 == 1)
    seen &= key >= length - tokens + place - window
    weights = np.exp(q[:, 0] @ keys[:length].T) * seen
    return native[:, 0], weights @ values[:length] / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("window", [1, 2, 5, 30])
@pytest.mark.parametrize("rows", ALIKE)
def test_what_goes_as_it_is_attends_as_in_flashinfer(rows: tuple[int, ...], window: int) -> None:
    native, wanted = attended(rows, window)
    assert np.allclose(native, wanted)


@pytest.mark.parametrize("rows", [FULL, TREE])
def test_what_is_refused_would_attend_to_other_keys(rows: tuple[int, ...]) -> None:
    native, wanted = attended(rows, 5)
    assert not np.allclose(native, wanted)
