"""A paged serving loop under load: thousands of requests at random arrivals, ours and FlashInfer's in turn.

Run: ``python benchmarks/gpu_serving.py --out DIR`` on a machine with a Hopper GPU and torch; with ``--peers`` and
flashinfer-python FlashInfer's wrappers are measured in the same run. Engines take turns, ``--rounds`` times. The model
is attention alone, and each next token follows from the bits of an output (``serving_loop.model``). Steps that only
decode are CUDA graphs by bucket of batch sizes; the others run chunks of prompts beside decodes. Throughput counts the
tokens that requests asked for; latencies are from the arrival to the first token, and from token to token. A sample of
requests is compared with float64, and the batch-invariant run with one of other arrivals, token by token.

Then speculative decoding: the same requests on a model with a head, one token per step and with trees of drafts, which
a drafter proposes that knows the right tokens and is right with a stated probability at each level.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from gpu_environment import built_sources, gpu_environment
from serving_loop.attention import Attention, FlashInfer, Ours
from serving_loop.engine import BUCKETS, MOST, PAGE, Engine, Served
from serving_loop.model import VOCABULARY, Model
from serving_loop.schedule import Request, Scheduler, requests_at_random
from serving_loop.speculation import LEVELS, NODES, KnownTokens, TreeEngine

from cubin_runtime import Config, Runtime, set_default_runtime

LAYERS = 2
LONGEST_PROMPT, MOST_WANTED = 4000, 64
LONGEST = 4096
PAGES = 4096
STEP_TOKENS = 2048
SAMPLED = 32
# Relative to the largest value of an output: bf16 outputs of layers that start from bf16 outputs.
MOST_ERROR = 0.03
RIGHT = 0.8  # of the drafter, at each level of a tree


def main() -> None:
    """Measure and write ``serving.json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--per-second", type=float, default=600.0, help="arrivals (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="FlashInfer's wrappers too")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    runtime = Runtime(Config(store=chosen.out / "store", sources=built_sources(), offline=True))
    set_default_runtime(runtime)
    model = Model.at_random(LAYERS)
    requests = drawn(chosen.requests, chosen.per_second)
    attentions: list[Attention] = [Ours(batch_invariant=False), Ours(batch_invariant=True)]
    if chosen.peers:
        attentions.append(FlashInfer(PAGES, PAGE, BUCKETS))
    engines = [
        Engine(model, attention, pages=PAGES, longest=LONGEST, most_made=MOST_WANTED) for attention in attentions
    ]
    for engine in engines:
        engine.capture()
        serve(engine, requests[: len(requests) // 10])  # what is loaded and planned once
    rounds: dict[str, list[dict[str, float]]] = {engine.attention.name: [] for engine in engines}
    last: dict[str, Served] = {}
    memory = []
    for _ in range(chosen.rounds):
        for engine in engines:
            last[engine.attention.name] = served = serve(engine, requests)
            rounds[engine.attention.name].append(figures(served))
        torch.cuda.synchronize()
        memory.append(torch.cuda.mem_get_info()[0])
    invariant = next(engine for engine in engines if engine.attention.name == "ours, batch invariant")
    shuffled = serve(invariant, drawn(chosen.requests, chosen.per_second, shuffle=1))
    wanted = last[invariant.attention.name].tokens
    differ = [number for number in wanted if not np.array_equal(wanted[number], shuffled.tokens[number])]
    speculation = speculate(requests, chosen.rounds)
    result = {
        "schema": 2,
        "question": "a paged serving loop under load",
        "environment": gpu_environment(),
        "load": {
            "requests": chosen.requests,
            "arrivals_per_second": chosen.per_second,
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "output_tokens": sum(request.wanted for request in requests),
            "layers": LAYERS,
            "step_tokens": STEP_TOKENS,
            "pages": PAGES,
            "page_size": PAGE,
        },
        "engines": {name: medians(of_rounds) for name, of_rounds in rounds.items()},
        "worst_relative_error": {name: error_of(model, requests, served) for name, served in last.items()},
        "other_arrivals": {"requests": len(wanted), "with_other_tokens": len(differ)},
        "free_bytes_after_each_round": memory,
        "speculation": speculation,
    }
    for name, found in {**result["engines"], **speculation["engines"]}.items():
        print(name, json.dumps(found))
    print(json.dumps({name: result[name] for name in ("worst_relative_error", "other_arrivals")}), memory)
    (chosen.out / "serving.json").write_text(json.dumps(result, indent=1) + "\n")
    errors = (result["worst_relative_error"], speculation["worst_relative_error"])
    worst = max(error for one in errors for error in one.values())
    if differ or worst > MOST_ERROR:
        raise SystemExit(f"{len(differ)} requests depend on their neighbours, largest relative error {worst}")


def drawn(count: int, per_second: float, shuffle: int | None = None) -> list[Request]:
    return requests_at_random(
        count, 0, per_second=per_second, vocabulary=VOCABULARY, longest=LONGEST_PROMPT, shuffle=shuffle
    )


def serve(engine: Engine, requests: list[Request]) -> Served:
    sizes = {"pages": PAGES, "page_size": PAGE, "slots": MOST, "step_tokens": STEP_TOKENS, "ahead": engine.ahead}
    scheduler = Scheduler.of(requests, **sizes)
    return engine.serve(scheduler, set(range(0, len(requests), max(1, len(requests) // SAMPLED))))


def speculate(requests: list[Request], rounds: int) -> dict[str, object]:
    """A token per step beside trees of drafts, in turn; the share of tokens that are equal in both."""
    model, sizes = (
        Model.at_random(LAYERS, with_head=True),
        {"pages": PAGES, "longest": LONGEST, "most_made": MOST_WANTED},
    )
    plain = Engine(model, Ours(batch_invariant=False), **sizes)
    plain.capture()
    known = serve(plain, requests).tokens
    drafter = KnownTokens(known, RIGHT, VOCABULARY, np.random.default_rng(0))
    trees = TreeEngine(model, Ours(batch_invariant=False), drafter, **sizes)
    trees.capture()
    serve(trees, requests[: len(requests) // 10])
    engines: dict[str, Engine] = {"a token per step": plain, f"trees of {NODES - 1} draft tokens": trees}
    of_rounds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    last: dict[str, Served] = {}
    for _ in range(rounds):
        for name, engine in engines.items():
            last[name] = serve(engine, requests)
            of_rounds[name].append(figures(last[name]))
    verified = last[f"trees of {NODES - 1} draft tokens"]
    wanted = [(known[one.number][: one.wanted], verified.tokens[one.number][: one.wanted]) for one in requests]
    return {
        "drafts": NODES - 1,
        "levels": LEVELS,
        "right_at_each_level": RIGHT,
        "tokens_per_request_and_step": round(verified.accepted / verified.verified, 3),
        "engines": {name: medians(found) for name, found in of_rounds.items()},
        "equal_tokens": round(float(np.mean(np.concatenate([one == other for one, other in wanted]))), 5),
        "worst_relative_error": {name: error_of(model, requests, served) for name, served in last.items()},
    }


def figures(served: Served) -> dict[str, float]:
    """Tokens per second, and percentiles of latencies in milliseconds."""
    first = [times[0] for times in served.token_times.values()]
    between = np.concatenate([np.diff(times) for times in served.token_times.values()])
    tokens = sum(map(len, served.token_times.values()))
    shown = {"tokens_per_second": tokens / served.seconds, "seconds": served.seconds}
    for name, seconds in (("first_token_ms", first), ("between_tokens_ms", between)):
        for percentile in (50, 90, 99):
            shown[f"{name}_p{percentile}"] = float(np.percentile(seconds, percentile)) * 1e3
    return shown | {"graph_steps": served.graph_steps, "mixed_steps": served.mixed_steps}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


def error_of(model: Model, requests: list[Request], served: Served) -> float:
    """The largest difference of a sampled request's last output from float64, over the output's largest value."""
    prompts = {request.number: request.prompt for request in requests}
    errors = []
    for number, out in served.outputs.items():
        # The last token follows from the output and is not one of its keys.
        tokens = np.concatenate([prompts[number], served.tokens[number][:-1]])
        expected = model.expected(torch.from_numpy(tokens).cuda())
        errors.append(float((out.double() - expected).abs().max() / expected.abs().max()))
    return max(errors)


if __name__ == "__main__":
    main()
