"""A vLLM that takes commands: ``serve`` runs it in a process of its own, forked from one that has imported vLLM.

A command is a dictionary, ``{"do": NAME, ...}``; the answer is one too, and has ``error`` where the command failed.
What vLLM prints goes to a log. An engine *in its process* runs its steps there too, not in a process of vLLM's, so that
its host time and our runtime's counters can be read.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

    def __init__(self, options: dict[str, Any], in_process: bool) -> None:
        self._clock, self._in_process = Clock(), in_process
        from vllm import LLM
        from vllm.model_executor.models import registry

        # vLLM reads what a model can do in a new process, which imports vLLM again for as long as the start takes.
        registry._run_in_subprocess = lambda asked: asked()
        if in_process:
            self._time_attention(options["attention_backend"])
        begin = time.perf_counter()
        self._engine = LLM(**{**DEFAULTS, **options})
        self.started = {"engine_seconds": round(time.perf_counter() - begin, 2)}
        if in_process and options["attention_backend"] == "CUSTOM":
            self.started["ours_seconds"] = round(self._clock.seconds.get("_make_ready", 0.0), 3)
            self.started["ours_calls"] = self._clock.calls.get("_make_ready", 0)

    def _time_attention(self, backend: str) -> None:
        if backend == "FLASH_ATTN":
            from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl as Impl
            from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder as Builder
        else:
            from cubin_runtime.integrations.vllm.backend import CubinRuntimeImpl as Impl
            from cubin_runtime.integrations.vllm.backend import CubinRuntimeMetadataBuilder as Builder
            from cubin_runtime.launch.driver import Driver

            self._clock.wrap(Impl, "_make_ready")
            self._clock.wrap(Driver, "allocate")
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
        """What our runtime loaded, allocated, generated and planned so far; nothing where it is another process."""
        if not self._in_process:
            return {}
        from cubin_runtime.attention.process import default

        made = default.runtime
        if made is None:
            return {}
        from cubin_runtime.launch.compiled import _code

        stats = made.stats()
        return {
            "loads": stats.loads,
            "allocations": self._clock.calls.get("allocate", 0),
            "functions": _code.cache_info().misses,
            "fast_paths": stats.fast_paths,
            "plans": stats.plans_made,
        }

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
        before = self._drafted()
        seconds = self._seconds(given, new)
        return {"seconds": seconds, **{name: value - before.get(name, 0) for name, value in self._drafted().items()}}

    def _drafted(self) -> dict[str, int]:
        """How many drafts, draft tokens and accepted ones the engine counted; nothing without a drafter."""
        counted = {}
        for metric in self._engine.get_metrics():
            name = metric.name.rpartition("spec_decode_num_")[2]
            if name != metric.name and hasattr(metric, "value"):
                counted[name] = counted.get(name, 0) + metric.value
        return counted

    def abandoned(self, times: int) -> dict[str, Any]:
        """Requests of which half are dropped in mid-generation, some times; a request's tokens before and after."""
        from vllm import SamplingParams

        chance, engine = random.Random(9), self._engine.llm_engine
        mine = _prompt(chance, 700)
        before = _logprobs(self._generate([mine], 16, logprobs=1)[0])
        memory = [_memory()]
        sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
        for number in range(times):
            names = [f"{number}.{each}" for each in range(8)]
            for name in names:
                prompt = {"prompt_token_ids": _prompt(chance, chance.randrange(1, 1500))}
                engine.add_request(name, prompt, sampling)
            for _ in range(chance.randrange(1, 12)):
                engine.step()
            engine.abort_request(names[::2])
            while engine.has_unfinished_requests():
                engine.step()
        after = _logprobs(self._generate([mine], 16, logprobs=1)[0])
        return {"dropped": 4 * times, "equal": before["tokens"] == after["tokens"], "memory": [*memory, _memory()]}

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

    def stop(self) -> None:
        """End vLLM's own process, if there is one."""
        self._engine.llm_engine.engine_core.shutdown()

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


def serve(
    connection: Any, options: dict[str, Any], in_process: bool, log: Path, environment: Mapping[str, str]
) -> None:
    """Start an engine, then answer the commands of a connection until ``stop``."""
    os.environ.update(environment, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(not in_process)))
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    status = 0
    try:
        worker = Worker(options, in_process)
        connection.send(worker.started)
        while (command := connection.recv())["do"] != "stop":
            try:
                answer = getattr(worker, command.pop("do"))(**command)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send(answer)
        worker.stop()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # vLLM's threads would hold the process
