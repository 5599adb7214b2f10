"""The memory that docs/workspaces.md says kept plans to have, compared with plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cubin_runtime import Config, Runtime
from cubin_runtime.attention import MlaDecodePlan, PagedDecodePlan, TensorView, plan_mla_decode, plan_paged_decode
from cubin_runtime.attention.fast_path.any_size import _kind
from cubin_runtime.attention.operator_plan import OperatorPlan
from cubin_runtime.attention.runtime import PlanCache
from kernels_src.variants import VARIANTS
from tests.attention.attention_examples import RELEASE_NAME, describe_release
from tests.kernels.variant_kernels import kernel_of

TEXT = " ".join((Path(__file__).parents[2] / "docs" / "workspaces.md").read_text().split())
PAGES, PAGE, KEYS = 4096, 64, 4096
MOST = 256


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    folder = tmp_path_factory.mktemp("described")
    tree, pins = describe_release(folder, [kernel_of(variant) for variant in VARIANTS if variant.sm == "90a"])
    config = Config(store=folder / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    return Runtime(config, release=RELEASE_NAME)


def view(dtype: str, *shape: int) -> TensorView:
    return TensorView.contiguous(1 << 40, dtype, shape)


def gqa(runtime: Runtime, batch: int) -> PagedDecodePlan:
    q, cache = view("bfloat16", batch, 32, 128), view("bfloat16", PAGES, PAGE, 8, 128)
    table, lens = view("int32", batch, KEYS // PAGE), view("int32", batch)
    return plan_paged_decode(q, cache, cache, table, lens, q, max_seq_len=KEYS, device_facts="H200", runtime=runtime)


def mla(runtime: Runtime, batch: int) -> MlaDecodePlan:
    q, cache = view("bfloat16", batch, 128, 576), view("bfloat16", PAGES, PAGE, 576)
    table, lens, out = view("int32", batch, KEYS // PAGE), view("int32", batch), view("bfloat16", batch, 128, 512)
    return plan_mla_decode(
        q, cache, table, lens, out, softmax_scale=0.1, max_seq_len=KEYS, device_facts="H200", runtime=runtime
    )


@pytest.mark.parametrize(
    ("plan_of", "words", "words_of_calls"),
    [
        (gqa, "{} MiB of workspaces with 32 query heads of 128 columns", "workspaces, of {} MiB"),
        (mla, "{} MiB in MLA with 128 heads", "and of {} MiB, beside"),
    ],
)
def test_it_says_how_much_memory_plans_and_calls_of_all_batches_have(
    runtime: Runtime, plan_of: Callable[[Runtime, int], OperatorPlan], words: str, words_of_calls: str
) -> None:
    plans = [plan_of(runtime, batch) for batch in range(1, MOST + 1)]
    of_kinds = {_kind(plan.launches): plan for plan in plans}
    for text, counted in ((words, plans), (words_of_calls, of_kinds.values())):
        nbytes = sum(plan.workspace_bytes for plan in counted)
        assert text.format(f"{round(nbytes / 2**20):,}") in TEXT


def test_it_says_how_many_plans_are_kept() -> None:
    cache = PlanCache()
    for key in range(2 * MOST):
        cache.get(key, object)
    assert len(cache._plans) == MOST
    assert f"keep the last {MOST} plans" in TEXT
