"""Which backend is nearer to float32.

The model runs in float32 over each prompt and a run's tokens; the error is that of the logprob of each chosen token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST = 4000


def judge(where: Path, out: Path, files: Mapping[str, Path]) -> None:
    """Judge the run in each file, named by its backend, and write the errors."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="eager").to("cuda")
    runs = {name: json.loads(path.read_text()) for name, path in files.items()}
    known: dict[tuple[int, ...], Any] = {}
    result: dict[str, Any] = {name: _judged(model, run, known) for name, run in runs.items()}
    first, *others = runs
    for other in others:
        pairs = zip(runs[first]["requests"], runs[other]["requests"], strict=True)
        result[f"requests of {other} with the tokens of {first}"] = sum(a["tokens"] == b["tokens"] for a, b in pairs)
    out.write_text(json.dumps(result, indent=1) + "\n")


def _judged(model: Any, run: Any, known: dict[tuple[int, ...], Any]) -> dict[str, Any]:
    """The errors of one run; ``known``: the exact logprobs of runs before, by the tokens."""
    import torch

    errors: list[float] = []
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
        errors += [abs(one - other) for one, other in zip(chosen, of_run, strict=True)]
        same += int((exact.argmax(-1) == torch.tensor(tokens)).sum())
    errors.sort()
    return {
        "tokens": len(errors),
        "mean_error": round(sum(errors) / len(errors), 5),
        "median_error": round(errors[len(errors) // 2], 5),
        "p99_error": round(errors[int(len(errors) * 0.99)], 5),
        "max_error": round(errors[-1], 5),
        "float32_chooses_the_same": same,
    }
