"""The choice that ``explain`` prints has at most ten lines on a terminal of 80 columns, whatever is launched."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator

import pytest

from cubin_runtime.attention.call_sizes import CallSizes
from cubin_runtime.attention.explain import explain
from cubin_runtime.cli import output
from cubin_runtime.cli.example_call import Shapes, example_decision
from cubin_runtime.kernels.explanation import Facts
from cubin_runtime.kernels.native.device_models import describe_device
from cubin_runtime.kernels.trtllm_gen import explanation
from cubin_runtime.kernels.trtllm_gen.errors import KernelMissing
from cubin_runtime.kernels.trtllm_gen.traits import Policy
from kernels_src.variants import VARIANTS
from tests.kernels.context_examples import KERNELS as CONTEXT
from tests.kernels.copying_kernels import KERNELS as COPYING
from tests.kernels.decode_kernels import HOPPER, PORTABLE
from tests.kernels.mla_examples import KERNELS as MLA
from tests.kernels.trtllm_examples import recorded_kernels
from tests.kernels.variant_kernels import kernel_of

COLUMNS, LINES = 80, 10
SPARSE = tuple(kernel_of(variant) for variant in VARIANTS if variant.operation == "sparse_mla_decode")
SEGMENTS = tuple(kernel_of(variant) for variant in VARIANTS if variant.operation == "paged_decode")
MANY = {"batch": 600, "kv_len": 1_000_000}


def lines(choice: Facts) -> list[str]:
    """What a terminal shows."""
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.setattr(sys, "stdout", shown)
        output.facts(choice)
    return shown.getvalue().splitlines()


def decodes() -> Iterator[CallSizes]:
    """Decodes with the longest reasons: ragged, of many rows, in windows, batch-invariant."""
    for invariant, ragged, window in itertools.product((False, True), (None, 900), (0, 4000)):
        for q_len, heads in ((16, 32), (64, 256), (1, 8)):
            tokens = ragged and min(ragged, 600 * q_len)
            yield CallSizes(**MANY, q_len=q_len, heads_q=heads, tokens=tokens, window=window, batch_invariant=invariant)


@pytest.mark.parametrize(("kernels", "sm"), [(HOPPER, 90), (SEGMENTS, 90), (PORTABLE, 80)])
def test_decodes(kernels: tuple, sm: int) -> None:
    shown = [lines(explain(sizes, kernels, describe_device(sm)).choice) for sizes in decodes()]
    assert max(map(len, shown)) <= LINES
    assert max(len(line) for each in shown for line in each) <= COLUMNS
    assert {each[0].split()[0] for each in shown} <= {"kernel", "launches"}


OTHERS = {
    "mla": (MLA, CallSizes(**MANY, head_dim=576, heads_q=128, q_len=16)),
    "mla batch-invariant": (MLA, CallSizes(**MANY, head_dim=576, heads_q=128, q_len=16, batch_invariant=True)),
    "sparse mla": (SPARSE, CallSizes(operation="sparse_mla", head_dim=576, dtype_kv="e4m3", heads_q=128, batch=600)),
    "context": (CONTEXT, CallSizes(**MANY, operation="context", q_len=8192)),
    "context batch-invariant": (CONTEXT, CallSizes(**MANY, operation="context", q_len=8192, batch_invariant=True)),
    "append": (COPYING, CallSizes(operation="append", batch=600, q_len=8192, dtype_kv="e4m3", dtype_q="bf16")),
    "merge": (COPYING, CallSizes(operation="merge", batch=600, q_len=8192, heads_q=128, head_dim=512)),
    "draft mask": (COPYING, CallSizes(operation="draft_mask", batch=600, q_len=64)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    kernels, sizes = OTHERS[name]
    shown = lines(explain(sizes, kernels, describe_device(90)).choice)
    assert shown[0].startswith("kernel ")
    assert len(shown) <= LINES
    assert max(map(len, shown)) <= COLUMNS


THEIRS = [
    {"lse": True},
    {"lse": True, "q_len": 6, "heads_kv": 4, "kv_len": 1_000_000, "batch": 300},
    {"operation": "context", "q_len": 1024},
    {"operation": "ragged", "q_len": 128},
    {"heads_q": 128, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "lse": True, "kv_len": 100_000, "q_len": 4},
]


@pytest.mark.parametrize("shapes", THEIRS, ids=str)
def test_trtllm_gen(shapes: dict) -> None:
    try:
        decision = example_decision(Shapes(**shapes), recorded_kernels(), Policy.BEST)
    except KernelMissing:
        pytest.fail(f"the recorded kernels have none for {shapes}")
    shown = lines(explanation.choice(decision))
    assert shown[0].startswith("kernel ")
    assert len(shown) <= LINES
    assert max(map(len, shown)) <= COLUMNS


def test_a_long_symbol_is_divided_between_its_words() -> None:
    symbol = "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP32MultiCtasKvCgaVarSeqQ8Kv128StaticSwapsAbForGen"
    first, second = lines((("kernel", symbol),))
    assert first + second.strip() == f"kernel  {symbol}"
    assert second.strip()[0].isupper()
