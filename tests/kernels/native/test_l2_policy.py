"""The L2 policy of a kernel is what its build states, with the reason that measurements gave."""

from __future__ import annotations

import pytest

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.l2_policy import l2_choice
from kernels_src.variants import VARIANTS, Variant
from tests.kernels.variant_kernels import kernel_of

BUILT = {variant.name: variant for variant in VARIANTS}
# Operations whose kernels were measured with another policy, on SM90a.
MEASURED = ("paged_decode", "paged_mla_decode", "context_attention", "append_kv", "merge_states")


def built(variant: Variant) -> NativeKernel:
    """The entry of kernels.json that the build makes of a variant."""
    return kernel_of(variant, flags=tuple(f"-D{name}={value}" for name, value in variant.defines.items()))


def first_of(operation: str, sm: str = "90a") -> NativeKernel:
    return built(next(v for v in VARIANTS if (v.operation, v.sm) == (operation, sm)))


@pytest.mark.parametrize(
    ("operation", "ctas", "policy", "reason"),
    [
        ("paged_decode", 1, "evict_first", "each key is read once"),
        ("paged_mla_decode", 1, "evict_first", "one CTA reads a key"),
        ("paged_mla_decode", 2, "no hint", "several CTAs read a key"),
        ("context_attention", 1, "no hint", "other row tiles read a key again"),
        ("append_kv", 1, "no hint (`__ldcg`)", "new keys and values are read once"),
        ("merge_states", 1, "no hint (`__ldcg`)", "states are read once"),
        ("sparse_mla_decode", 1, "no hint", "no other policy was measured"),
    ],
)
def test_a_family_has_its_policy_and_its_reason(operation: str, ctas: int, policy: str, reason: str) -> None:
    choice = l2_choice(first_of(operation), ctas)
    assert choice is not None
    assert (choice.policy, choice.reason.startswith(reason)) == (policy, True)


def test_what_packs_masks_reads_no_keys() -> None:
    assert l2_choice(first_of("draft_mask")) is None


@pytest.mark.parametrize("name", [name for name, variant in BUILT.items() if variant.operation in MEASURED])
def test_every_kernel_says_whether_its_policy_was_measured_with_it(name: str) -> None:
    choice = l2_choice(built(BUILT[name]), 2)
    assert choice is not None
    assert ("no other policy was measured" in choice.reason or "kernels for SM90a" in choice.reason) == (
        BUILT[name].sm != "90a"
    )


def test_another_build_says_its_own_policy() -> None:
    kernel = kernel_of(BUILT["context_attention_bf16_d128_sm90a"], flags=("-DL2_POLICY=evict_normal",))
    choice = l2_choice(kernel)
    assert choice is not None
    assert choice.policy == "evict_normal"
