"""Small context attentions for compute-sanitizer, right behind whose arrays nothing lies that may be touched."""

from __future__ import annotations

import numpy as np
from context_cases import HEAD_DIMS, random_context_case
from context_device import context_on_device

from cubin_runtime.attention import Runtime

CASES_OF_A_KERNEL = 2


def context_all(runtime: Runtime) -> set[str]:
    """Random cases for every kernel, each compared with its reference; the names of the kernels that ran."""
    used = set()
    for number, head_dim in enumerate(HEAD_DIMS):
        for dtype in ("bf16", "fp16"):
            for cap in (0.0, 20.0):
                for index in range(CASES_OF_A_KERNEL):
                    rng = np.random.default_rng((22, number, index))
                    case = random_context_case(rng, head_dim=head_dim, dtype=dtype, logit_soft_cap=cap, group=4)
                    with context_on_device(runtime, case, rng, guard=0) as device:
                        device.run()
                        device.assert_right()
                        used.add(device.plan.selection.kernel.name)
    return used
