"""A vLLM that takes commands.

An engine *in its process* runs its steps there too, not in a process of vLLM's, so that its host time and our runtime's
counters can be read.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .commands import Requests, memory, prompt_of, repeating_prompt
from .listed import flash_mla_layers, listed_bits, listed_layers
from .trace import Trace

DEFAULTS = {"skip_tokenizer_init": True, "max_model_len": 8192, "dtype": "bfloat16", "seed": 0}
DEFAULTS |= {"max_num_batched_tokens": 8192, "enable_prefix_caching": True, "disable_log_stats": True}


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


class Worker(Requests):
    """An engine and its commands, which are the methods without an underscore."""

    def __init__(self, options: dict[str, Any], in_process: bool) -> None:
        self._clock, self._in_process = Clock(), in_process
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not in_process))
        from vllm import LLM
        from vllm.model_executor.models import registry

        # vLLM reads what a model can do in a new process, which imports vLLM again for as long as the start takes.
        registry._run_in_subprocess = lambda asked: asked()
        self._trace = Trace()
        if in_process:
            self._time_attention(options["attention_backend"])
        begin = time.perf_counter()
        self._engine = LLM(**{**DEFAULTS, **options})
        self.started = {"engine_seconds": round(time.perf_counter() - begin, 2)}
        if calls := self._clock.calls.get("_make_ready"):
            self.started |= {"ours_seconds": round(self._clock.seconds["_make_ready"], 3), "ours_calls": calls}

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

    def counters(self) -> dict[str, Any]:
        """What our runtime loaded, allocated and planned so far; nothing where it is another process."""
        if not self._in_process:
            return {}
        from cubin_runtime.attention.runtime import default

        made = default.runtime
        if made is None:
            return {}
        stats = made.stats()
        return {
            "loads": stats.loads,
            "allocations": self._clock.calls.get("allocate", 0),
            "fast_paths": stats.fast_paths,
            "plans": stats.plans_made,
        }

    def freeze(self) -> dict[str, Any]:
        """From here on, loading a kernel is an error."""
        from cubin_runtime.attention import default_runtime

        default_runtime().freeze()
        return self.counters()

    def traced(self, times: int) -> dict[str, int]:
        """As ``crowd``, with what layers of ours got and gave, asked for once; the engine is in its process, eager."""
        from cubin_runtime.integrations.vllm.backend import CubinRuntimeImpl

        self._trace.wrap(CubinRuntimeImpl)
        chance = random.Random(11)
        others = [prompt_of(chance, chance.randrange(20, 2000)) for _ in range(80)]
        counted = {"equal": 0, "of": 4 * times}
        for _ in range(times):
            mine = [prompt_of(chance, chance.randrange(100, 1500)) for _ in range(4)]
            self._trace.alone()
            alone = [self._generate([each], 24, logprobs=1)[0] for each in mine]
            self._engine.reset_prefix_cache()
            self._trace.crowd()
            together = self._generate(others[:40] + mine + others[40:], 24, logprobs=1)[40:44]
            counted["equal"] += sum(one == other for one, other in zip(alone, together, strict=True))
            for name, number in self._trace.parted().items():
                counted[name] = counted.get(name, 0) + number
        return counted

    def listed(self, lengths: Sequence[int], new: int, repeated: bool = False) -> dict[str, float]:
        """What sparse MLA layers, of ours or FlashMLA's, gave for prompts of these lengths; in the process, eager.

        ``repeated``: four times as many new tokens, of prompts in which an n-gram drafter finds drafts.
        """
        from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

        from cubin_runtime.integrations.vllm.sparse_mla_backend import CubinRuntimeSparseMlaImpl

        chance = random.Random(13)
        make = repeating_prompt if repeated else prompt_of
        ours, peers = listed_layers(CubinRuntimeSparseMlaImpl), flash_mla_layers(FlashMLASparseImpl)
        with ours as counted, peers as of_peer:
            self._generate([make(chance, length) for length in lengths], 4 * new if repeated else new)
        return {**(counted if counted["calls"] else of_peer), **self._drafted()}

    def listed_crowd(self, times: int) -> dict[str, Any]:
        """As ``crowd``, with what sparse MLA layers of ours got and gave; in the process, without graphs."""
        from cubin_runtime.integrations.vllm.sparse_mla_backend import CubinRuntimeSparseMlaImpl

        with listed_bits(CubinRuntimeSparseMlaImpl) as counted:
            return {**self.crowd(times), **counted}

    def host(self, requests: int, new: int, seed: int) -> dict[str, Any]:
        """Host time of a decode step's attention: the builder, and all layers."""
        chance = random.Random(seed)
        given = [prompt_of(chance, 100 + number) for number in range(requests)]
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

    def prompts(self, least: int, most: int, longest: int, seed: int, steps: int = 12) -> dict[str, Any]:
        """Host time of the attention of a step of new prompts, whose number and lengths no step before had: medians."""
        chance, measured = random.Random(seed), []
        for _ in range(steps):
            given = [prompt_of(chance, chance.randrange(20, longest)) for _ in range(chance.randint(least, most))]
            self._clock.reset()
            self._generate(given, 1)
            seconds, calls = self._clock.seconds, self._clock.calls
            measured.append([seconds[name] / calls["build"] * 1e6 for name in ("build", "forward")])
        builder, layers = (round(statistics.median(each), 2) for each in zip(*measured, strict=True))
        return {"steps": steps, "builder_us": builder, "layers_us": layers}

    def _drafted(self) -> dict[str, int]:
        """How many drafts, draft tokens and accepted ones the engine counted; nothing without a drafter."""
        counted: dict[str, int] = {}
        if not self._engine.llm_engine.log_stats:
            return counted
        for metric in self._engine.get_metrics():
            name = metric.name.rpartition("spec_decode_num_")[2]
            if name != metric.name and hasattr(metric, "value"):
                counted[name] = counted.get(name, 0) + metric.value
        return counted

    def abandoned(self, times: int) -> dict[str, Any]:
        """Requests of which half are dropped in mid-generation, some times; a request's tokens before and after."""
        from vllm import SamplingParams

        chance, engine = random.Random(9), self._engine.llm_engine
        mine = prompt_of(chance, 700)
        before = self._generate([mine], 16, logprobs=1)[0]
        used = [memory()]
        sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
        for number in range(times):
            names = [f"{number}.{each}" for each in range(8)]
            for name in names:
                prompt = {"prompt_token_ids": prompt_of(chance, chance.randrange(1, 1500))}
                engine.add_request(name, prompt, sampling)
            for _ in range(chance.randrange(1, 12)):
                engine.step()
            engine.abort_request(names[::2])
            while engine.has_unfinished_requests():
                engine.step()
        after = self._generate([mine], 16, logprobs=1)[0]
        return {"dropped": 4 * times, "equal": before["tokens"] == after["tokens"], "memory": [*used, memory()]}

    def sleep(self, level: int) -> dict[str, Any]:
        """Put the engine to sleep and wake it; its tokens before and after."""
        before = self._of_three()
        self._engine.sleep(level=level)
        asleep = memory()
        self._engine.wake_up()
        if level == 2:
            self._engine.collective_rpc("reload_weights")
        return {"equal": before == self._of_three(), "asleep": asleep, "awake": memory()}

    def reload(self) -> dict[str, Any]:
        """Load the weights again; the engine's tokens before and after."""
        before = self._of_three()
        self._engine.collective_rpc("reload_weights")
        return {"equal": before == self._of_three()}

    def _of_three(self) -> list[dict[str, Any]]:
        """Tokens and logprobs of three prompts that are not cached, one after the other: with others, the requests that
        a step has may differ."""
        chance = random.Random(3)
        self._engine.reset_prefix_cache()
        return [self._generate([prompt_of(chance, length)], 16, logprobs=1)[0] for length in (17, 700, 1025)]

    def stop(self) -> None:
        """End vLLM's own process, if there is one."""
        self._engine.llm_engine.engine_core.shutdown()

    def _generate(self, prompts: list[list[int]], new: int, logprobs: int = 0) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs or None
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        made = self._engine.generate(given, [sampling] * len(given), use_tqdm=False)
        return [_logprobs(each) for each in made]


def _logprobs(made: Any) -> dict[str, Any]:
    chosen = made.outputs[0]
    pairs = [[(token, value.logprob) for token, value in each.items()] for each in chosen.logprobs or ()]
    return {"tokens": list(chosen.token_ids), "logprobs": pairs}
