"""Which backend is nearer to float32: ``python judge.py MODEL OUT.json NAME=TOKENS.json...``.

The model runs in float32 over each prompt and a run's tokens; the error is that of the logprob of each chosen token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LONGEST = 4000


def main() -> None:
    """Judge each run and write its errors."""
    import torch
    from transformers import AutoModelForCausalLM

    where, out, *files = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="eager").to("cuda")
    runs = {name: json.loads(Path(path).read_text()) for name, _, path in (each.partition("=") for each in files)}
    result: dict[str, Any] = {name: judged(model, run) for name, run in runs.items()}
    first, *others = runs
    for other in others:
        pairs = zip(runs[first]["requests"], runs[other]["requests"], strict=True)
        result[f"requests of {other} with the tokens of {first}"] = sum(a["tokens"] == b["tokens"] for a, b in pairs)
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    print(where, json.dumps(result))


def judged(model: Any, run: Any) -> dict[str, Any]:
    """The errors of one run."""
    import torch

    errors: list[float] = []
    same = 0
    for prompt, made in zip(run["prompts"], run["requests"], strict=True):
        if len(prompt) > LONGEST:
            continue
        tokens = made["tokens"]
        ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
        with torch.no_grad():
            logits = model(ids, logits_to_keep=len(tokens)).logits[0].float()
        exact = torch.log_softmax(logits, -1)
        chosen = exact[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
        of_run = [dict(map(tuple, given))[token] for token, given in zip(tokens, made["logprobs"], strict=True)]
        errors += [abs(one - other) for one, other in zip(chosen, of_run, strict=True)]
        same += int((exact.argmax(-1).cpu() == torch.tensor(tokens)).sum())
    errors.sort()
    return {
        "tokens": len(errors),
        "mean_error": round(sum(errors) / len(errors), 5),
        "median_error": round(errors[len(errors) // 2], 5),
        "p99_error": round(errors[int(len(errors) * 0.99)], 5),
        "max_error": round(errors[-1], 5),
        "float32_chooses_the_same": same,
    }


if __name__ == "__main__":
    main()
