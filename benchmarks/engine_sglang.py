"""SGLang on our attention backend beside SGLang on Triton: the same requests, in turns, on the same GPU.

Run by ``engine_run.sh`` with what ``tools/pack_engine.py`` packed, with the options of ``engine_vllm.py``. Sections:

* ``tokens``: greedy tokens of models with random weights, judged in float32.
* ``lists``: outputs of sparse MLA layers beside float32, for the lists that SGLang's indexer made.
* ``deterministic``: bits of requests in crowds, with deterministic inference.
* ``drafts``: jobs with n-gram drafts, and judged tokens.
* ``figures``: jobs of models of real shapes; engines take turns, ``--rounds`` times.
* ``refusals``: what is refused at start, with its reason.

The result, ``sglang.SECTION.json``, is written after every row.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from engine.commands import Requests
from engine.driver import Run, scratch
from engine.program import main
from engine.sglang_worker import Worker
from engine.turns import take_turns

OURS, PEER, LISTS_PEER = "cubin_runtime", "triton", "dsa"
MODELS = ("llama", "deepseek", "gemma3")
NGRAM: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 5,
    "speculative_ngram_max_bfs_breadth": 1,
}
# SGLang's FlashMLA attends to prompts of all engines, and to decodes of its own backend.
LISTS_OPTIONS = {"dsa_prefill_backend": "flashmla_sparse", "dsa_decode_backend": "flashmla_sparse"}
PACKED = {"kv_cache_dtype": "fp8_e4m3", "dsa_prefill_backend": "flashmla_kv", "dsa_decode_backend": "flashmla_kv"}
EAGER = {"disable_cuda_graph": True}
LISTS_THIRDS: dict[str, dict[str, Any]] = {
    f"{OURS} fp8_e4m3": PACKED,
    f"{LISTS_PEER} fp8_e4m3": PACKED,
}
JOBS = {"1 x 4,000 + 128": ([4000], 128), "64 x 1,024 + 128": ([1024] * 64, 128), "16 x 7,000 + 96": ([7000] * 16, 96)}


class SglangRun(Run):
    """A run of SGLang."""

    engine, ours = "sglang", OURS

    def peer_of(self, model: str) -> str:
        """Triton; FlashMLA where an indexer chooses the keys."""
        return LISTS_PEER if model.startswith("deepseek-lists") else PEER

    def maker(self, options: dict[str, Any], in_process: bool) -> Callable[[], Requests]:
        """What makes an engine in the process that calls it."""
        return partial(Worker, options, in_process)

    def options(self, model: str, backend: str, **more: Any) -> dict[str, Any]:
        """Arguments of ``sglang.Engine``."""
        given: dict[str, Any] = {"model_path": str(self.models / model), "attention_backend": backend}
        given["max_total_tokens"] = 118_000 if model.endswith("-shape") else 60_000
        if model.endswith("-shape"):
            given["load_format"] = "dummy"
        if model.startswith("gemma"):
            given["disable_hybrid_swa_memory"] = True
        if model.startswith("deepseek-lists"):
            given |= {"kv_cache_dtype": "bfloat16", **LISTS_OPTIONS}
        return {**given, **more}

    def surroundings(self, backend: str) -> dict[str, str]:
        """Variables of an engine's process: no network, and a cache that the other engine does not share."""
        alone = {
            "HF_HUB_OFFLINE": "1",
            "SGLANG_PLUGINS": OURS,
            "TRITON_CACHE_DIR": str(scratch() / f"triton.{backend}"),
        }
        # Short prompts would run on FlashAttention-3, which is not packed.
        return {**alone, "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}

    def import_engine(self) -> None:
        """Show nvcc the headers of CCCL, which SGLang's kernels include; importing SGLang would initialize CUDA."""
        found = glob.glob("/usr/local/cuda*/targets/x86_64-linux/include/cccl")
        others = os.environ.get("CPLUS_INCLUDE_PATH", "").split(":")
        os.environ["CPLUS_INCLUDE_PATH"] = ":".join([*found, *filter(None, others)])


def tokens(run: Run) -> None:
    """Judged tokens of two models at a time, as a start takes long."""
    names = run.names or MODELS
    for pair in (names[number : number + 2] for number in range(0, len(names), 2)):
        with ExitStack() as stack:
            starting = {model: run.pair(stack, model, more=_thirds(run, model), wait=False) for model in pair}
            for model, of_model in starting.items():
                engines, failed = run.ready(of_model)
                graphs = {engine.label: engine.graphs() for engine in engines}
                row = {"model": model, "failed": failed, "graphs": graphs, **run.both(engines)}
                run.row(**row, **run.judged(engines, model, model))


def _thirds(run: Run, model: str) -> dict[str, dict[str, Any]]:
    return LISTS_THIRDS if run.peer_of(model) == LISTS_PEER else {}


def lists(run: Run) -> None:
    """Outputs of sparse MLA layers beside float32, over caches of both kinds, for the lists that the engine made."""
    for model in run.names or ("deepseek-lists-64",):
        with ExitStack() as stack:
            variants = {OURS: {}, f"{OURS} fp8_e4m3": PACKED}
            engines, failed = run.ready(run.start(stack, model, variants, in_process=True, wait=False, **EAGER))
            for engine in engines:
                engine.tell("listed", lengths=[1, 17, 100, 500, 2047, 2048, 2049, 3000, 5000, 7000], new=16)
            layers = {engine.label: engine.answer() for engine in engines}
            run.row(model=model, failed=failed, **run.both(engines), layers=layers)


def deterministic(run: Run) -> None:
    """Crowds, with deterministic inference."""
    model = (run.names or ("llama",))[0]
    with ExitStack() as stack:
        engines = run.pair(stack, model, enable_deterministic_inference=True)
        for engine in engines:
            engine.tell("crowd", times=10)
        run.row(model=model, **run.both(engines), crowds={engine.label: engine.answer() for engine in engines})


def drafts(run: Run) -> None:
    """Jobs with drafts, in turns, and judged tokens."""
    for model in run.names or ("llama", "deepseek"):
        with ExitStack() as stack:
            engines = run.pair(stack, model, **NGRAM)
            for job, prompts in {"1 x 512": [512], "16 x 512": [512] * 16}.items():
                rounds: dict[str, list[Any]] = {engine.label: [] for engine in engines}
                for _ in range(1 + run.rounds):
                    for engine in engines:
                        rounds[engine.label].append(engine.ask("drafts", prompts=prompts, new=128, seed=4))
                run.row(model=model, drafter="n-gram", job=job, rounds=rounds)
            row = {"model": model, "drafter": "n-gram", **run.both(engines)}
            run.row(**row, **run.judged(engines, model, f"drafts.{model}"))


def figures(run: Run) -> None:
    """Jobs in turns."""
    for model in run.names or ("llama-half-shape",):
        with ExitStack() as stack:
            engines = run.pair(stack, model)
            run.row(model=model, **run.both(engines))
            take_turns(run, engines, JOBS, model=model)


def refusals(run: Run) -> None:
    """What is refused at start: the line of the engine's log that says why."""
    trees = {**NGRAM, "speculative_ngram_max_bfs_breadth": 4}
    run.refused(
        {
            "hierarchical cache": ("llama", {"enable_hierarchical_cache": True}),
            "a page of one token": ("llama", {"page_size": 1}),
            "e5m2 cache": ("llama", {"kv_cache_dtype": "fp8_e5m2"}),
            "trees of draft tokens": ("llama", trees),
        }
    )


if __name__ == "__main__":
    main(SglangRun, (tokens, lists, deterministic, drafts, figures, refusals))
