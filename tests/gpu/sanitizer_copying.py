"""Small appends and merges for compute-sanitizer, right behind whose arrays nothing lies that may be touched."""

from __future__ import annotations

import numpy as np
from append_cases import UNTOUCHED, AppendArrays
from append_cases import random_case as random_append
from merge_cases import MergeArrays
from merge_cases import random_case as random_merge
from mirrored_arrays import MirroredArrays

from cubin_runtime.attention import Runtime, plan_append_kv, plan_merge_states
from cubin_runtime.testing.device import DeviceArrays

COPYING_CASES = 10  # of each


def copying_all(runtime: Runtime) -> set[str]:
    """Random appends and merges, compared with their references; the names of the kernels that ran."""
    used = set()
    for index in range(COPYING_CASES):
        rng = np.random.default_rng((21, index))
        mirror = MirroredArrays(runtime.driver, UNTOUCHED, DeviceArrays(runtime.driver, guard=0))
        append = AppendArrays(random_append(rng), rng, mirror.make)
        expected = append.expected()
        tensors, options = append.arguments(mirror.place)
        plan = plan_append_kv(**tensors, **options, runtime=runtime)
        plan.run(**tensors)
        mirror.download(append.whole)
        assert np.array_equal(append.whole, expected), append.case
        merge = MergeArrays(random_merge(rng), rng, MirroredArrays(runtime.driver, 0xFF).make)
        tensors, options = merge.arguments(mirror.place)
        merging = plan_merge_states(**tensors, **options, runtime=runtime)
        merging.run(**tensors)
        for array in (merge.out, merge.lse):
            mirror.place(array, "float32")
            mirror.download(array)
        merge.check()
        mirror.close()
        used |= {selection.kernel.name for of in (plan, merging) for selection in of.selections}
    return used
