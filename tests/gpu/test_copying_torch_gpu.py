"""Append and merge on torch tensors, under FlashInfer's names too: eager, captured, compiled."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.attention import Runtime, append_kv, merge_states
from cubin_runtime.compat import flashinfer

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="torch is not installed")

TOKENS, HEADS, DIM, PAGE, COLUMNS = 37, 4, 128, 16, 5


@pytest.fixture(autouse=True)
def _default(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)


class Tensors:
    """Two requests: 30 new tokens behind 11 keys, 7 behind none."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        number: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
        self.key, self.value = (torch.randn(TOKENS, HEADS, DIM, **on) for _ in range(2))
        self.cache = torch.zeros(2 * COLUMNS, 2, PAGE, HEADS, DIM, **on)
        self.table = torch.randperm(2 * COLUMNS, device="cuda").to(torch.int32).view(2, COLUMNS)
        self.lens, self.offsets = torch.tensor([41, 7], **number), torch.tensor([0, 30, 37], **number)
        self.requests = torch.tensor([0] * 30 + [1] * 7, **number)
        self.positions = torch.tensor([*range(11, 41), *range(7)], **number)
        self.indptr, self.last = torch.tensor([0, COLUMNS, 2 * COLUMNS], **number), torch.tensor([9, 7], **number)

    def append(self) -> None:
        flashinfer.append_paged_kv_cache(
            self.key,
            self.value,
            self.requests,
            self.positions,
            self.cache,
            self.table.flatten(),
            self.indptr,
            self.last,
        )

    def append_by_offsets(self) -> None:
        k, v = self.cache[:, 0], self.cache[:, 1]
        append_kv(self.key, self.value, k, v, self.table, self.lens, q_cu_seq_lens=self.offsets)

    def check(self) -> None:
        torch.cuda.synchronize()
        expected = torch.zeros_like(self.cache)
        page = self.table[self.requests.long(), self.positions.long() // PAGE].long()
        for half, source in enumerate((self.key, self.value)):
            expected[page, half, self.positions.long() % PAGE] = source
        assert torch.equal(self.cache, expected)
        self.cache.zero_()


@pytest.fixture
def t() -> Tensors:
    return Tensors()


def test_appends_by_positions_and_by_offsets_are_the_same(t: Tensors) -> None:
    for _ in range(2):  # the second on the fast path
        t.append()
        t.check()
        t.append_by_offsets()
        t.check()


@pytest.mark.parametrize("warm", [False, True])
def test_an_append_is_captured_and_replayed(t: Tensors, warm: bool) -> None:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    t.append()  # which loads the kernel
    torch.cuda.synchronize()
    if warm:
        with torch.cuda.stream(stream):
            t.append()
        torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        t.append()
    t.cache.zero_()
    for _ in range(3):
        t.key.normal_()
        t.table.copy_(torch.randperm(2 * COLUMNS, device="cuda").view(2, COLUMNS))  # the flat table is a view of it
        graph.replay()
        t.check()


def test_e4m3_with_scales_saturates_as_torch_converts(t: Tensors) -> None:
    caches = [torch.zeros(2 * COLUMNS, PAGE, HEADS, DIM, device="cuda", dtype=torch.float8_e4m3fn) for _ in "kv"]
    scale = torch.full((1,), 0.5, device="cuda")
    append_kv(t.key, t.value, *caches, t.table, t.lens, q_cu_seq_lens=t.offsets, k_scale=0.25, v_scale=scale)
    page = t.table[t.requests.long(), t.positions.long() // PAGE].long()
    for source, cache, number in ((t.key, caches[0], 0.25), (t.value, caches[1], 0.5)):
        want = (source.float() / number).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(cache[page, t.positions.long() % PAGE].view(torch.uint8), want.view(torch.uint8))


def merged(v: Any, s: Any) -> tuple[Any, Any]:
    wide = s.double() * 0.6931471805599453
    return (torch.softmax(wide, 1)[..., None] * v.double()).sum(1), torch.logsumexp(wide, 1) / 0.6931471805599453


def test_states_merge_under_every_name() -> None:
    v = torch.randn(9, 2, HEADS, DIM, device="cuda", dtype=torch.float16)
    s = torch.randn(9, 2, HEADS, device="cuda") * 5
    want, want_lse = merged(v, s)
    first, first_s = v[:, 0].contiguous(), s[:, 0].contiguous()
    second, second_s = v[:, 1].contiguous(), s[:, 1].contiguous()
    results = [flashinfer.merge_states(v, s), flashinfer.merge_state(first, first_s, second, second_s)]
    mask = torch.tensor([True] * 8 + [False], device="cuda")
    in_place, in_place_s = first.clone(), first_s.clone()
    flashinfer.merge_state_in_place(in_place, in_place_s, second, second_s, mask)
    assert torch.equal(in_place[8], first[8])
    in_place[8], in_place_s[8] = results[0][0][8], results[0][1][8]
    for out, lse in (*results, (in_place, in_place_s)):
        torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0][0], results[1][0])


def test_a_compiled_merge_and_append_are_what_eager_ones_are(t: Tensors) -> None:
    v, s = torch.randn(9, 3, HEADS, DIM, device="cuda", dtype=torch.bfloat16), torch.randn(9, 3, HEADS, device="cuda")
    compiled = torch.compile(lambda v, s: merge_states(v, s) * 2, fullgraph=True)
    assert torch.equal(compiled(v, s), merge_states(v, s) * 2)
    torch.compile(t.append, fullgraph=True)()
    t.check()
