"""Operators under torch: ops, compiled and exported modules, graph trees, grad, streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, mla_decode, paged_decode
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu
BOUND = 256


@pytest.fixture(autouse=True)
def _default(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)


class Tensors:
    """Two requests over four pages each, as every operator here takes them."""

    def __init__(self) -> None:
        on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.q, self.out = torch.randn(2, 32, 128, **on), torch.empty(2, 32, 128, **on)
        self.k, self.v = torch.randn(8, 64, 4, 128, **on), torch.randn(8, 64, 4, 128, **on)
        self.table = torch.randperm(8, device="cuda").to(torch.int32).view(2, 4)
        self.lens = torch.tensor([200, 17], device="cuda", dtype=torch.int32)
        self.lq, self.latent = torch.randn(2, 16, 576, **on), torch.randn(8, 64, 576, **on)
        self.buffer = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")


@pytest.fixture
def t() -> Tensors:
    return Tensors()


CALLS: dict[str, Callable[[Tensors, Any], Any]] = {
    "paged_decode": lambda t, q: paged_decode(q, t.k, t.v, t.table, t.lens, max_seq_len=BOUND),
    "paged_decode, scale on the device": lambda t, q: paged_decode(
        q, t.k, t.v, t.table, t.lens, max_seq_len=BOUND, softmax_scale=torch.full((1,), 0.1, device="cuda")
    ),
    "mla_decode": lambda t, q: mla_decode(t.lq, t.latent, t.table, t.lens, max_seq_len=BOUND, softmax_scale=0.1),
    "xqa_batch": lambda t, q: flashinfer.xqa_batch_decode_with_kv_cache(
        q, (t.k, t.v), t.buffer, t.table, t.lens, BOUND, bmm1_scale=0.1
    ),
    "trtllm_batch, with its LSE": lambda t, q: flashinfer.trtllm_batch_decode_with_kv_cache(
        q, (t.k, t.v), t.buffer, t.table, t.lens, BOUND, bmm1_scale=0.1, kv_layout="NHD", return_lse=True
    ),
    "trtllm_batch_mla": lambda t, q: flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        t.lq.unsqueeze(1), t.latent, t.buffer, 512, 512, 64, t.table, t.lens, BOUND, bmm1_scale=0.1
    ),
}


def parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", list(CALLS))
def test_a_compiled_call_gives_the_bits_of_eager(t: Tensors, name: str) -> None:
    call = CALLS[name]
    compiled = torch.compile(lambda q: call(t, q), fullgraph=True)
    for _ in range(3):
        t.q.normal_()
        for got, wanted in zip(parts(compiled(t.q)), parts(call(t, t.q)), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["paged_decode", "mla_decode", "xqa_batch"])
def test_graph_trees_record_again_and_follow_lengths(t: Tensors, name: str) -> None:
    call = CALLS[name]
    compiled = torch.compile(lambda q: call(t, q), fullgraph=True, mode="reduce-overhead")
    for length in (200, 3, 256, 65, 1):
        t.lens.fill_(length)
        got = compiled(t.q).clone()
        assert torch.equal(got, call(t, t.q)), length


def test_a_module_compiles_and_exports_with_the_op_in_it(t: Tensors) -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
            return paged_decode(x * 2, k, v, table, lens, max_seq_len=BOUND) + 1

    given = (t.q, t.k, t.v, t.table, t.lens)
    exported = torch.export.export(Attention(), given)
    assert "cubin_runtime.paged_decode" in str(exported.graph)
    assert torch.equal(exported.module()(*given), Attention()(*given))


def op_arguments(t: Tensors) -> dict[str, dict[str, Any]]:
    shared = {"page_table": t.table, "seq_lens": t.lens, "max_seq_len": BOUND, "softmax_scale": 0.1}
    ranks = {"cp_world": 1, "cp_rank": 0, "cp_interleave": 1}
    decode = {**shared, **ranks, "batch_invariant": False, "backend": "auto", "enable_pdl": False}
    layout = {"kv_layout": "NHD", "window_left": -1, "draft_position": "depth"}
    out = torch.empty(2, 16, 512, device="cuda", dtype=torch.bfloat16)
    return {
        "paged_decode": {**decode, **layout, "q": t.q, "k_cache": t.k, "v_cache": t.v, "out": t.out},
        "mla_decode": {**decode, "q": t.lq, "kv_cache": t.latent, "out": out},
    }


@pytest.mark.parametrize("name", ["paged_decode", "mla_decode"])
def test_torch_finds_nothing_wrong_with_the_op(t: Tensors, name: str) -> None:
    paged_decode(t.q, t.k, t.v, t.table, t.lens, max_seq_len=BOUND)  # ops are defined at the first call
    op, given = getattr(torch.ops.cubin_runtime, name).default, op_arguments(t)[name]
    assert given.keys() <= {argument.name for argument in op._schema.arguments}
    torch.library.opcheck(op, tuple(given.get(argument.name) for argument in op._schema.arguments))


def test_torch_finds_nothing_wrong_with_the_op_of_flashinfer_s_name(t: Tensors) -> None:
    flashinfer.xqa_batch_decode_with_kv_cache(t.q, (t.k, t.v), t.buffer, t.table, t.lens, BOUND)
    given = (t.q, [t.k, t.v], t.table, t.lens, BOUND, 0.1, None, 1.0, None, -1, t.out, None, "NHD", None, 1, 1.0)
    op = torch.ops.cubin_runtime.flashinfer_xqa_batch_decode_with_kv_cache.default
    torch.library.opcheck(op, (*given, None, None, False))


def test_fake_tensors_go_through_the_op(t: Tensors) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (t.q, t.k, t.v, t.table, t.lens)]
        assert paged_decode(*fake, max_seq_len=BOUND).shape == t.q.shape


def test_grad_is_refused_by_name_and_inference_works(t: Tensors) -> None:
    t.q.requires_grad_()
    for _ in range(2):
        with pytest.raises(UsageError, match="q: requires grad"):
            paged_decode(t.q, t.k, t.v, t.table, t.lens, max_seq_len=BOUND)
        with torch.no_grad():
            paged_decode(t.q, t.k, t.v, t.table, t.lens, max_seq_len=BOUND)
    with torch.inference_mode():
        wanted = paged_decode(t.q, t.k, t.v, t.table, t.lens, max_seq_len=BOUND)
        assert torch.equal(paged_decode(t.q + 0, t.k, t.v, t.table, t.lens, max_seq_len=BOUND), wanted)


def test_batched_tensors_are_refused_by_name(t: Tensors) -> None:
    with pytest.raises(RuntimeError, match="Batching rule not implemented for cubin_runtime::paged_decode"):
        torch.vmap(lambda q: paged_decode(q, t.k, t.v, t.table, t.lens, max_seq_len=BOUND))(t.q.unsqueeze(0))


def test_memory_used_on_another_stream_is_not_given_away(t: Tensors) -> None:
    """Freed tensors would come back at once, and what is allocated next would be written while the decode reads."""
    side, shown = torch.cuda.Stream(), 0
    for _ in range(20):
        q = torch.randn_like(t.q)
        address = q.data_ptr()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(500_000_000)  # longer than all that follows, but on a busy host
        out = paged_decode(q, t.k, t.v, t.table, t.lens, max_seq_len=BOUND, stream=side)
        made = out.data_ptr()
        del q, out
        given = {torch.empty_like(t.q).data_ptr() for _ in range(4)}
        shown += not side.query()
        assert side.query() or not {address, made} & given
        torch.cuda.synchronize()
        if shown == 3:
            return
    pytest.fail("the decode was always over before memory was asked for")
