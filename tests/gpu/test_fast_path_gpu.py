"""Calls like earlier ones: what changed in place is refused, threads do not mix, bound steps and graphs."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.attention import (
    Runtime,
    context_attention,
    mla_decode,
    paged_decode,
    plan_context_attention,
    plan_mla_decode,
    plan_paged_decode,
)
from cubin_runtime.errors import UsageError

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu
LAUNCHES = int(os.environ.get("CUBIN_RUNTIME_LAUNCHES", "20000"))


def tensors(batch: int = 4, length: int = 200, device: str = "cuda") -> dict[str, Any]:
    on: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    return {
        "q": torch.randn(batch, 32, 128, **on),
        "k_cache": torch.randn(4 * batch, 64, 4, 128, **on),
        "v_cache": torch.randn(4 * batch, 64, 4, 128, **on),
        "page_table": torch.randperm(4 * batch, device=device).to(torch.int32).view(batch, 4),
        "seq_lens": torch.full((batch,), length, device=device, dtype=torch.int32),
        "out": torch.empty(batch, 32, 128, **on),
    }


def shorten(t: Any) -> None:
    t.data = t.data[:2]


def reinterpret(t: Any) -> None:
    t.data = t.data.view(torch.float16)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data shortened": shorten,
    "data of another dtype": reinterpret,
    "transposed": lambda t: t.transpose_(0, 1),
    "resized": lambda t: t.resize_(2, 32, 128),
    "strides set": lambda t: t.as_strided_((4, 32, 128), (4096, 64, 1)),
}


@pytest.mark.parametrize("face", ["plan", "bound step"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_what_changed_in_place_is_refused(runtime: Runtime, change: str, face: str) -> None:
    given = tensors()
    plan = plan_paged_decode(**given, max_seq_len=256, runtime=runtime)
    layer = plan.bind(k_cache=given["k_cache"], v_cache=given["v_cache"])
    moving = {name: value for name, value in given.items() if name not in ("k_cache", "v_cache")}
    send: Callable[[], Any] = {
        "plan": lambda: plan.run(**given),
        "bound step": lambda: layer.step(**moving),
    }[face]
    for _ in range(3):
        send()
    CHANGES[change](given["q"])
    for _ in range(2):
        with pytest.raises(UsageError, match="q"):
            send()


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_changed_in_place_is_not_taken_for_what_it_was(runtime: Runtime, change: str) -> None:
    """A function plans for the new form: it then refuses the call, or does what a fresh call does."""
    given = tensors()
    for _ in range(3):
        paged_decode(**given, max_seq_len=256, runtime=runtime)
    CHANGES[change](given["q"])
    try:
        got = paged_decode(**given, max_seq_len=256, runtime=runtime).clone()
    except UsageError:
        return
    q = given["q"].contiguous()
    assert torch.equal(got, paged_decode(**{**given, "q": q}, max_seq_len=256, runtime=runtime))


@pytest.mark.parametrize("operator", ["paged_decode", "context_attention", "mla_decode"])
def test_calls_of_many_sizes_give_the_bits_of_plans_of_their_own(runtime: Runtime, operator: str) -> None:
    """They share plans and workspaces, also on two streams in turns."""
    chance = random.Random(3)
    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    pool, streams = 600, [torch.cuda.current_stream(), torch.cuda.Stream()]
    caches = torch.randn(2, pool, 64, 8, 128, **on) if operator != "mla_decode" else torch.randn(pool, 64, 576, **on)
    for number in range(120):
        batch = chance.choice((1, 2, 3, 5, 8, 17, 40, 130))
        own = {
            "page_table": torch.randint(0, pool, (batch, 64), device="cuda", dtype=torch.int32),
            "seq_lens": torch.randint(1, 64 * 64, (batch,), device="cuda", dtype=torch.int32),
        }
        if operator == "mla_decode":
            tensors_of = {"q": torch.randn(batch, 16, 576, **on), "kv_cache": caches, **own}
            sizes: dict[str, Any] = {"softmax_scale": 0.1}
            out, plan_of, call = torch.empty(batch, 16, 512, **on), plan_mla_decode, mla_decode
        elif operator == "paged_decode":
            tensors_of = {"q": torch.randn(batch, 32, 128, **on), "k_cache": caches[0], "v_cache": caches[1], **own}
            sizes, out, plan_of, call = {}, torch.empty(batch, 32, 128, **on), plan_paged_decode, paged_decode
        else:
            counts = torch.randint(1, chance.choice((2, 30, 300)), (batch,))
            own["seq_lens"] = own["seq_lens"].maximum(counts.to("cuda", torch.int32))
            sums = torch.cat((torch.zeros(1), counts.cumsum(0))).to("cuda", torch.int32)
            rows = int(counts.sum())
            tensors_of = {"q": torch.randn(rows, 32, 128, **on), "k": caches[0], "v": caches[1], **own}
            tensors_of["q_cu_seq_lens"] = sums
            sizes, out = {"max_q_len": int(counts.max())}, torch.empty(rows, 32, 128, **on)
            plan_of, call = plan_context_attention, context_attention
        planned = plan_of(**tensors_of, out=out, max_seq_len=4096, runtime=runtime, **sizes)
        planned.run(**tensors_of, out=out)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[number % 2]):
            came = call(**tensors_of, max_seq_len=4096, runtime=runtime, **sizes)
        torch.cuda.synchronize()
        assert torch.equal(came, out), (number, batch)
    assert len(runtime.plans._plans) < 40


def test_a_bound_step_gives_the_bits_of_a_run(runtime: Runtime) -> None:
    given = tensors()
    plan = plan_paged_decode(**given, max_seq_len=256, runtime=runtime)
    others = [tensors() for _ in range(3)]
    for stream in (None, torch.cuda.Stream()):
        with plan.bind(k_cache=given["k_cache"], v_cache=given["v_cache"], stream=stream) as layer:
            for other in others * 2:
                layer.step(other["q"], given["page_table"], given["seq_lens"], other["out"])
                torch.cuda.synchronize()
                plan.run(**{**given, "q": other["q"]})
                torch.cuda.synchronize()
                assert torch.equal(other["out"], given["out"])
        with pytest.raises(UsageError, match="closed"):
            layer.step(given["q"], given["page_table"], given["seq_lens"], given["out"])


@pytest.mark.parametrize("bound", ["nothing", "caches", "everything"])
def test_captured_steps_follow_lengths(runtime: Runtime, bound: str) -> None:
    given = tensors()
    plan = plan_paged_decode(**given, max_seq_len=256, runtime=runtime)
    stream = torch.cuda.Stream()
    names = {"nothing": (), "caches": ("k_cache", "v_cache"), "everything": tuple(given)}[bound]
    step = plan.bind(**{name: given[name] for name in names}, stream=stream)
    moving = {name: value for name, value in given.items() if name not in names}
    with torch.cuda.stream(stream):
        for _ in range(2):
            step.step(**moving)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step.step(**moving)
    for length in (1, 64, 256):
        given["seq_lens"].fill_(length)
        given["out"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = given["out"].clone()
        plan.run(**given)
        torch.cuda.synchronize()
        assert torch.equal(replayed, given["out"])


@pytest.mark.parametrize("warm_stream", [False, True])
def test_free_functions_are_captured_on_any_stream(runtime: Runtime, warm_stream: bool) -> None:
    """Each of two graphs has scratch of its own, whether the stream of the capture was used before or not."""
    given = tensors(2) | {"batch_invariant": True}  # whose parts lie in scratch
    stream = torch.cuda.Stream()
    given.pop("out")
    with torch.cuda.stream(stream) if warm_stream else contextlib.nullcontext():
        wanted = paged_decode(**given, max_seq_len=256, runtime=runtime).clone()
        torch.cuda.synchronize()
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph, stream=stream if warm_stream else None):
            outs.append(paged_decode(**given, max_seq_len=256, runtime=runtime))
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, on in zip(graphs, (torch.cuda.Stream(), torch.cuda.Stream()), strict=True):
            with torch.cuda.stream(on):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out in outs)


def test_threads_do_not_mix_their_launches(runtime: Runtime) -> None:
    """Eight threads over four streams with random shapes; sampled results are compared, and memory stays flat."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    shapes = [tensors(batch, length) for batch in (1, 2, 3, 5, 8) for length in (1, 200)]
    wanted = [paged_decode(**given, max_seq_len=256, runtime=runtime).clone() for given in shapes]
    plans = [plan_paged_decode(**given, max_seq_len=256, runtime=runtime) for given in shapes]
    failures: list[str] = []

    def work(seed: int) -> None:
        try:
            launch(seed)
        except Exception as error:
            failures.append(f"thread {seed}: {error!r}")

    def launch(seed: int) -> None:
        rng = random.Random(seed)
        own = [torch.empty_like(given["out"]) for given in shapes]
        stream = streams[seed % 4]
        with torch.cuda.stream(stream):
            for number in range(LAUNCHES // 8):
                index = rng.randrange(len(shapes))
                given = {**shapes[index], "out": own[index]}
                if number % 97:
                    plans[index].run(**given) if number % 2 else paged_decode(**given, max_seq_len=256, runtime=runtime)
                    continue
                own[index].fill_(float("nan"))
                paged_decode(**given, max_seq_len=256, runtime=runtime)
                stream.synchronize()
                if not torch.equal(own[index], wanted[index]):
                    failures.append(f"thread {seed}, launch {number}, shape {index}")
                    return

    torch.cuda.synchronize()
    work(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), sum(len(plan._pool.held) for plan in plans)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert torch.cuda.memory_allocated() - before[0] < 16 << 20
    assert sum(len(plan._pool.held) for plan in plans) <= before[1] + 4 * len(plans)  # one for each stream at most
