"""One process of ``run.py``: FlashMLA's decode tests on our names, each outcome written down.

Its settings are JSON in ``FLASH_MLA_TESTS``. Tests compare with FlashMLA's own references and tolerances; they are not
timed, because the timing looks for FlashMLA's kernels by name.

Outcomes: ``passed``; ``failed``; ``refused``: ended by our ``UsageError`` or ``BackendError``; ``out of memory``, where
other processes had it; ``not run`` when the time was up.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from sampling import sampled

from cubin_runtime.attention.backends import BackendError
from cubin_runtime.compat import flash_mla as ours
from cubin_runtime.errors import UsageError

NO_MEMORY = "out of memory"
FATAL = ("illegal memory access", "misaligned address", "unspecified launch failure", "device-side assert")
KEPT_BYTES = 4 << 30  # what a process keeps allocated for its next test


class Case(NamedTuple):
    """A test with its parameters: ``run`` says whether outputs are right, or raises."""

    group: str
    parameters: Any
    run: Callable[[Any], bool]


def main() -> int:
    """Run this process's share of the sample."""
    settings = json.loads(os.environ["FLASH_MLA_TESTS"])
    if not torch.cuda.is_available():  # the tests can be listed without a device
        torch.cuda.set_device = torch.set_default_device = lambda *_: None
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    sys.modules["flash_mla"] = ours
    cases = [*sparse_cases(), *dense_cases()]
    with open(settings["records"], "a") as records:
        if "only" in settings:
            chosen = [cases[number] for number in settings["only"]]
        else:
            places = range(len(cases))
            sample = sampled(places, settings["sample"], settings["seed"], lambda number: cases[number].group)
            print(json.dumps({"collected": len(cases), "sample": len(sample)}), file=records, flush=True)
            chosen = [cases[number] for number in sample[settings["job"] :: settings["jobs"]]]
        if settings["collect"]:
            return 0
        for case in chosen:
            record = {"case": cases.index(case), "test": f"{case.group}::{case.parameters}"}
            if time.time() > settings["until"]:
                record["outcome"] = "not run"
            else:
                record |= outcome_of(case)
            print(json.dumps(record), file=records, flush=True)
            if any(word in record.get("reason", "") for word in FATAL):
                return 1
    return 0


def dense_cases() -> Iterator[Case]:
    """The cases of the dense test, which its ``main`` lists; it also sets the dtype and the device of all tests."""
    module = import_module("test_flash_mla_dense_decoding")
    test, listed = module.test_flash_mla, list[Any]()
    module.test_flash_mla = listed.append
    module.main(torch.bfloat16)

    def run(parameters: Any) -> bool:
        torch.set_float32_matmul_precision("highest")
        test(parameters)
        return True

    for parameters in listed:
        group = "dense"
        if parameters.h_kv > 1:
            group = "dense, several KV heads"
        elif parameters.s_q > 1 and not parameters.is_causal:
            group = "dense, several query tokens without a causal mask"
        yield Case(group, replace(parameters, test_performance=False), run)


def sparse_cases() -> Iterator[Case]:
    """The cases of the sparse test, with the seeds that they have where all of them run."""
    module = import_module("test_flash_mla_sparse_decoding")

    def run(parameters: Any) -> bool:
        torch.set_float32_matmul_precision("high")
        return bool(module.test_flash_mla(parameters).is_correct)

    for seed, raw in enumerate(module.gen_testcase()):
        group = "sparse, V3.2 rows" if raw.d_qk == 576 else "sparse, MODEL1 rows"
        if raw.extra_topk is not None:
            group += " with an extra cache"
        yield Case(group, replace(raw.to_test_param(), num_runs=0, seed=seed), run)


def outcome_of(case: Case) -> dict[str, Any]:
    """Run a test, and say how it ended, why, and for how long it ran."""
    if torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
    began, printed = time.time(), io.StringIO()
    outcome, reason = "passed", ""
    try:
        with contextlib.redirect_stdout(printed):
            if not case.run(case.parameters):
                outcome, reason = "failed", "outputs differ"
    except (UsageError, BackendError) as error:
        outcome, reason = "refused", str(error)[:300]
    except torch.OutOfMemoryError:
        outcome, reason = NO_MEMORY, NO_MEMORY
    except Exception as error:  # also assertions, with which the dense test ends
        outcome, reason = "failed", f"{type(error).__name__}: {error}"[:2000]
    record = {"outcome": outcome, "reason": reason, "seconds": round(time.time() - began, 3)}
    return record | ({"printed": printed.getvalue()[-2000:]} if outcome == "failed" else {})


if __name__ == "__main__":
    sys.exit(main())
