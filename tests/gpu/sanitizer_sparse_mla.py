"""Small sparse MLA decodes for compute-sanitizer: every kernel, with and without splits, lists with holes."""

from __future__ import annotations

import numpy as np

from cubin_runtime.attention import Runtime
from tests.gpu.sparse_mla_cases import FORMS, SparseMlaCase
from tests.gpu.sparse_mla_device import sparse_mla_on_device


def sparse_mla_all(runtime: Runtime, rng: np.random.Generator) -> set[str]:
    """Run every case; the names of the kernels that ran."""
    used: set[str] = set()
    heads = {"scaled_e4m3": (12, 32, 100)}
    for cache, count in ((form, count) for form in FORMS for count in heads.get(form, (20,))):
        for invariant in (False, True):
            lens = (0, 333, 1100, 64, 15)
            case = SparseMlaCase(5, count, 1100, cache, lens, "random", pool=512, sinks=True, batch_invariant=invariant)
            with sparse_mla_on_device(runtime, case, rng, guard=0) as device:
                workspace = device.dirty_workspace()
                device.run(workspace=workspace)
                device.assert_right()
                device.plan.check(workspace)
                used |= {kernel.name for kernel in device.kernels}
    return used
