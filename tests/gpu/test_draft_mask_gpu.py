"""Packing of draft masks on a device, with torch: trees that change in a graph, and a decode by the packed mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cubin_runtime.attention import ClampedInputError, Runtime, draft_mask, paged_decode, plan_draft_mask

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu


def trees(seed: int, batch: int, q_len: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    columns = [np.full(batch, -1), *(rng.integers(-1, token, batch) for token in range(1, q_len))]
    return np.stack(columns, axis=1).astype(np.int32)


def on_gpu(array: np.ndarray) -> Any:
    return torch.from_numpy(array).cuda()


@pytest.mark.parametrize("q_len", [1, 2, 15, 32, 33, 64])
def test_trees_and_booleans_are_packed_as_on_the_host(runtime: Runtime, q_len: int) -> None:
    parents = trees(q_len, 64, q_len)
    allowed = np.random.default_rng(q_len).integers(0, 2, (64, q_len, q_len)).astype(bool)
    for name, tree in (("parents", parents), ("allowed", allowed)):
        packed = draft_mask(**{name: on_gpu(tree)}, runtime=runtime)
        np.testing.assert_array_equal(packed.cpu().numpy(), draft_mask(**{name: tree}))


def test_trees_of_different_size(runtime: Runtime) -> None:
    sizes = [3, 0, 64, 17, 1]
    parents = [trees(size, 1, size)[0] if size else np.zeros(0, np.int32) for size in sizes]
    sums = on_gpu(np.cumsum([0, *sizes]).astype(np.int32))
    flat = on_gpu(np.concatenate(parents))
    packed = draft_mask(parents=flat, q_cu_seq_lens=sums, max_q_len=64, runtime=runtime)
    np.testing.assert_array_equal(
        packed.cpu().numpy(), draft_mask(parents=[list(tree) for tree in parents], max_q_len=64)
    )


def test_a_bad_parent_is_recorded(runtime: Runtime) -> None:
    parents = on_gpu(np.array([[-1, 0, 7]], np.int32))
    out = torch.empty(1, 3, 2, dtype=torch.uint16, device="cuda")
    plan = plan_draft_mask(out, parents=parents, runtime=runtime)
    workspace = plan.prepare(None)
    plan.run(out, parents=parents, workspace=workspace)
    with pytest.raises(ClampedInputError, match="a parent that does not come before its query token"):
        plan.check(workspace)
    assert out.cpu().numpy()[0, :, 0].tolist() == [1, 3, 4]


@pytest.mark.parametrize("q_len", [8, 40])
def test_a_graph_verifies_another_tree_at_each_replay(runtime: Runtime, q_len: int) -> None:
    torch.manual_seed(q_len)
    batch, keys = 3, 300
    q = torch.randn(batch, q_len, 8, 128, device="cuda").bfloat16()
    k, v = torch.randn(2, batch * 5, 64, 2, 128, device="cuda").bfloat16()
    table = torch.arange(batch * 5, device="cuda", dtype=torch.int32).view(batch, 5)
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    parents = on_gpu(trees(0, batch, q_len))
    out = torch.empty_like(q)

    def verify() -> None:
        mask = draft_mask(parents=parents, runtime=runtime)
        paged_decode(q, k, v, table, lengths, max_seq_len=320, mask=mask, out=out, runtime=runtime)

    verify()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify()
    for seed in range(1, 4):
        parents.copy_(on_gpu(trees(seed, batch, q_len)))
        graph.replay()
        replayed = out.clone()
        mask = on_gpu(draft_mask(parents=trees(seed, batch, q_len)))
        paged_decode(q, k, v, table, lengths, max_seq_len=320, mask=mask, out=out, runtime=runtime)
        assert torch.equal(out, replayed)


def test_a_compiled_function_packs_a_tree(runtime: Runtime) -> None:
    parents = on_gpu(trees(1, 4, 9))
    packed = torch.compile(lambda tree: draft_mask(parents=tree), fullgraph=True, backend="eager")(parents)
    np.testing.assert_array_equal(packed.cpu().numpy(), draft_mask(parents=parents.cpu().numpy()))
