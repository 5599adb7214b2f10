"""Small context attentions for compute-sanitizer, right behind whose arrays nothing lies that may be touched."""

from __future__ import annotations

import math
from itertools import product
from unittest.mock import patch

import numpy as np

from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.native.prefill import select
from tests.gpu.context_cases import HEAD_DIMS, random_context_case, splits_up_to
from tests.gpu.context_device import context_on_device


def context_all(runtime: Runtime) -> set[str]:
    """A random case for every kernel, compared with its reference; the names of the kernels that ran."""
    used = set()
    switches = (False, True)
    for head_dim, dtype, cap, invariant, e4m3 in product(HEAD_DIMS, ("bf16", "fp16"), (0.0, 20.0), switches, switches):
        rng = np.random.default_rng((22, head_dim))
        given = {"head_dim": head_dim, "dtype": dtype, "logit_soft_cap": cap, "batch_invariant": invariant, "group": 4}
        given["e4m3"] = e4m3
        case = random_context_case(rng, **given)
        with (
            patch.object(select, "MOST_SPLITS", 1),
            context_on_device(runtime, case, rng, guard=0) as device,
        ):
            device.run()
            device.assert_right()
            used.add(device.plan.selections[0].kernel.name)
    return used | conversions(runtime) | split_keys(runtime)


def split_keys(runtime: Runtime) -> set[str]:
    """A case whose keys are in two parts for every kernel of these; the names of the kernels that ran."""
    used = set()
    for head_dim, dtype, cap, e4m3 in product(HEAD_DIMS, ("bf16", "fp16"), (0.0, 20.0), (False, True)):
        rng = np.random.default_rng((24, head_dim))
        given = {"head_dim": head_dim, "dtype": dtype, "logit_soft_cap": cap, "e4m3": e4m3, "group": 4}
        given |= {"batch_invariant": False, "window_left": -1, "lse_sink": True}
        with (
            patch.object(select, "_splits", splits_up_to(2)),
            context_on_device(runtime, random_context_case(rng, **given), rng, guard=0) as device,
        ):
            device.run()
            device.assert_right()
            used |= {selection.kernel.name for selection in device.plan.selections}
    return used


def conversions(runtime: Runtime) -> set[str]:
    """A cache of each form that is converted before, for both types; the names of the kernels that ran."""
    used = set()
    for dtype, form in product(("bf16", "fp16"), ("paged", "even", "ragged")):
        rng = np.random.default_rng(23)
        given = {
            "dtype": dtype,
            "form": form,
            "e4m3": True,
            "window_left": -1,
            "kv_scales": "one",
            "device_scales": False,
        }
        with (
            patch.object(select, "_CONVERSION_US", -math.inf),
            patch.object(select, "MOST_SPLITS", 1),
            context_on_device(runtime, random_context_case(rng, **given), rng, guard=0) as device,
        ):
            device.run()
            device.assert_right()
            used |= {selection.kernel.name for selection in device.plan.selections}
    return used
