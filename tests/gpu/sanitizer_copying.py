"""Small appends, merges and draft masks for compute-sanitizer, with nothing behind their arrays that may be touched."""

from __future__ import annotations

import numpy as np

from cubin_runtime.attention import Runtime, draft_mask, plan_append_kv, plan_draft_mask, plan_merge_states
from cubin_runtime.attention.step_plan import StepPlan
from cubin_runtime.testing.device import DeviceArrays
from tests.gpu.append_cases import UNTOUCHED, AppendArrays
from tests.gpu.append_cases import random_case as random_append
from tests.gpu.merge_cases import MergeArrays
from tests.gpu.merge_cases import random_case as random_merge
from tests.gpu.mirrored_arrays import MirroredArrays

COPYING_CASES = 10  # of each
_DTYPES = {"out": "uint16"}


def copying_all(runtime: Runtime) -> set[str]:
    """Random cases of each operator, compared with their references; the names of the kernels that ran."""
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
        packing = _pack(runtime, rng, mirror)
        mirror.close()
        used |= {selection.kernel.name for of in (plan, merging, packing) for selection in of.selections}
    return used


def _pack(runtime: Runtime, rng: np.random.Generator, mirror: MirroredArrays) -> StepPlan:
    """Pack random trees or patterns of requests with the same or different numbers of drafts, as on the host."""
    bound, ragged, name = int(rng.integers(1, 65)), bool(rng.integers(2)), str(rng.choice(["parents", "allowed"]))
    sizes = [bound, *(int(n) for n in (rng.integers(0, bound + 1, 4) if ragged else [bound] * 4))]
    if name == "parents":
        trees = [np.array([rng.integers(-1, max(i, 0)) for i in range(n)], np.int32) for n in sizes]
    else:
        trees = [rng.integers(0, 2, (n, bound)).astype(bool) for n in sizes]
    own = [tree if name == "parents" else tree[:, : len(tree)] for tree in trees if len(tree)]
    expected = np.concatenate([draft_mask(**{name: tree[None]}, max_q_len=bound)[0] for tree in own])
    whole = np.concatenate(trees)
    arrays = {"out": mirror.make(expected.shape, np.uint16), name: mirror.make(whole.shape, whole.dtype)}
    arrays[name][...] = whole
    if ragged:
        arrays["q_cu_seq_lens"] = np.cumsum([0, *sizes]).astype(np.int32)
    shapes = {} if ragged else {"out": (5, bound, -1), name: (5, bound, *whole.shape[1:])}
    tensors = {n: mirror.place(a.reshape(shapes.get(n, a.shape)), _DTYPES.get(n)) for n, a in arrays.items()}
    plan = plan_draft_mask(**tensors, runtime=runtime)
    plan.run(**tensors)
    mirror.download(arrays["out"])
    np.testing.assert_array_equal(arrays["out"], expected, f"{name}, bound {bound}, {sizes}")
    return plan
