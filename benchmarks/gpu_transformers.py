"""transformers' models on our attention beside sdpa, eager and FlashAttention-3: steps and continuous batching.

Run: ``python benchmarks/gpu_transformers.py --out DIR`` on a machine with a Hopper GPU and transformers 5. It ends
``--seconds`` after its imports at the latest, and writes ``transformers.json`` after each case. A model has the layers
of a known model, a few of them, random weights and a small vocabulary; all implementations run one model in one
process, and take turns in each round. Ratios are medians over rounds, above 1 where ours is faster. A step is timed as
transformers runs it (``us``); a new token in a static cache also as a replayed CUDA graph (``graph_us``), without the
host; a dynamic cache grows by a token at each step. ``host_us_per_layer`` is the time that the host spends in the
attention function of one layer, the mean of all layers. The past is random keys. ``sdpa flash`` and ``sdpa cuDNN`` are
sdpa with one of torch's backends, which needs no further package; FlashAttention-3 is flash-attn-3, or that of a vLLM
wheel (``model_steps/flash_attention_3.py``). An implementation that is not installed or not able gives its error.
Continuous batching runs with transformers' block table, which flash-attention alone gets, and without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # FlashAttention that is not installed is not looked for on the network

import torch
from model_steps import flash_attention_3
from model_steps.steps import SHAPES, SMALL_STEPS, STEPS, Step, model_of, step_of
from row_origin import origin_of_launches
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, default_runtime, set_default_runtime
from cubin_runtime.integrations.transformers import register
from cubin_runtime.launch.accelerator import accelerator

SCHEMA = 3
ROUNDS, ROUND_SECONDS, MOST_CALLS = 5, 0.1, 20  # without a GPU: one round of one call
FIRST_STEPS = 5  # so many steps before continuous batching, the others behind it
MOST_DIFFERENCE = 0.1  # of the largest logit, from sdpa's, beyond which a step is not timed
LAST_CASE_SECONDS = 20.0  # no case begins so shortly before the end
# Peers: the implementation's name for transformers, and the only backend that sdpa may take.
PEERS: dict[str, tuple[str, SDPBackend | None]] = {
    "sdpa": ("sdpa", None),
    "sdpa flash": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "sdpa cuDNN": ("sdpa", SDPBackend.CUDNN_ATTENTION),
    "eager": ("eager", None),
    "flash_attention_3": ("flash_attention_3", None),
}

# Options of continuous batching beside the common ones, and the peers: without a block table all get the same inputs.
BATCHING: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    ({}, ("sdpa", "flash_attention_3")),
    ({"max_blocks_per_request": 0}, ("flash_attention_3",)),
)


@contextmanager
def running(model: Any, name: str) -> Iterator[None]:
    """The model on the attention of a peer, or of an implementation with that name."""
    implementation, backend = PEERS.get(name, (name, None))
    model.set_attn_implementation(implementation)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        yield


def timed_us(call: Callable[[], Any], device: str) -> float:
    """Microseconds of a call, of as many calls as fit a round, after a first one."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(calls: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - begin) / calls

    first = seconds(1)
    return 1e6 * (first if device == "cpu" else seconds(min(MOST_CALLS, max(1, int(ROUND_SECONDS / first)))))


def host_us_per_layer(implementation: str, call: Callable[[], Any], device: str) -> float:
    """Microseconds of the host in one layer's attention function: the median over a few calls of the layers' mean."""
    inner, means = ALL_ATTENTION_FUNCTIONS[implementation], list[float]()
    spent: list[float] = []

    def timed(*positional: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        result = inner(*positional, **named)
        spent.append(time.perf_counter() - begin)
        return result

    AttentionInterface.register(implementation, timed)
    try:
        for _ in range(1 if device == "cpu" else 10):
            if device == "cuda":
                torch.cuda.synchronize()  # so that no launch waits for room in the queue
            spent.clear()
            call()
            means.append(statistics.mean(spent))
    finally:
        AttentionInterface.register(implementation, inner)
    return 1e6 * statistics.median(means)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def outcome(measure: Callable[[], Any]) -> Any:
    """What was measured, or the error of an implementation that is not there or not able."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else type(error).__name__


def prepared(model: Any, step: Step, name: str, device: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """The last logits of a step, and the ways to run it again: a call for each figure, or an error."""
    with running(model, name):
        call = step_of(model, step)
        logits = call().float()
        ways: dict[str, Any] = {"us": call}
        # Of prompts, transformers captures other masks than it runs.
        if device == "cuda" and step.cache == "static" and step.tokens == 1:
            ways["graph_us"] = outcome(lambda: captured(call))
    return logits, ways


def step_row(model: Any, name: str, step: Step, names: tuple[str, ...], device: str) -> dict[str, Any]:
    """The step of each implementation; the first is ours."""
    found = {each: outcome(partial(prepared, model, step, each, device)) for each in names}
    for each, result in found.items():
        if isinstance(result, tuple) and isinstance(found["sdpa"], tuple):
            logits = found["sdpa"][0]
            difference = float((result[0] - logits).abs().max() / logits.abs().max())
            if not difference <= MOST_DIFFERENCE:
                found[each] = f"wrong: logits differ from sdpa's by {difference:.2f} of the largest"
    able = {each: result for each, result in found.items() if isinstance(result, tuple)}
    rounds: dict[str, dict[str, list[float]]] = {each: {} for each in able}
    for _, (each, (_, ways)) in product(range(1 if device == "cpu" else ROUNDS), able.items()):
        with running(model, each):
            for figure, call in ways.items():
                if callable(call):
                    rounds[each].setdefault(figure, []).append(timed_us(call, device))
    row: dict[str, Any] = {"model": name, "layers": model.config.num_hidden_layers, **asdict(step)}
    if names[0] in able and len(able) > 1:
        ours, peer = [logits for logits, _ in able.values()][:2]
        row["largest_difference"] = float((ours - peer).abs().max() / peer.abs().max())
    row["times"] = {
        each: result if each not in able else _times(rounds[each], result[1]) for each, result in found.items()
    }
    row["host_us_per_layer"] = _host_times(model, able, device)
    return row | {"ratios": _ratios(rounds, names[0])} | _origin(model, names[0], able, device)


def _host_times(model: Any, able: dict[str, Any], device: str) -> dict[str, float]:
    times = {}
    for each, (_, ways) in able.items():
        implementation, backend = PEERS.get(each, (each, None))
        if backend is None and implementation in ALL_ATTENTION_FUNCTIONS:  # eager is in no table
            with running(model, each):
                times[each] = host_us_per_layer(implementation, ways["us"], device)
    return times


def _origin(model: Any, ours: str, able: dict[str, Any], device: str) -> dict[str, Any]:
    """The cubins that our implementation launches in the step."""
    if device == "cpu" or ours not in able:
        return {}
    with running(model, ours):
        for _ in range(2):  # the driver keeps 16 launches, and a step of 8 layers has 8 at least
            able[ours][1]["us"]()
    return origin_of_launches(default_runtime().driver)


def _times(rounds: dict[str, list[float]], ways: dict[str, Any]) -> dict[str, Any]:
    return {figure: statistics.median(rounds[figure]) if figure in rounds else error for figure, error in ways.items()}


def _ratios(rounds: dict[str, dict[str, list[float]]], ours: str) -> dict[str, dict[str, float]]:
    """The median over rounds of a peer's time by ours."""
    own = rounds.get(ours, {})
    return {
        peer: {
            figure: statistics.median(theirs / mine for theirs, mine in zip(times, own[figure], strict=True))
            for figure, times in found.items()
            if figure in own
        }
        for peer, found in rounds.items()
        if peer != ours
    }


def free_memory() -> None:
    """Give back to the device what torch keeps: transformers sizes a cache by what the device has free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def timed_inputs(seconds: list[float]) -> Iterator[None]:
    """Meanwhile, what transformers' host takes to write the inputs of each step goes into ``seconds``."""
    inner = ContinuousBatchingIOs.prepare_batch_tensors

    def timed(*positional: Any, **named: Any) -> None:
        begin = time.perf_counter()
        inner(*positional, **named)
        seconds.append(time.perf_counter() - begin)

    ContinuousBatchingIOs.prepare_batch_tensors = timed
    try:
        yield
    finally:
        ContinuousBatchingIOs.prepare_batch_tensors = inner


def batching_row(
    model: Any, name: str, names: tuple[str, ...], small: bool, options: dict[str, int] | None = None
) -> dict[str, Any]:
    """``generate_batch`` of ragged requests, with further options of transformers: tokens made per second.

    ``inputs_ms`` is what transformers takes to write the inputs of a step, beside the model on the same host.
    """
    generator = torch.Generator().manual_seed(2)
    count, longest, new = (4, 40, 8) if small else (64, 2048, 32)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    requests = [torch.randint(1, 1024, (length,), generator=generator).tolist() for length in lengths]
    blocks = {"block_size": 16 if small else 256, "num_blocks": 64 if small else 640}
    batching = {**blocks, "max_batch_tokens": 64 if small else 4096, "use_cuda_graph": False}
    batching |= options or {}
    inputs: dict[str, list[float]] = {each: [] for each in names}

    def run(implementation: str) -> float:
        model.set_attn_implementation(f"paged|{implementation}")
        generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        free_memory()
        begin = time.perf_counter()
        with timed_inputs(inputs[implementation]):
            results = model.generate_batch(
                requests,
                generation_config=generation,
                continuous_batching_config=ContinuousBatchingConfig(**batching),
                progress_bar=False,
            )
        made = sum(len(result.generated_tokens) for result in results.values())
        if made != count * new:
            raise RuntimeError(f"{made} tokens, expected {count * new}")
        return made / (time.perf_counter() - begin)

    # The first run of each loads kernels; then they take turns.
    found: dict[str, Any] = {each: outcome(lambda each=each: [run(each)][1:]) for each in names}
    for _, each in product(range(1 if small else ROUNDS), names):
        if isinstance(found[each], list):
            more = outcome(lambda each=each: [run(each)])
            found[each] = found[each] + more if isinstance(more, list) else more
    speeds = {each: statistics.median(rates) if isinstance(rates, list) else rates for each, rates in found.items()}
    row = {"model": name, "requests": count, "longest_prompt": longest, "new": new, "options": options or {}}
    row["inputs_ms"] = {each: 1e3 * statistics.mean(spent) for each, spent in inputs.items() if spent}
    return row | {"tokens_per_s": speeds, "ratios": _speed_ratios(found, names[0])}


def _speed_ratios(found: dict[str, Any], ours: str) -> dict[str, float]:
    """The median over rounds of our speed by a peer's."""
    measured = {each: rates for each, rates in found.items() if isinstance(rates, list)}
    mine = measured.pop(ours, None)
    if mine is None:
        return {}
    return {
        each: statistics.median(own / their for own, their in zip(mine, rates, strict=True))
        for each, rates in measured.items()
    }


@torch.no_grad()
def measured(
    ours: str,
    device: str = "cuda",
    layers: int = 8,
    names: Iterable[str] = ("Llama 3 8B",),
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
    until: float = float("inf"),
) -> dict[str, Any]:
    """Both measurements; small ones, without a GPU, where ``device`` is "cpu".

    ``keep`` gets everything so far after each case; what does not begin before ``until`` is listed as not measured.
    """
    small = device == "cpu"
    report: dict[str, Any] = {"ours": ours, "steps": [], "continuous_batching": [], "not_measured": []}
    for name in names:
        model = model_of(name, layers, device, small)
        cases: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
            ("steps", str(step), partial(step_row, model, name, step, (ours, *PEERS), device))
            for step in (SMALL_STEPS if small else STEPS)
        ]
        cases[FIRST_STEPS:FIRST_STEPS] = [
            (
                "continuous_batching",
                f"continuous batching, {options}" if options else "continuous batching",
                partial(batching_row, model, name, (ours, *peers), small, options),
            )
            for options, peers in BATCHING
        ]
        for kind, label, case in cases:
            if time.monotonic() > until:
                report["not_measured"].append(f"{name}: {label}")
                continue
            free_memory()
            report[kind].append(case())
            print(json.dumps(report[kind][-1]), flush=True)
            keep(report)
    keep(report)
    return report


def main() -> None:
    """Measure and write ``transformers.json``."""
    from gpu_environment import built_sources, gpu_environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["Llama 3 8B"], help="one model (%(default)s)")
    parser.add_argument("--seconds", type=int, default=180, help="after these the process ends (%(default)s)")
    given = parser.parse_args()
    signal.alarm(given.seconds)
    until = time.monotonic() + given.seconds - LAST_CASE_SECONDS
    given.out.mkdir(parents=True, exist_ok=True)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", given.out / "store"))
    set_default_runtime(Runtime(Config(store=store, sources=built_sources(), offline=True)))
    head: dict[str, Any] = {"flash_attention_3": flash_attention_3.install()}
    head |= {
        "accelerator": accelerator() is not None,
        "schema": SCHEMA,
        "question": "transformers' models",
        "environment": gpu_environment(),
        "rounds": ROUNDS,
    }
    target = given.out / "transformers.json"

    def keep(report: dict[str, Any]) -> None:
        part = target.with_suffix(".part")
        part.write_text(json.dumps(head | report, indent=1) + "\n")
        part.replace(target)

    measured(register(), layers=given.layers, names=given.models, keep=keep, until=until)
    print(target)


if __name__ == "__main__":
    main()
