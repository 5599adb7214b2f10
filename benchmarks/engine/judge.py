"""Which backend is nearer to float32.

The model runs in float32 over each prompt and a run's tokens; the error is that of the logprob of each chosen token.
Where an indexer chooses the keys of each token, requests that are within its lists stand apart from those that are
longer, and the first backend is judged beside a model that attends to all keys, too.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LONGEST = 4000
Exact = dict[tuple[int, ...], Any]


def judge(where: Path, out: Path, files: Mapping[str, Path]) -> None:
    """Judge the run in each file, named by its backend, and write the errors."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="eager").to("cuda")
    runs = {name: json.loads(path.read_text()) for name, path in files.items()}
    width, known = getattr(model.config, "index_topk", None), Exact()
    result: dict[str, Any] = {name: _judged(model, run, known, width) for name, run in runs.items()}
    first, *others = runs
    for other in others:
        pairs = zip(runs[first]["requests"], runs[other]["requests"], strict=True)
        result[f"requests of {other} with the tokens of {first}"] = sum(a["tokens"] == b["tokens"] for a, b in pairs)
    if width is not None:
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = 2 * LONGEST
        result[f"{first} beside all keys"] = _judged(model, runs[first], Exact(), width)
    out.write_text(json.dumps(result, indent=1) + "\n")


def _judged(model: Any, run: Any, known: Exact, width: int | None) -> dict[str, Any]:
    """The errors of one run; ``known``: the exact logprobs of runs before, by the tokens; ``width``: of lists."""
    import torch

    errors: dict[bool, list[list[float]]] = {True: [], False: []}  # of requests within the lists, and of longer ones
    same = 0
    for prompt, made in zip(run["prompts"], run["requests"], strict=True):
        if len(prompt) > LONGEST:
            continue
        tokens = made["tokens"]
        text = (*prompt, *tokens)
        if text not in known:
            with torch.no_grad():
                logits = model(torch.tensor([text[:-1]], device="cuda"), logits_to_keep=len(tokens)).logits[0]
            known[text] = torch.log_softmax(logits.float(), -1).cpu()
        exact = known[text]
        chosen = exact[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
        of_run = [dict(map(tuple, given))[token] for token, given in zip(tokens, made["logprobs"], strict=True)]
        within = width is None or len(text) <= width
        errors[within].append([abs(one - other) for one, other in zip(chosen, of_run, strict=True)])
        same += int((exact.argmax(-1) == torch.tensor(tokens)).sum())
    judged = {**_summary(errors[True] + errors[False]), "float32_chooses_the_same": same}
    apart = {"within_lists": errors[True], "beyond_lists": errors[False]} if width is not None else {}
    return judged | {name: _summary(each) for name, each in apart.items()}


def _summary(requests: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The mean of all tokens and its standard error, for which a request counts once: its tokens err together."""
    errors = sorted(error for request in requests for error in request)
    means = [statistics.fmean(request) for request in requests]
    spread = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
    return {
        "tokens": len(errors),
        "mean_error": round(sum(errors) / len(errors), 5),
        "standard_error": round(spread, 5),
        "median_error": round(errors[len(errors) // 2], 5),
        "p99_error": round(errors[int(len(errors) * 0.99)], 5),
        "max_error": round(errors[-1], 5),
    }
