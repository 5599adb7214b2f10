"""A vLLM that takes commands: ``python worker.py '{"model": ..., "attention_backend": ...}'``, arguments of ``LLM``.

A command is a line of JSON on the standard input, ``{"do": NAME, ...}``; the answer is a line of JSON on the standard
output. What vLLM prints goes to the standard error. ``ENGINE_IN_PROCESS=1`` keeps the engine in this process, where its
host time and our runtime's counters can be read.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

IN_PROCESS = os.environ.get("ENGINE_IN_PROCESS") == "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not IN_PROCESS))
BEGAN = time.perf_counter()
DEFAULTS = {"skip_tokenizer_init": True, "max_model_len": 8192, "dtype": "bfloat16", "seed": 0}
DEFAULTS |= {"max_num_batched_tokens": 8192, "enable_prefix_caching": True, "disable_log_stats": True}
# Around tiles, pages and windows.
LENGTHS = (
    *(1, 2, 15, 16, 17, 31, 64, 100, 127, 128, 129, 255, 511, 512, 513, 700, 1000, 1023, 1025, 1500, 2047, 2049),
    *(3000, 3500, 5000, 7000),
)


class Clock:
    """Seconds and calls of functions that were wrapped."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def wrap(self, owner: Any, name: str) -> None:
        """Replace a method by one that is timed."""
        inner: Callable[..., Any] = getattr(owner, name)
        self.reset()

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*given, **named)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
                self.calls[name] = self.calls.get(name, 0) + 1

        setattr(owner, name, timed)

    def reset(self) -> None:
        """Forget what was counted."""
        self.seconds, self.calls = {}, {}


class Worker:
    """An engine and its commands, which are the methods without an underscore."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._clock = Clock()
        imported = time.perf_counter()
        from vllm import LLM

        if IN_PROCESS:
            self._time_attention(options["attention_backend"])
        begin = time.perf_counter()
        self._engine = LLM(**{**DEFAULTS, **options})
        ready = time.perf_counter()
        self.started = {
            "import_seconds": round(begin - imported, 2),
            "engine_seconds": round(ready - begin, 2),
            "whole_seconds": round(ready - BEGAN, 2),
            "ours_seconds": round(self._clock.seconds.get("_make_ready", 0.0), 3),
            "ours_calls": self._clock.calls.get("_make_ready", 0),
        }

    def _time_attention(self, backend: str) -> None:
        if backend == "FLASH_ATTN":
            from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl as Impl
            from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder as Builder
        else:
            from cubin_runtime.integrations.vllm.backend import CubinRuntimeImpl as Impl
            from cubin_runtime.integrations.vllm.backend import CubinRuntimeMetadataBuilder as Builder

            self._clock.wrap(Impl, "_make_ready")
        self._clock.wrap(Impl, "forward")
        self._clock.wrap(Builder, "build")

    def tokens(self, out: str) -> dict[str, Any]:
        """Greedy tokens of prompts of many lengths, with logprobs, into a file for ``judge.py``."""
        chance = random.Random(5)
        shared = _prompt(chance, 900)
        prompts = [_prompt(chance, length) for length in LENGTHS]
        prompts += [shared + _prompt(chance, 100 + 7 * number) for number in range(8)]
        begin = time.perf_counter()
        made = self._generate(prompts, 48, logprobs=3)
        seconds = time.perf_counter() - begin
        with open(out, "w", encoding="ascii") as file:
            json.dump({"prompts": prompts, "requests": [_logprobs(each) for each in made]}, file)
        return {"seconds": round(seconds, 3), "requests": len(prompts)}

    def crowd(self, times: int) -> dict[str, int]:
        """In how many of several crowds a request keeps the bits of the logprobs that it has alone."""
        chance = random.Random(11)
        others = [_prompt(chance, chance.randrange(20, 2000)) for _ in range(80)]
        equal = 0
        for _ in range(times):
            mine = [_prompt(chance, chance.randrange(100, 1500)) for _ in range(4)]
            alone = [_logprobs(self._generate([each], 24, logprobs=1)[0]) for each in mine]
            chance.shuffle(others)
            together = self._generate(others[:40] + mine + others[40:], 24, logprobs=1)[40:44]
            equal += sum(one == _logprobs(other) for one, other in zip(alone, together, strict=True))
        return {"equal": equal, "of": 4 * times}

    def job(self, prompts: Sequence[int], new: int, seed: int, fresh: bool = True) -> dict[str, float]:
        """Seconds of a job of prompts that are not cached, and of its decodes, when the cache has the prompts.

        The second is the time of all new tokens less that of one, both with cached prompts. Without ``fresh`` there is
        no first, and an earlier job of the seed has filled the cache.
        """
        chance = random.Random(seed)
        given = [_prompt(chance, length) for length in prompts]
        whole = {"whole": self._seconds(given, new)} if fresh else {}
        first = self._seconds(given, 1)
        cached = self._seconds(given, new)
        return {**whole, "decode": round(cached - first, 5), "cached": cached, "first": first}

    def mixed(self, requests: int, seed: int, longest: int = 1500, most_new: int = 64) -> dict[str, Any]:
        """Requests of mixed lengths; the engine's host and device memory after them, in MB."""
        chance = random.Random(seed)
        given = [_prompt(chance, chance.randrange(1, longest)) for _ in range(requests)]
        seconds = self._seconds(given, chance.randrange(8, most_new))
        return {"seconds": seconds, **_memory(), **self.counters()}

    def counters(self) -> dict[str, Any]:
        """What our runtime loaded and planned so far; nothing where the engine is another process."""
        if not IN_PROCESS:
            return {}
        from cubin_runtime.attention.process import default

        made = default.runtime
        if made is None:
            return {}
        stats = made.stats()
        return {"loads": stats.loads, "fast_paths": stats.fast_paths, "plans": stats.plans_made}

    def freeze(self) -> dict[str, Any]:
        """From here on, loading a kernel is an error."""
        from cubin_runtime.attention import default_runtime

        default_runtime().freeze()
        return self.counters()

    def host(self, requests: int, new: int, seed: int) -> dict[str, Any]:
        """Host time of a decode step's attention: the builder, and all layers."""
        chance = random.Random(seed)
        given = [_prompt(chance, 100 + number) for number in range(requests)]
        self._generate(given, 4)
        self._clock.reset()
        self._generate(given, new)
        seconds, calls = self._clock.seconds, self._clock.calls
        steps = max(1, calls.get("build", 0))
        return {
            "steps": steps,
            "builder_us": round(seconds.get("build", 0.0) / steps * 1e6, 2),
            "layers_us": round(seconds.get("forward", 0.0) / steps * 1e6, 2),
            "layers": calls.get("forward", 0) / steps,
        }

    def drafts(self, prompts: Sequence[int], new: int, seed: int) -> dict[str, Any]:
        """Seconds of a job whose prompts repeat themselves, so that an n-gram drafter finds drafts; they are cached."""
        chance = random.Random(seed)
        given = [(_prompt(chance, 24) * (length // 24 + 1))[:length] for length in prompts]
        self._generate(given, 1)
        return {"seconds": self._seconds(given, new)}

    def sleep(self, level: int) -> dict[str, Any]:
        """Put the engine to sleep and wake it; its tokens before and after."""
        chance = random.Random(3)
        given = [_prompt(chance, length) for length in (17, 700, 1025)]
        before = [_logprobs(each) for each in self._generate(given, 16, logprobs=1)]
        self._engine.sleep(level=level)
        asleep = _memory()
        self._engine.wake_up()
        if level == 2:
            self._engine.collective_rpc("reload_weights")
        self._engine.reset_prefix_cache()
        after = [_logprobs(each) for each in self._generate(given, 16, logprobs=1)]
        return {"equal": before == after, "asleep": asleep, "awake": _memory()}

    def _seconds(self, prompts: list[list[int]], new: int) -> float:
        begin = time.perf_counter()
        self._generate(prompts, new)
        return round(time.perf_counter() - begin, 5)

    def _generate(self, prompts: list[list[int]], new: int, **options: Any) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, **options)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self._engine.generate(given, [sampling] * len(given), use_tqdm=False)


def _prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(256, 31000) for _ in range(length)]


def _logprobs(made: Any) -> dict[str, Any]:
    chosen = made.outputs[0]
    pairs = [[(token, value.logprob) for token, value in each.items()] for each in chosen.logprobs or ()]
    return {"tokens": list(chosen.token_ids), "logprobs": pairs}


def _memory() -> dict[str, int]:
    import psutil

    me = psutil.Process()
    host = sum(each.memory_info().rss for each in (me, *me.children(recursive=True)))
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    asked = ("nvidia-smi", f"--id={which}", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    used = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return {"host_mb": round(host / 1e6), "device_mb": sum(map(int, used))}


def main() -> None:
    """Start the engine, then serve commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(json.loads(sys.argv[1]))
    answers.write(json.dumps(worker.started) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
