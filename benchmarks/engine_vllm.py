"""vLLM on our attention backend beside vLLM on FlashAttention-3: the same requests, in turns, on the same GPU.

Run by ``engine_run.sh`` on a machine with a Hopper GPU, with what ``tools/pack_engine.py`` packed on PYTHONPATH:
``python benchmarks/engine_vllm.py --out DIR --models DIR SECTION...``. Sections:

* ``tokens``: greedy tokens of models with random weights, judged in float32; bits of requests in crowds.
* ``lists``: outputs of sparse MLA layers, ours and FlashMLA's, beside float32, for the lists of vLLM's indexer.
* ``figures``: jobs of models of real shapes; engines take turns, ``--rounds`` times.
* ``cache_dtypes``: jobs over caches of 16 bits and of e4m3, in turns.
* ``readiness``: our part of the start; what 2,000 requests load, allocate and generate after 20.
* ``host``: host time of a step's attention, of decodes and of prompts.
* ``drafts``: jobs with drafters, and judged tokens.
* ``refusals``: what is refused at start, with its reason.
* ``states``: sleep and wake, reloaded weights, dropped requests, preemption, chunk sizes.
* ``invariance``: bits of requests alone and in crowds, and where they part.
* ``server``: time to the first token of streaming clients, first and later bursts after a start.
* ``ranks``: tensor parallelism over two GPUs: judged tokens, and a start of both ranks on an empty store.
* ``dealt``: decode context parallelism over two GPUs: jobs in turns, and judged tokens.
* ``rank_figures``: jobs over two GPUs, beside FlashAttention-3.

The result, ``vllm.SECTION.json``, is written after every row.
"""

from __future__ import annotations

from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from engine.driver import Engine, Run
from engine.mirror import mirrored
from engine.program import main
from engine.turns import take_turns
from engine.vllm_run import LISTS_PEER, MLA_PEER, OURS, PACKED, PEER, Server, VllmRun
from gpu_environment import built_sources

# Job: prompts, new tokens.
JOBS: dict[str, tuple[list[int], int]] = {
    "1 x 4,000 + 256": ([4000], 256),
    "64 x 1,024 + 256": ([1024] * 64, 256),
    "16 x 7,000 + 128": ([7000] * 16, 128),
    "256 x 128 + 128": ([128] * 256, 128),
    "64 mixed, 50 to 3,650 + 128": ([50 + 3600 * (7 * n % 64) // 63 for n in range(64)], 128),
}
# With prompts that are cached.
DEALT_JOBS: dict[str, tuple[list[int], int]] = {
    "1 x 30,000 + 256": ([30000], 256),
    "8 x 30,000 + 256": ([30000] * 8, 256),
}
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SHAPES = ("llama-shape", "llama-rank-shape", "gptoss-shape", "gemma3-shape", "qwen3moe-shape", "deepseek-shape")
MODELS = ("llama", "gptoss", "gemma3", "qwen3moe", "deepseek", "deepseek-lists", "gemma2")
# Bytes of cache for the prompts of judged tokens, of any of the models; engines of several models share a card.
TOKENS_CACHE = 3_000_000_000
LISTS_CACHE = 1_000_000_000  # for those of layers with lists, of which more engines share the card
# Engines beside both backends and ours without graphs, by the other backend.
PACKED_CACHE = {"kv_cache_dtype": PACKED}
DRAFTED = "drafts"  # the last word of labels
THIRDS: dict[str, dict[str, dict[str, Any]]] = {
    PEER: {"TRITON_ATTN": {}},
    MLA_PEER: {"FLASHMLA": {}, "TRITON_MLA": {}},
    LISTS_PEER: {
        f"{OURS} {PACKED}": PACKED_CACHE,
        f"{LISTS_PEER} {PACKED}": PACKED_CACHE,
        f"{OURS} {PACKED} eager": PACKED_CACHE | {"enforce_eager": True},
    },
}


def tokens(run: Run) -> None:
    """Judged tokens, model by model, with graphs and without."""
    for model in run.names or MODELS:
        with ExitStack() as stack:
            eager = {"enforce_eager": True}
            more: dict[str, dict[str, Any]] = {f"{OURS} eager": eager, **THIRDS[run.peer_of(model)]}
            given = {"kv_cache_memory_bytes": min(run.cache_bytes, TOKENS_CACHE)}
            engines, failed = run.ready(run.pair(stack, model, more=more, wait=False, **given))
            run.row(model=model, failed=failed, **run.both(engines), **run.judged(engines, model, model))


def lists(run: Run) -> None:
    """Outputs of sparse MLA layers beside float32, over caches of both kinds, for the lists that the engine made."""
    lengths = [1, 17, 100, 500, 512, 513, 700, 1500, 2047, 2048, 2049, 3000, 7000]
    with ExitStack() as stack:
        given = {"in_process": True, "enforce_eager": True, "kv_cache_memory_bytes": LISTS_CACHE, "wait": False}
        started = {
            model: run.start(stack, model, _listed(run, model), **given) for model in run.names or ("deepseek-lists",)
        }
        for model, starting in started.items():
            engines, failed = run.ready(starting)
            for engine in engines:
                engine.tell("listed", lengths=lengths, new=16, repeated=engine.label.endswith(DRAFTED))
            layers = {engine.label: engine.answer() for engine in engines}
            run.row(model=model, failed=failed, **run.both(engines), layers=layers)


def drafting(asked: dict[str, Any], backend: str) -> dict[str, Any]:
    """Options of an engine with a drafter; the layers that draft have its backend, which vLLM would choose anew."""
    layers = {} if asked["method"] == "ngram" else {"attention_backend": backend}
    return {"speculative_config": asked | layers, "disable_log_stats": False}


def _listed(run: Run, model: str) -> dict[str, dict[str, Any]]:
    """Engines over caches of both kinds, and ours with drafts where the model has a layer for them."""
    backends, caches = (OURS, LISTS_PEER), {"": {}, f" {PACKED}": PACKED_CACHE}
    variants = {f"{backend}{more}": dict(cache) for backend in backends for more, cache in caches.items()}
    if model.endswith("-mtp"):
        for drafter, asked in drafters(run, model).items():
            if asked is not None:
                variants[f"{OURS} {PACKED} {drafter} {DRAFTED}"] = PACKED_CACHE | drafting(asked, OURS)
    return variants


def figures(run: Run) -> None:
    """Jobs in turns."""
    for model in run.names or SHAPES:
        with ExitStack() as stack:
            more = {"FLASHMLA": {}} if run.peer_of(model) == MLA_PEER else {}
            engines, failed = run.ready(run.pair(stack, model, more=more, wait=False))
            run.row(model=model, failed=failed, **run.both(engines))
            take_turns(run, engines, JOBS, model=model)
            # As many prompts as an engine's cache has room for, up to 64.
            count = min(64, run.cache_bytes // (131072 * 4300))
            take_turns(run, engines, {f"{count} x 4,096 + 128": ([4096] * count, 128)}, fresh=False, model=model)


def cache_dtypes(run: Run) -> None:
    """Jobs over caches of both dtypes in turns; as many bytes of cache as the prompts need."""
    jobs = {"64 x 1,024 + 128": ([1024] * 64, 128), "16 x 7,000 + 64": ([7000] * 16, 64)}
    for model in run.names or ("llama-half-shape",):
        with ExitStack() as stack:
            dtype = PACKED if run.peer_of(model) == LISTS_PEER else "fp8"
            quantized = {"kv_cache_dtype": dtype, "kv_cache_memory_bytes": run.cache_bytes // 2}
            more = {f"{backend} {dtype}": quantized for backend in (OURS, run.peer_of(model))}
            engines, failed = run.ready(run.pair(stack, model, more=more, wait=False, kv_cache_dtype="auto"))
            run.row(model=model, failed=failed, **run.both(engines))
            take_turns(run, engines, jobs, model=model)


def readiness(run: Run) -> None:
    """Our part of the start, and what later requests load, allocate and generate."""
    for model in run.names or ("llama", "gptoss"):
        with ExitStack() as stack:
            engines = run.pair(stack, model, in_process=True)
            run.row(model=model, **run.both(engines))
            for asked in (20, 500, 500, 500, 500):
                for engine in engines:
                    engine.tell("mixed", requests=asked, seed=asked, longest=900)
                run.row(model=model, requests=asked, after={engine.label: engine.answer() for engine in engines})


def host(run: Run) -> None:
    """Host time of a step's attention, in turns, without graphs: of decodes, and of prompts of new sizes."""
    model = (run.names or ("llama-shape",))[0]
    steps: dict[str, tuple[str, dict[str, int]]] = {
        **{f"decodes, batch {count}": ("host", {"requests": count, "new": 48}) for count in (1, 8, 64)},
        "a prompt of 20 to 400 tokens, another each step": ("prompts", {"least": 1, "most": 1, "longest": 400}),
        "2 to 40 prompts of 20 to 60 tokens, others each step": ("prompts", {"least": 2, "most": 40, "longest": 60}),
    }
    with ExitStack() as stack:
        engines = run.pair(stack, model, in_process=True, enforce_eager=True)
        for step, (command, asked) in steps.items():
            rounds: dict[str, list[Any]] = {engine.label: [] for engine in engines}
            for number in range(1 + run.rounds):
                for engine in engines if number % 2 else engines[::-1]:
                    rounds[engine.label].append(engine.ask(command, seed=5 + number, **asked))
            run.row(model=model, step=step, rounds=rounds)


def drafters(run: Run, model: str) -> dict[str, dict[str, Any] | None]:
    """The model itself, whose drafts hold; chains of EAGLE; n-grams, whose drafts differ in number; and no drafter."""
    if run.peer_of(model) == LISTS_PEER:
        three = {"num_speculative_tokens": 3}
        return {"MTP": {"method": "mtp", **three}, "n-gram": {**NGRAM, **three}}
    four = {"num_speculative_tokens": 4}
    return {
        "the model": {**four, "method": "draft_model", "model": str(run.models / "llama")},
        "EAGLE": {**four, "method": "eagle", "model": str(run.models / "llama-eagle")},
        "n-gram": {**four, **NGRAM},
        "none": None,
    }


def drafts(run: Run) -> None:
    """Jobs with drafts, in turns, and judged tokens."""
    jobs = {"1 x 512": [512], "64 x 1,024": [1024] * 64}
    model = (run.names or ("llama",))[0]
    for drafter, asked in drafters(run, model).items():
        both = (OURS, run.peer_of(model))
        more = {} if asked is None else {backend: drafting(asked, backend) for backend in both}
        with ExitStack() as stack:
            try:
                engines = run.pair(stack, model, more=more)
            except RuntimeError as error:
                run.row(model=model, drafter=drafter, error=str(error)[-700:])
                continue
            row = {
                "model": model,
                "drafter": drafter,
                **run.both(engines),
                "graphs": {each.label: each.graphs() for each in engines},
            }
            for job, prompts in jobs.items():
                rounds: dict[str, list[Any]] = {engine.label: [] for engine in engines}
                for number in range(1 + run.rounds):
                    for engine in engines if number % 2 else engines[::-1]:
                        rounds[engine.label].append(engine.ask("drafts", prompts=prompts, new=128, seed=4))
                best = {backend: min(each["seconds"] for each in times[1:]) for backend, times in rounds.items()}
                ratio = round(best[run.peer_of(model)] / best[OURS], 4)
                run.row(model=model, drafter=drafter, job=job, rounds=rounds, ratio=ratio)
            run.row(**row, **run.judged(engines, model, f"drafts.{drafter.replace(' ', '_')}"))


def refusals(run: Run) -> None:
    """What is refused at start: the line of the engine's log that says why."""
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "e5m2 cache": ("llama", {"kv_cache_dtype": "fp8_e5m2"}),
        "KV connector": (
            "llama",
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
        ),
        "ALiBi": ("alibi-shape", {}),
        "head_dim 512": ("wide-shape", {}),
        "fp32": ("llama", {"dtype": "float32"}),
        "MLA with 20 draft tokens": ("deepseek", {"speculative_config": NGRAM | {"num_speculative_tokens": 20}}),
    }
    run.refused(asked)


def states(run: Run) -> None:
    """Sleep, reload and dropped requests, preemption in a small cache, chunks of prompts."""
    model = (run.names or ("llama",))[0]
    for name in run.names or (model, "gptoss"):
        with ExitStack() as stack:
            engines = run.pair(stack, name, enable_sleep_mode=True)
            for what, asked in (("sleep", {"level": 1}), ("reload", {}), ("sleep", {"level": 2})):
                answers = {engine.label: engine.ask(what, **asked) for engine in engines}
                run.row(model=name, state=" ".join(map(str, (what, *asked.values()))), answers=answers)
    with ExitStack() as stack:
        engines = run.pair(stack, model)
        answers = {engine.label: engine.ask("abandoned", times=25) for engine in engines}
        run.row(model=model, state="dropped requests", answers=answers)
    with ExitStack() as stack:
        engines = run.start(stack, model, {OURS: {"kv_cache_memory_bytes": 600_000_000}})
        for number in range(10):
            run.row(model=model, state="a cache of 600 MB", after=engines[0].ask("mixed", requests=500, seed=number))
    with ExitStack() as stack:
        chunks = {f"{OURS} {chunk}": {"max_num_batched_tokens": chunk} for chunk in (512, 2048)}
        engines = run.start(stack, model, chunks)
        run.row(model=model, state="chunks of prompts", **run.judged(engines, model, f"{model}.chunks"))


def invariance(run: Run) -> None:
    """Requests alone and in crowds, with batch invariance, and what our layers got and gave."""
    model = (run.names or ("llama",))[0]
    with ExitStack() as stack:
        invariant = {"VLLM_BATCH_INVARIANT": "1"}
        asked: dict[str, Any] = {"in_process": True, "environment": invariant, "enforce_eager": True, "wait": False}
        listed = run.peer_of(model) == LISTS_PEER
        more = {f"{OURS} {PACKED}": PACKED_CACHE} if listed else {}
        engines, failed = run.ready(run.pair(stack, model, more=more, **asked))
        for engine in engines:
            ours = "listed_crowd" if listed else "traced"
            engine.tell(ours if engine.label.startswith(OURS) else "crowd", times=run.rounds if listed else 50)
        crowds = {engine.label: engine.answer() for engine in engines}
        run.row(model=model, state="batch invariance", failed=failed, **run.both(engines), crowds=crowds)


def server(run: Run) -> None:
    """Bursts of streaming clients in turns, each at a server of its own that had no request before."""
    model = (run.names or ("llama",))[0]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(run.out, run.models / model, backend, 8100 + number, run.cache_bytes))
            for number, backend in enumerate((PEER, OURS, OURS, PEER, PEER, OURS)[: 2 * run.rounds])
        ]
        ready = [each.wait() for each in servers]
        for each, seconds in zip(servers, ready, strict=True):
            run.row(model=model, backend=each.backend, start_seconds=seconds, bursts=each.bursts())


def ranks(run: Run) -> None:
    """Tensor parallelism over two GPUs beside one: judged tokens, and a start of both ranks on an empty store."""
    two, one = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 1}
    for model in run.names or ("llama", "gptoss"):
        with ExitStack() as stack:
            try:
                run.row(model=model, ranks=2, **_first_start(run, model, **two))
                alone = {f"{OURS} one GPU": one, f"{run.peer_of(model)} one GPU": one}
                engines = run.pair(stack, model, more=alone, **two)
                run.row(model=model, ranks=2, **run.both(engines), **run.judged(engines, model, f"{model}.ranks"))
            except RuntimeError as error:
                run.row(model=model, ranks=2, error=str(error))


def _first_start(run: Run, model: str, **options: Any) -> dict[str, Any]:
    """What a server of our kernels sent to a start on an empty store, and when the ranks named their kernels."""
    with ExitStack() as stack, TemporaryDirectory() as store:
        address, sent = stack.enter_context(mirrored(built_sources()[0]))
        around = {"CUBIN_RUNTIME_SOURCES": address, "CUBIN_RUNTIME_CACHE": store, "CUBIN_RUNTIME_OFFLINE": "0"}
        (engine,) = run.start(stack, model, {f"{OURS} first": {}}, environment=around, **options)
        engine.end()
        lines = engine.log.read_text().splitlines()
        ready = [line for line in lines if "cubin_runtime: " in line and " run on " in line]
        return {"first_start": engine.started, "sent": dict(sent), "ready": ready}


def dealt(run: Run) -> None:
    """Decode context parallelism over two GPUs: judged tokens of a small model, and jobs of more layers in turns."""
    divided: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "max_model_len": 32768}
    undivided = {f"{OURS} undivided": {"decode_context_parallel_size": 1}}
    for model in [name for name in run.names or ("one-kv-head", "deepseek") if not name.endswith("-shape")]:
        # FLASH_ATTN's graphs leave the context out in the newer runner of vLLM 0.26.
        around = {} if run.peer_of(model) == MLA_PEER else {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        with ExitStack() as stack:
            asked: dict[str, Any] = {"environment": around, "more": undivided, "wait": False, **divided}
            small, large = (run.pair(stack, name, **asked) for name in (model, f"{model}-shape"))
            for name, engines in ((model, small), (f"{model}-shape", large)):
                engines[:], failed = run.ready(engines)
                graphs = {engine.label: engine.graphs() for engine in engines}
                run.row(model=name, runner=_runner(engines), failed=failed, graphs=graphs, **run.both(engines))
            take_turns(run, large, DEALT_JOBS, fresh=False, model=f"{model}-shape", runner=_runner(large))
            for engine in large:
                engine.end()
            run.row(model=model, runner=_runner(small), **run.judged(small, model, f"{model}.dealt"))


def _runner(engines: list[Engine]) -> str:
    """Which of vLLM's model runners the engines have."""
    return "V2" if any("Using V2 Model Runner" in engine.log.read_text() for engine in engines) else "V1"


def rank_figures(run: Run) -> None:
    """Jobs of models over two GPUs, in turns; each engine starts when the others have, and on one GPU at the end."""
    jobs = {name: JOBS[name] for name in ("64 x 1,024 + 256", "1 x 4,000 + 256")}
    for model in run.names or ("llama-shape", "gptoss-shape"):
        with ExitStack() as stack:
            both = (OURS, run.peer_of(model))
            engines = [run.start(stack, model, {label: {}}, tensor_parallel_size=2)[0] for label in both]
            run.row(model=model, ranks=2, alone=True, **run.both(engines))
            take_turns(run, engines, jobs, model=model, ranks=2)
            for engine in engines:
                engine.end()
            for label in both:
                (engine,) = run.start(stack, model, {label: {}})
                run.row(model=model, ranks=1, alone=True, **run.both([engine]))
                engine.end()


SECTIONS = (
    *(tokens, lists, figures, cache_dtypes, readiness, host, drafts, refusals, states, invariance),
    *(server, ranks, dealt, rank_figures),
)


if __name__ == "__main__":
    main(VllmRun, SECTIONS)
