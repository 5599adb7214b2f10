"""One model of the sweep in all its cases: our attention in bf16 beside transformers' own in bf16 and float32."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.integrations.transformers import register
from cubin_runtime.integrations.transformers.operators import Operators
from tests.integrations.sweep_models import VOCABULARY, model_of, names

NAME = "cubin_runtime_sweep"
BATCH, NEW = 2, 6
CUTS = (40, 60, *range(61, 67))
LENGTH = CUTS[-1]
BESIDE = 1.5  # our error by that of transformers' own attention in bf16
FLOOR = 5e-4  # of the logits' root mean square: below it errors are not told apart
DECISIVE = 0.1  # of the largest logit: no bf16 takes a token that is this much below the best
REQUESTS = (3, 40, 17)
_ABSENT = "transformers: "


class Run(NamedTuple):
    """A model in one dtype, and the implementation that attends."""

    model: Any
    implementation: str
    device: str


def counting(operators: Operators, calls: Counter[str]) -> Operators:
    """The operators, their calls counted by name."""

    def counted(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            calls[name] += 1
            return inner(*positional, **named)

        return call

    return Operators(*(counted(name, getattr(operators, name)) for name in Operators._fields))


def tokens(device: str) -> Any:
    return torch.randint(3, VOCABULARY - 8, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)


def left(device: str) -> Any:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long, device=device)
    mask[0, :7] = 0
    return mask


def right(device: str) -> Any:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long, device=device)
    mask[1, 31:] = 0
    return mask


def logits_of(run: Run, **given: Any) -> Any:
    return run.model(**given).logits.float()


def prompt(run: Run, mask: Any = None) -> Any:
    """All tokens at once, without a cache."""
    return logits_of(run, input_ids=tokens(run.device), attention_mask=mask, use_cache=False)


def steps(run: Run, cache: Any, mask: Any = None) -> Any:
    """A prompt, a chunk and single tokens over a cache."""
    ids, start, parts = tokens(run.device), 0, []
    for end in CUTS:
        seen = None if mask is None else mask[:, :end]
        parts.append(
            logits_of(run, input_ids=ids[:, start:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        )
        start = end
    return torch.cat(parts, dim=1)


def dynamic(run: Run) -> Any:
    return DynamicCache(config=run.model.config)


def static(run: Run) -> Any:
    return StaticCache(config=run.model.config, max_cache_len=80)


# Case -> its logits, and the mask of the tokens that count.
LOGITS: dict[str, tuple[Callable[[Run], Any], Callable[[str], Any] | None]] = {
    "prompt": (prompt, None),
    "dynamic cache": (lambda run: steps(run, dynamic(run)), None),
    "static cache": (lambda run: steps(run, static(run)), None),
    "left padding": (lambda run: steps(run, dynamic(run), left(run.device)), left),
    "left padding, static cache": (lambda run: steps(run, static(run), left(run.device)), left),
    "mixed lengths": (lambda run: prompt(run, right(run.device)), right),
}


def generated(run: Run) -> list[list[int]]:
    """Greedy tokens behind a prompt with padding."""
    mask = left(run.device)[:, :40]
    made = run.model.generate(
        input_ids=tokens(run.device)[:, :40],
        attention_mask=mask,
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, bos_token_id=1
        ),
    )
    return made[:, -NEW:].tolist()


def batched(run: Run) -> list[list[int]]:
    """Greedy tokens of continuous batching: prompts of several lengths, cut into chunks."""
    results = run.model.generate_batch(
        [tokens("cpu")[0, :length].tolist() for length in REQUESTS],
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=16, num_blocks=64, max_batch_tokens=24, use_cuda_graph=False
        ),
        progress_bar=False,
    )
    ordered = sorted(results.values(), key=lambda result: int(result.request_id.rpartition("_")[2]))
    failed = next((result.error for result in ordered if getattr(result, "error", None)), None)
    if failed or len(ordered) != len(REQUESTS):
        raise RuntimeError(failed or f"{len(ordered)} of {len(REQUESTS)} requests came back")
    return [result.generated_tokens for result in ordered]


def regret(truth: Run, case: str, made: list[list[int]]) -> float:
    """How far the logit of a token that was taken is below the best in float32, of the largest logit, at most."""
    worst = 0.0
    for row, new in enumerate(made):
        if case == "generate":
            ids, mask = tokens(truth.device)[row : row + 1, :40], left(truth.device)[row : row + 1, :40]
        else:
            ids = tokens(truth.device)[:1, : REQUESTS[row]]
            mask = torch.ones_like(ids)
        taken = torch.tensor([new], device=truth.device)
        mask = torch.cat((mask, torch.ones_like(taken)), dim=1)
        logits = logits_of(truth, input_ids=torch.cat((ids, taken), dim=1), attention_mask=mask, use_cache=False)
        logits = logits[0, -NEW - 1 : -1]
        below = logits.max(-1).values - logits.gather(1, taken[0, :, None])[:, 0]
        worst = max(worst, float(below.max() / logits.abs().max()))
    return worst


def shown(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}"


class Sweep:
    """All cases of one model."""

    def __init__(self, kind: str, device: str, operators: Operators) -> None:
        self.calls: Counter[str] = Counter()
        register(NAME, counting(operators, self.calls))
        self.kind, self.device = kind, device
        model = model_of(kind)
        self.half = model.to(device=device, dtype=torch.bfloat16)
        self.full = None

    def truth(self) -> Run:
        """The model in float32, with the weights of bf16."""
        if self.full is None:
            full = model_of(self.kind)
            full.load_state_dict({key: weight.float() for key, weight in self.half.state_dict().items()}, strict=False)
            self.full = full.to(self.device)
        self.full.set_attn_implementation("eager")
        return Run(self.full, "eager", self.device)

    def run(self, implementation: str) -> Run:
        self.half.set_attn_implementation(implementation)
        return Run(self.half, implementation, self.device)

    def row(self) -> dict[str, Any]:
        """What the JSON has of the model."""
        cases = {case: self.of_logits(case) for case in LOGITS}
        cases |= {"generate": self.of_tokens("generate"), "continuous batching": self.of_tokens("continuous batching")}
        return {"class": names()[self.kind], "status": status_of(cases), "cases": cases}

    def of_logits(self, case: str) -> dict[str, Any]:
        make, mask = LOGITS[case]
        try:
            truth = make(self.truth())
        except Exception as error:
            return {"verdict": "absent", "error": _ABSENT + shown(error)}
        keep = torch.ones(truth.shape[:2], dtype=torch.bool, device=truth.device)
        if mask is not None and mask(self.device).shape == keep.shape:
            keep = mask(self.device).bool()

        def error_of(logits: Any) -> float:
            if not bool(torch.isfinite(logits[keep]).all()):
                return math.inf
            return float((logits - truth)[keep].square().mean().sqrt() / truth[keep].square().mean().sqrt())

        beside = self.beside(lambda run: error_of(make(run)))
        if not beside:
            return {"verdict": "absent", "error": _ABSENT + "no bf16"}
        self.calls.clear()
        try:
            ours = error_of(make(self.run(NAME)))
        except CubinRuntimeError as error:
            return {"verdict": "refused", "error": shown(error)}
        except Exception as error:
            return {"verdict": "failed", "error": shown(error)}
        limit = BESIDE * min(beside.values()) + FLOOR
        found = {"error": ours, "beside": beside, "calls": dict(self.calls)}
        return {"verdict": "right" if ours <= limit else "wrong", **found}

    def beside(self, measure: Callable[[Run], float]) -> dict[str, float]:
        """Errors of transformers' own implementations in bf16, of those that run and are not wrong themselves."""
        found: dict[str, float] = {}
        for implementation in ("sdpa", "eager"):
            try:
                found[implementation] = measure(self.run(implementation))
            except Exception:
                continue
        if "sdpa" in found and found["sdpa"] <= 3 * found.get("eager", math.inf):
            return {"sdpa": found["sdpa"]}
        return {name: error for name, error in found.items() if name == "eager" or len(found) == 1}

    def of_tokens(self, case: str) -> dict[str, Any]:
        make, prefix = (generated, "") if case == "generate" else (batched, "paged|")
        beside = None
        for implementation in ("sdpa", "eager"):
            try:
                beside = regret(self.truth(), case, make(self.run(prefix + implementation)))
                break
            except Exception as error:
                absent = shown(error)
        if beside is None:
            return {"verdict": "absent", "error": _ABSENT + absent}
        self.calls.clear()
        try:
            made = make(self.run(prefix + NAME))
        except CubinRuntimeError as error:
            return {"verdict": "refused", "error": shown(error)}
        except Exception as error:
            refused = "UsageError" in str(error) or "CubinRuntimeError" in str(error)
            return {"verdict": "refused" if refused else "failed", "error": shown(error)}
        ours = regret(self.truth(), case, made)
        found = {"regret": ours, "beside": beside, "calls": dict(self.calls)}
        return {"verdict": "right" if ours <= max(DECISIVE, BESIDE * beside) else "wrong", **found}


def status_of(cases: dict[str, dict[str, Any]]) -> str:
    """The word of the table for a model with these cases."""
    verdicts = {case["verdict"] for case in cases.values()}
    for worst in ("wrong", "failed"):
        if worst in verdicts:
            return worst
    if verdicts == {"absent"}:
        return "not run"
    if "refused" in verdicts:
        return "partly refused" if "right" in verdicts else "refused"
    called = any(case.get("calls") for case in cases.values())
    return "right" if called else "own attention"


def swept(kind: str, device: str, operators: Operators) -> dict[str, Any]:
    """The row of a model; one that cannot be built says why."""
    try:
        sweep = Sweep(kind, device, operators)
    except Exception as error:
        return {"class": names()[kind], "status": "not built", "error": shown(error)}
    with torch.no_grad():
        row = sweep.row()
    del sweep
    gc.collect()
    return row
