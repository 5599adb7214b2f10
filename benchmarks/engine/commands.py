"""Requests that engines of all kinds are asked for, and what is counted beside them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

# Around tiles, pages and windows.
LENGTHS = (
    *(1, 2, 15, 16, 17, 31, 64, 100, 127, 128, 129, 255, 511, 512, 513, 700, 1000, 1023, 1025, 1500, 2047, 2049),
    *(3000, 3500, 5000, 7000),
)


class Requests(ABC):
    """Commands to an engine, which are the methods without an underscore."""

    started: dict[str, Any]

    @abstractmethod
    def _generate(self, prompts: list[list[int]], new: int, logprobs: int = 0) -> list[dict[str, Any]]:
        """Greedy ``tokens`` of each prompt, and ``logprobs`` where asked for: pairs of a token and its own, by step."""

    def _drafted(self) -> dict[str, int]:
        """How many draft tokens were accepted so far, and how many there were; nothing without a drafter."""
        return {}

    def counters(self) -> dict[str, Any]:
        """What our runtime loaded, allocated, generated and planned so far; nothing where it is another process."""
        return {}

    @abstractmethod
    def stop(self) -> None:
        """End the engine's own processes, if there are any."""

    def tokens(self, out: str) -> dict[str, Any]:
        """Greedy tokens of prompts of many lengths, with logprobs, into a file for ``judge.py``."""
        chance = random.Random(5)
        shared = prompt_of(chance, 900)
        prompts = [prompt_of(chance, length) for length in LENGTHS]
        prompts += [shared + prompt_of(chance, 100 + 7 * number) for number in range(8)]
        begin = time.perf_counter()
        made = self._generate(prompts, 48, logprobs=3)
        seconds = time.perf_counter() - begin
        with open(out, "w", encoding="ascii") as file:
            json.dump({"prompts": prompts, "requests": made}, file)
        return {"seconds": round(seconds, 3), "requests": len(prompts)}

    def crowd(self, times: int) -> dict[str, int]:
        """In how many of several crowds a request keeps the bits of the logprobs that it has alone."""
        chance = random.Random(11)
        others = [prompt_of(chance, chance.randrange(20, 2000)) for _ in range(80)]
        equal = 0
        for _ in range(times):
            mine = [prompt_of(chance, chance.randrange(100, 1500)) for _ in range(4)]
            alone = [self._generate([each], 24, logprobs=1)[0] for each in mine]
            chance.shuffle(others)
            together = self._generate(others[:40] + mine + others[40:], 24, logprobs=1)[40:44]
            equal += sum(one == other for one, other in zip(alone, together, strict=True))
        return {"equal": equal, "of": 4 * times}

    def job(self, prompts: Sequence[int], new: int, seed: int, fresh: bool = True) -> dict[str, float]:
        """Seconds of a job of prompts that are not cached, and of its decodes, when the cache has the prompts.

        The second is the time of all new tokens less that of one, both with cached prompts. Without ``fresh`` there is
        no first, and an earlier job of the seed has filled the cache.
        """
        chance = random.Random(seed)
        given = [prompt_of(chance, length) for length in prompts]
        whole = {"whole": self._seconds(given, new)} if fresh else {}
        first = self._seconds(given, 1)
        cached = self._seconds(given, new)
        return {**whole, "decode": round(cached - first, 5), "cached": cached, "first": first}

    def mixed(self, requests: int, seed: int, longest: int = 1500, most_new: int = 64) -> dict[str, Any]:
        """Requests of mixed lengths; the engine's host and device memory after them, in MB."""
        chance = random.Random(seed)
        given = [prompt_of(chance, chance.randrange(1, longest)) for _ in range(requests)]
        seconds = self._seconds(given, chance.randrange(8, most_new))
        return {"seconds": seconds, **memory(), **self.counters()}

    def drafts(self, prompts: Sequence[int], new: int, seed: int) -> dict[str, Any]:
        """Seconds of a job whose prompts repeat themselves, so that an n-gram drafter finds drafts; they are cached."""
        chance = random.Random(seed)
        given = [repeating_prompt(chance, length) for length in prompts]
        self._generate(given, 1)
        before = self._drafted()
        seconds = self._seconds(given, new)
        return {"seconds": seconds, **{name: value - before.get(name, 0) for name, value in self._drafted().items()}}

    def _seconds(self, prompts: list[list[int]], new: int) -> float:
        begin = time.perf_counter()
        self._generate(prompts, new)
        return round(time.perf_counter() - begin, 5)


def prompt_of(chance: random.Random, length: int) -> list[int]:
    """Random tokens, none of them of a byte."""
    return [chance.randrange(256, 31000) for _ in range(length)]


def repeating_prompt(chance: random.Random, length: int) -> list[int]:
    """The same 24 random tokens again and again."""
    return (prompt_of(chance, 24) * (length // 24 + 1))[:length]


def memory() -> dict[str, int]:
    """MB of host memory of this process and its children, and of the device."""
    import psutil

    me = psutil.Process()
    host = sum(each.memory_info().rss for each in (me, *me.children(recursive=True)))
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    asked = ("nvidia-smi", f"--id={which}", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    used = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return {"host_mb": round(host / 1e6), "device_mb": sum(map(int, used))}
