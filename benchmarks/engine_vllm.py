"""vLLM on our attention backend beside vLLM on FlashAttention-3: the same requests, in turns, on the same GPU.

Run by ``engine_run.sh`` on a machine with a Hopper GPU, with what ``tools/pack_engine.py`` packed on PYTHONPATH:
``python benchmarks/engine_vllm.py --out DIR --models DIR SECTION...``. Sections:

* ``tokens``: greedy tokens of four models with random weights, judged in float32; bits of requests in crowds.
* ``figures``: jobs of models of real shapes; engines take turns, ``--rounds`` times.
* ``readiness``: our part of the start; what 2,000 requests load and plan after 20.
* ``host``: host time of a step's attention.
* ``drafts``: jobs with drafters, and judged tokens.
* ``refusals``: what is refused at start, with its reason.
* ``states``: preemption, sleep and wake, chunk sizes.
* ``server``: time to the first token of streaming clients, first and later bursts after a start.
* ``ranks``: tensor parallelism over two GPUs.

The result, ``vllm.SECTION.json``, is written after every row.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.driver import OURS, PEER, Engine, Run, Server

# Job: prompts, new tokens.
JOBS: dict[str, tuple[list[int], int]] = {
    "1 x 4,000 + 256": ([4000], 256),
    "64 x 1,024 + 256": ([1024] * 64, 256),
    "16 x 7,000 + 128": ([7000] * 16, 128),
    "256 x 128 + 128": ([128] * 256, 128),
    "64 mixed, 50 to 3,650 + 128": ([50 + 3600 * (7 * n % 64) // 63 for n in range(64)], 128),
}
SHAPES = ("llama-shape", "gptoss-shape", "gemma3-shape", "qwen3moe-shape")
MODELS = ("llama", "gptoss", "gemma3", "qwen3moe")


def tokens(run: Run) -> None:
    """Judged tokens, model by model."""
    for model in run.names or MODELS:
        with ExitStack() as stack:
            engines = run.pair(stack, model)
            run.row(model=model, **run.both(engines), **run.judged(engines, model, model))


def figures(run: Run) -> None:
    """Jobs in turns."""
    for model in run.names or SHAPES:
        with ExitStack() as stack:
            engines = run.pair(stack, model)
            run.row(model=model, **run.both(engines))
            _jobs(run, engines, JOBS, model=model)
            # As many prompts as an engine's cache has room for, up to 64.
            count = min(64, run.cache_bytes // (131072 * 4300))
            _jobs(run, engines, {f"{count} x 4,096 + 128": ([4096] * count, 128)}, fresh=False, model=model)


def _jobs(
    run: Run, engines: list[Engine], jobs: dict[str, tuple[list[int], int]], fresh: bool = True, **named: Any
) -> None:
    """Jobs in turns, the last engine of a round first in the next; ``fresh``: with prompts that are not cached."""
    for name, (prompts, new) in jobs.items():
        for engine in engines:
            engine.ask("job", prompts=prompts, new=min(new, 8), seed=1)
        rounds: dict[str, list[Any]] = {engine.backend: [] for engine in engines}
        for number in range(run.rounds):
            seed = 2 + number if fresh else 1
            for engine in engines if number % 2 else engines[::-1]:
                rounds[engine.backend].append(engine.ask("job", prompts=prompts, new=new, seed=seed, fresh=fresh))
        run.row(**named, job=name, rounds=rounds, ratios=_ratios(rounds))


def _ratios(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """FlashAttention's best time over ours, for the whole job and for its decodes."""
    kinds = [kind for kind in ("whole", "decode") if all(kind in each for of in rounds.values() for each in of)]
    best = {kind: {backend: min(each[kind] for each in rounds[backend]) for backend in rounds} for kind in kinds}
    return {kind: round(times[PEER] / times[OURS], 4) for kind, times in best.items()}


def readiness(run: Run) -> None:
    """Our part of the start, and what later requests load, with the engine in its caller's process."""
    model = (run.names or ("llama",))[0]
    with ExitStack() as stack:
        engines = run.pair(stack, model, {"ENGINE_IN_PROCESS": "1"}, max_num_seqs=256)
        for engine in engines:
            engine.tell("mixed", requests=20, seed=1)
        first = {engine.backend: engine.answer() for engine in engines}
        frozen = engines[0].ask("freeze")
        later: dict[str, list[Any]] = {engine.backend: [] for engine in engines}
        for number in range(4):
            for engine in engines:
                engine.tell("mixed", requests=500, seed=2 + number, longest=900)
            for engine in engines:
                later[engine.backend].append(engine.answer())
        run.row(model=model, **run.both(engines), first_20=first, frozen=frozen, next_2000=later)


def host(run: Run) -> None:
    """Host time of the attention of a step that decodes, in turns, without graphs."""
    model = (run.names or ("llama-shape",))[0]
    with ExitStack() as stack:
        engines = run.pair(stack, model, {"ENGINE_IN_PROCESS": "1"}, enforce_eager=True)
        for requests in (1, 8, 64):
            rounds: dict[str, list[Any]] = {engine.backend: [] for engine in engines}
            for _ in range(1 + run.rounds):
                for engine in engines:
                    rounds[engine.backend].append(engine.ask("host", requests=requests, new=48, seed=5))
            run.row(model=model, requests=requests, rounds=rounds)


def drafters(run: Run) -> dict[str, dict[str, Any] | None]:
    """No drafter; n-grams, whose drafts differ in number; chains of EAGLE; and the model itself, whose drafts hold."""
    four = {"num_speculative_tokens": 4}
    return {
        "none": None,
        "n-gram": {**four, "method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "EAGLE": {**four, "method": "eagle", "model": str(run.models / "llama-eagle")},
        "the model": {**four, "method": "draft_model", "model": str(run.models / "llama")},
    }


def drafts(run: Run) -> None:
    """Jobs with drafts, in turns, and judged tokens."""
    jobs = {"1 x 512": [512], "16 x 512": [512] * 16, "64 x 1,024": [1024] * 64}
    for drafter, asked in drafters(run).items():
        more = {} if asked is None else {"speculative_config": asked}
        with ExitStack() as stack:
            try:
                engines = run.pair(stack, "llama", **more)
            except RuntimeError as error:
                run.row(drafter=drafter, error=str(error)[-700:])
                continue
            row = {"drafter": drafter, **run.both(engines), "graphs": {each.backend: each.graphs() for each in engines}}
            run.row(**row, **run.judged(engines, "llama", f"drafts.{drafter.replace(' ', '_')}"))
            for job, prompts in jobs.items():
                rounds: dict[str, list[Any]] = {engine.backend: [] for engine in engines}
                for number in range(1 + run.rounds):
                    for engine in engines if number % 2 else engines[::-1]:
                        rounds[engine.backend].append(engine.ask("drafts", prompts=prompts, new=128, seed=4))
                best = {backend: min(each["seconds"] for each in times[1:]) for backend, times in rounds.items()}
                run.row(drafter=drafter, job=job, best_seconds=best, ratio=round(best[PEER] / best[OURS], 4))


def refusals(run: Run) -> None:
    """What is refused at start: the line of the engine's log that says why."""
    options: dict[str, dict[str, Any]] = {
        "fp8 cache": {"kv_cache_dtype": "fp8"},
        "KV connector": {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
    }
    for name, more in options.items():
        with Engine(run.out, f"refused.{name.replace(' ', '_')}", run.options("llama", OURS, **more)) as engine:
            try:
                engine.wait()
                run.row(refused=name, line="it started")
            except RuntimeError:
                lines = [
                    line for line in engine.log.read_text().splitlines() if "not supported" in line or "Error" in line
                ]
                run.row(refused=name, lines=lines[:3])


def states(run: Run) -> None:
    """Preemption in a small cache, chunks of prompts, crowds of batch-invariant requests, sleep and wake."""
    model = (run.names or ("llama",))[0]
    with ExitStack() as stack:
        engines = run.pair(stack, model, kv_cache_memory_bytes=600_000_000)
        soaks = {engine.backend: [engine.ask("mixed", requests=300, seed=n) for n in range(6)] for engine in engines}
        run.row(model=model, state="a cache of 600 MB", soaks=soaks)
    for chunk in (512, 2048):
        with ExitStack() as stack:
            engines = run.pair(stack, model, max_num_batched_tokens=chunk)
            run.row(model=model, state=f"chunks of {chunk}", **run.judged(engines, model, f"{model}.{chunk}"))
    with ExitStack() as stack:
        engines = run.pair(stack, model, {"VLLM_BATCH_INVARIANT": "1"}, enforce_eager=True)
        crowds = {engine.backend: engine.ask("crowd", times=5) for engine in engines}
        run.row(model=model, state="batch invariance", crowds=crowds)
    with Engine(run.out, f"{model}.sleep", run.options(model, OURS, enable_sleep_mode=True)) as engine:
        engine.wait()
        run.row(model=model, state="sleep", answers=[engine.ask("sleep", level=level) for level in (1, 2)])


def server(run: Run) -> None:
    """Bursts of streaming clients; servers start in turns."""
    model = (run.names or ("llama",))[0]
    for number, backend in enumerate((PEER, OURS, OURS, PEER, PEER, OURS)[: 2 * run.rounds]):
        with Server(run.out, run.models / model, backend, 8100 + number, run.cache_bytes) as started:
            seconds = started.wait()
            run.row(model=model, backend=backend, start_seconds=seconds, bursts=started.bursts())


def ranks(run: Run) -> None:
    """Tensor parallelism over two GPUs: judged tokens, and jobs in turns."""
    for model in run.names or ("llama", "gptoss"):
        with ExitStack() as stack:
            engines = run.pair(stack, model, tensor_parallel_size=2)
            run.row(model=model, ranks=2, **run.both(engines), **run.judged(engines, model, f"{model}.ranks"))
            _jobs(run, engines, {name: JOBS[name] for name in ("1 x 4,000 + 256", "64 x 1,024 + 256")}, model=model)


SECTIONS = {each.__name__: each for each in (tokens, figures, readiness, host, drafts, refusals, states, server, ranks)}


def main() -> None:
    """Run the sections; one that fails ends as a row that says so."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True, help="folder of engine/models.py")
    parser.add_argument("--names", nargs="*", help="models (those of the section)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-bytes", type=int, default=12_000_000_000, help="of an engine's cache (%(default)s)")
    parser.add_argument("sections", nargs="+", choices=sorted(SECTIONS))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    run = Run(chosen)
    for section in chosen.sections:
        begin = time.perf_counter()
        run.begin(section)
        try:
            SECTIONS[section](run)
        except Exception as error:
            run.row(section=section, error=f"{type(error).__name__}: {error}")
        print(section, round(time.perf_counter() - begin, 1), "s", flush=True)


if __name__ == "__main__":
    main()
