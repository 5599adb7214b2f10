"""An SGLang that takes commands."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from . import listed_plugin
from .commands import Requests, prompt_of

DEFAULTS = {"skip_tokenizer_init": True, "context_length": 8192, "dtype": "bfloat16", "random_seed": 0}
DEFAULTS |= {"page_size": 64, "sampling_backend": "pytorch", "log_level": "info", "chunked_prefill_size": 4096}
# Engines share the card: tokens, not a part of its memory, say how large a cache is.
DEFAULTS |= {"mem_fraction_static": 0.92, "cuda_graph_max_bs_decode": 64}
# Capturing prompts takes a minute of every start; attention runs outside of these graphs.
DEFAULTS |= {"disable_prefill_cuda_graph": True}


class Worker(Requests):
    """An engine and its commands, which are the methods without an underscore."""

    def __init__(self, options: dict[str, Any], listed: bool) -> None:
        if listed:
            self._listed = listed_plugin.install(Path(mkdtemp(prefix="listed")))
        import sglang

        begin = time.perf_counter()
        self._engine = sglang.Engine(**{**DEFAULTS, **options})
        self._counted = {"accepted_tokens": 0, "draft_tokens": 0}
        self.started = {"engine_seconds": round(time.perf_counter() - begin, 2)}

    def listed(self, lengths: Sequence[int], new: int) -> dict[str, float]:
        """What sparse MLA layers of ours gave for prompts of these lengths; SGLang has the plug-in, and no graphs."""
        chance = random.Random(13)
        self._generate([prompt_of(chance, length) for length in lengths], new)
        counted: dict[str, float] = json.loads(self._listed.read_text())
        return counted

    def stop(self) -> None:
        """End SGLang's own processes."""
        self._engine.shutdown()

    def _drafted(self) -> dict[str, int]:
        """How many draft tokens were accepted so far, and how many there were."""
        return dict(self._counted)

    def _generate(self, prompts: list[list[int]], new: int, logprobs: int = 0) -> list[dict[str, Any]]:
        made = self._engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True},
            return_logprob=logprobs > 0,
            top_logprobs_num=logprobs,
        )
        for each in made:
            self._counted["accepted_tokens"] += each["meta_info"].get("spec_accepted_drafts", 0)
            self._counted["draft_tokens"] += each["meta_info"].get("spec_proposed_drafts", 0)
        return [_tokens(each, logprobs) for each in made]


def _tokens(made: dict[str, Any], logprobs: int) -> dict[str, Any]:
    """Tokens of a request, and of each step the pairs of its own token and of the most probable ones."""
    own = made["meta_info"].get("output_token_logprobs", []) if logprobs else []
    top = made["meta_info"].get("output_top_logprobs", []) if logprobs else []
    steps = [[first, *(others or ())] for first, others in zip(own, top or [()] * len(own), strict=True)]
    return {
        "tokens": list(made["output_ids"]),
        "logprobs": [[(token, value) for value, token, *_ in step] for step in steps],
    }
