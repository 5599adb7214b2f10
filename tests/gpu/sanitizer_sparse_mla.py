"""Small sparse MLA decodes for compute-sanitizer: every kernel, with and without splits, lists with holes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cubin_runtime.attention import Runtime
from tests.gpu.sparse_mla_cases import FORMS, SparseMlaCase
from tests.gpu.sparse_mla_device import sparse_mla_on_device


def sparse_mla_all(runtime: Runtime, rng: np.random.Generator) -> set[str]:
    """Run every case; the names of the kernels that ran."""
    used: set[str] = set()
    heads = {"scaled_e4m3": (12, 32, 100)}
    for cache, count in ((form, count) for form in FORMS for count in heads.get(form, (20,))):
        case = SparseMlaCase(5, count, 1100, cache, (0, 333, 1100, 64, 15), "random", pool=512, sinks=True)
        # The last has clusters that compute several output tiles each.
        for own in (
            case,
            replace(case, batch_invariant=True),
            replace(case, tokens=70, width=270, lens=None, batch_invariant=True),
        ):
            with sparse_mla_on_device(runtime, own, rng, guard=0) as device:
                workspace = device.dirty_workspace()
                device.run(workspace=workspace)
                device.assert_right()
                device.plan.check(workspace)
                used |= {kernel.name for kernel in device.kernels}
    return used
