"""batch_invariant: prefill, in any chunks, and decode, as drafts or step by step, give a token the same bits."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.decode_device import only_kernels
from tests.gpu.decode_values import values_of
from tests.gpu.prompt_bits import Prompt, PromptOnDevice, assert_same, picked, prompt_on_device
from tests.gpu.seeds import SEED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("context_backend")]

# Where tiles and segments end.
EDGES = (0, 1, 127, 128, 129, 511, 512, 513, 1023, 1024)

PROMPTS = {
    "a segment": Prompt(500),
    "several": Prompt(2700),
    "head 64": Prompt(2700, head_dim=64),
    "many": Prompt(17500, kv_heads=1),
    "many, head 64": Prompt(9000, head_dim=64, kv_heads=1, group=16),
    "fp16": Prompt(1800, dtype="fp16"),
    "fp16 head 64": Prompt(1800, head_dim=64, dtype="fp16"),
    "one head": Prompt(1500, group=1, kv_heads=5),
    "odd group": Prompt(1300, group=5, kv_heads=3, head_dim=64),
    "group of 16": Prompt(1300, group=16, kv_heads=2),
    "group of 32": Prompt(1100, group=32, kv_heads=1, head_dim=64),
    "window": Prompt(2500, window_left=300, page_size=16),
    "window over segments": Prompt(4000, window_left=1500, head_dim=64, page_size=128),
    "sinks": Prompt(1700, sinks=True, page_size=32),
    "scores far apart": Prompt(2200, amplitude=30.0, page_size=256),
    "negative scale": Prompt(1200, softmax_scale=-0.1),
    "no scale": Prompt(1200, softmax_scale=0.0, sinks=True),
    "scales on the device": Prompt(1500, device_scales=True, sinks=True),
    "negative scale on the device": Prompt(900, head_dim=64, softmax_scale=-0.2, device_scales=True),
    "e4m3": Prompt(2700, e4m3=True),
    "e4m3 head 64": Prompt(2700, head_dim=64, e4m3=True, page_size=16),
    "e4m3, many segments": Prompt(9000, kv_heads=1, group=8, e4m3=True),
    "e4m3, many segments, head 64": Prompt(17500, head_dim=64, kv_heads=1, e4m3=True),
    "e4m3, fp16": Prompt(1800, dtype="fp16", e4m3=True, kv_scales="number"),
    "e4m3, fp16, head 64": Prompt(1800, head_dim=64, dtype="fp16", e4m3=True, kv_scales="one", page_size=128),
    "e4m3, group of 32": Prompt(1100, group=32, kv_heads=1, e4m3=True, sinks=True),
    "e4m3, one head": Prompt(1300, group=1, kv_heads=5, e4m3=True, page_size=32),
    "e4m3, fp16, group of 8": Prompt(2100, dtype="fp16", group=8, kv_heads=2, e4m3=True, kv_scales="heads"),
    "e4m3, head 64, group of 8": Prompt(2100, head_dim=64, group=8, kv_heads=2, e4m3=True, sinks=True, window_left=700),
    "e4m3, scores far apart": Prompt(2200, amplitude=30.0, page_size=256, e4m3=True),
    "e4m3, negative scale": Prompt(1200, head_dim=64, softmax_scale=-0.1, e4m3=True, kv_scales="expanded"),
    "e4m3, window": Prompt(2500, window_left=300, page_size=16, e4m3=True, kv_scales="heads"),
    "e4m3, scales on the device": Prompt(1500, device_scales=True, sinks=True, e4m3=True, kv_scales="expanded"),
}


def check(device: PromptOnDevice, rng: np.random.Generator) -> None:
    prompt = device.prompt
    tokens = prompt.tokens
    whole = device.prefill((0, tokens))
    for _ in range(2):
        cuts = sorted({0, tokens, *(int(x) for x in rng.integers(1, tokens, int(rng.integers(1, 9))))})
        assert_same(device.prefill(cuts, int(rng.choice([prompt.page_size, 16]))), whole, f"chunks {cuts}")
    steps = sorted({t for t in EDGES if t < tokens} | {tokens - 1, *(int(x) for x in rng.integers(0, tokens, 16))})
    assert_same(device.decode([(t, 1) for t in steps]), picked(whole, steps), "steps")
    for alone in (tokens - 1, int(rng.choice(steps))):
        found = device.decode([(alone, 1)], 16, spare=int(rng.integers(0, 700)))
        assert_same(found, picked(whole, [alone]), f"a step alone, {alone}")
    for q_len in (int(rng.integers(2, 9)), min(tokens - 1, int(rng.integers(17, 65)))):
        firsts = [int(x) for x in rng.integers(0, tokens - q_len, 5)]
        drafted = [t for first in firsts for t in range(first, first + q_len)]
        assert_same(device.decode([(first, q_len) for first in firsts]), picked(whole, drafted), f"drafts of {q_len}")
    mixed = [(int(rng.integers(0, tokens - 8)), int(rng.integers(1, 9))) for _ in range(7)]
    drafted = [t for first, count in mixed for t in range(first, first + count)]
    assert_same(device.decode(mixed), picked(whole, drafted), "drafts of different lengths")


@pytest.mark.parametrize("name", PROMPTS)
def test_a_token_has_the_same_bits_in_prefill_and_decode(runtime: Runtime, name: str) -> None:
    seed = (SEED, list(PROMPTS).index(name))
    with prompt_on_device(runtime, PROMPTS[name], seed) as device:
        check(device, np.random.default_rng(seed))
        device.arrays.assert_guards()


@pytest.mark.parametrize("name", PROMPTS)
def test_the_bits_are_those_of_attention(runtime: Runtime, name: str) -> None:
    with prompt_on_device(runtime, PROMPTS[name], (SEED, 1)) as device:
        prompt = device.prompt
        tokens = [0, 1, prompt.tokens // 2, prompt.tokens - 1]
        found = values_of(prompt.dtype, device.decode([(t, 1) for t in tokens])[0])
        np.testing.assert_allclose(
            found, device.expected(tokens), rtol=0, atol=0.03 if prompt.dtype == "bf16" else 0.004
        )


# Every 40 prompts meet each of these.
STRATA = list(product((64, 128), ("bf16", "fp16"), (16, 32, 64, 128, 256), (False, True)))


def random_prompt(rng: np.random.Generator, index: int) -> Prompt:
    head_dim, dtype, page_size, e4m3 = STRATA[index % len(STRATA)]
    group = int(rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32]))
    tokens = int(rng.integers(9, 3000))
    return replace(
        Prompt(tokens),
        head_dim=head_dim,
        dtype=dtype,
        kv_heads=int(rng.integers(1, max(2, 32 // group))),
        group=group,
        page_size=page_size,
        window_left=int(rng.choice([-1, -1, rng.integers(0, tokens)])),
        sinks=bool(rng.integers(2)),
        amplitude=float(rng.choice([0.1, 1.0, 10.0, 100.0])),
        device_scales=bool(rng.integers(2)),
        e4m3=e4m3,
        kv_scales=str(rng.choice(["", "number", "one", "heads", "expanded"])) if e4m3 else "",
    )


@pytest.mark.parametrize("index", range(int(os.environ.get("CUBIN_RUNTIME_RANDOM_PROMPTS", "40"))))
def test_random_prompts_have_the_same_bits_in_prefill_and_decode(runtime: Runtime, index: int) -> None:
    rng = np.random.default_rng((SEED, 2, index))
    prompt = random_prompt(rng, index)
    print(f"CUBIN_RUNTIME_SEED={SEED} {prompt}")
    with prompt_on_device(runtime, prompt, rng.integers(1 << 30)) as device:
        check(device, rng)
        device.arrays.assert_guards()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("head_dim", "rows", "e4m3"),
    [
        *product((64, 128), (8, 16, 64), (False, True)),
        (128, 128, False),
    ],
)
def test_every_decode_kernel_gives_the_bits_of_prefill(
    runtime: Runtime, head_dim: int, dtype: str, rows: int, e4m3: bool
) -> None:
    kernels = [k for k in runtime.native_release().kernels if k.traits.get("arithmetic") == "segments"]
    prompt = Prompt(3100, head_dim=head_dim, dtype=dtype, group=6, window_left=2000, e4m3=e4m3)
    with prompt_on_device(runtime, prompt, (SEED, 4)) as device:
        whole = device.prefill((0, prompt.tokens))
        with only_kernels(runtime, {kernel.name for kernel in kernels if kernel.traits["rows"] == rows}):
            for steps in (
                [(3099, 1)],
                [(t, 1) for t in range(0, 3100, 61)],
                [(3084, 16), (1020, 8), (0, 5)],
                [(3036, 64), (990, 37)],
            ):
                tokens = [t for first, count in steps for t in range(first, first + count)]
                assert_same(device.decode(steps), picked(whole, tokens), f"{rows} rows: {steps}")


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_contexts_split_over_the_gpu_keep_the_bits(runtime: Runtime, head_dim: int, e4m3: bool) -> None:
    prompt = Prompt(40_000, head_dim=head_dim, kv_heads=1, group=4, e4m3=e4m3)
    with prompt_on_device(runtime, prompt, (SEED, 3)) as device:
        cuts = (39_000, 39_100, 40_000)
        last = device.prefill(cuts)
        for steps in ([(39_999, 1)], [(39_992, 8)], [(39_500, 1), (39_000, 8), (39_992, 5)]):
            tokens = [t - cuts[0] for first, count in steps for t in range(first, first + count)]
            assert_same(device.decode(steps), picked(last, tokens), steps)
