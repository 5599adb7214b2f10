"""Arguments of the merge and of the gathering of heads, and which collective operations they run: groups made up."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.distributed import ContextParallelMerge, HeadGather, collectives, context_merge, head_gather
from cubin_runtime.errors import UsageError
from tests.distributed.divided_attention import merge_on_host

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
EXCHANGES = ("all_to_all", "gather_reduce")


class Group:
    """A group of some ranks, of which this process is the last; its operations are written down and do nothing."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.calls: list[tuple[str, Any, Any]] = []

    def operation(self, name: str) -> Any:
        def run(received: Any, sent: Any, group: Any) -> None:
            assert group is self
            self.calls.append((name, received, sent))

        return run


@pytest.fixture(params=[1, 2, 3, 4])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group(request.param)
    for module in (context_merge, head_gather):
        monkeypatch.setattr(module, "world_and_rank", lambda group: (group.world, group.world - 1))
        for name in ("all_gather", "all_to_all", "reduce_scatter"):
            monkeypatch.setattr(module, name, made.operation(name), raising=False)
    return made


def merge_of(group: Any, **changed: Any) -> ContextParallelMerge:
    given = {"tokens": 5, "heads": 12, "head_dim": 16, "dtype": torch.float32, "device": "cpu", "merge": merge_on_host}
    return ContextParallelMerge(group, **{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": 0}, "tokens=0: expected 1 or more"),
        ({"heads": 0}, "heads=0: expected a multiple of the group's"),
        ({"head_dim": 0}, "head_dim=0: expected a multiple of 8"),
        ({"head_dim": -8}, "head_dim=-8: expected a multiple of 8"),
        ({"head_dim": 4}, "head_dim=4: expected a multiple of 8"),
        ({"head_dim": 12}, "head_dim=12: expected a multiple of 8"),
        ({"exchange": "all2all"}, "exchange='all2all': expected 'all_to_all' or 'gather_reduce'"),
        ({"tokens": 5.0}, "tokens=5.0: expected an integer"),
        ({"heads": "12"}, "heads='12': expected an integer"),
        ({"head_dim": None}, "head_dim=None: expected an integer"),
        ({"lse_base": "10"}, "lse_base='10': expected '2' or 'e'"),
        ({"dtype": torch.float64}, "^dtype=float64: expected bfloat16, float16 or float32"),
        ({"dtype": None}, "^dtype=None: expected bfloat16"),
        ({"reduce_dtype": torch.int32}, "^reduce_dtype=int32: expected bfloat16"),
    ],
)
def test_what_is_refused(group: Group, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        merge_of(group, **changed)


def test_heads_are_a_multiple_of_the_ranks(group: Group) -> None:
    assert merge_of(group, heads=group.world).own_heads == 1
    if group.world > 1:
        with pytest.raises(UsageError, match=f"heads={group.world + 1}: expected a multiple of the group's"):
            merge_of(group, heads=group.world + 1)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [{}, {"tokens": 1, "head_dim": 8}])
def test_a_decode_writes_where_the_exchange_sends(group: Group, exchange: str, dtype: Any, sizes: Any) -> None:
    made = merge_of(group, exchange=exchange, dtype=dtype, **sizes)
    tokens, dim = made.tokens, made.head_dim
    assert (made.heads, made.own_heads) == (12, 12 // group.world)
    assert (made.out.shape, made.lse.shape) == ((tokens, 12, dim), (tokens, 12))
    assert (made.out.dtype, made.lse.dtype, made.out.stride(2)) == (dtype, torch.float32, 1)
    # Rows of outputs and values of the merge are read 16 bytes at a time.
    assert made.out.stride(0) * made.out.element_size() % 16 == made.out.stride(1) * made.out.element_size() % 16 == 0
    made.out.fill_(1)
    made.lse.fill_(2)
    assert (made.out == 1).all()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_steps_are_communication_and_merges_in_turn(group: Group, exchange: str) -> None:
    made = merge_of(group, exchange=exchange)
    steps = made.steps(torch.empty(5, made.own_heads, 16))
    assert [step.kind for step in steps] == ["communication", "merge"] * (1 if exchange == "all_to_all" else 2)
    for step in steps:
        if step.kind == "communication":
            step.run()
    names = ["all_to_all"] if exchange == "all_to_all" else ["all_gather", "reduce_scatter"]
    assert [name for name, _, _ in group.calls] == names
    if exchange == "all_to_all":
        ((_, received, sent),) = group.calls
        assert received.shape == sent.shape == (12, 5, 4 * (16 + 4))
        assert (received.dtype, received.is_contiguous(), sent.is_contiguous()) == (torch.uint8, True, True)
    else:
        (_, lses, lse), (_, reduced, weighed) = group.calls
        assert (tuple(lses.shape), tuple(lse.shape)) == ((12 * group.world, 5), (12, 5))
        assert (tuple(reduced.shape), tuple(weighed.shape)) == ((made.own_heads, 5, 16), (12, 5, 16))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_scaled_outputs_have_their_own_dtype(group: Group, dtype: Any) -> None:
    made = merge_of(group, exchange="gather_reduce", dtype=torch.float16, reduce_dtype=dtype)
    for step in made.steps(torch.empty(5, made.own_heads, 16)):
        if step.kind == "communication":
            step.run()
    _, (_, reduced, weighed) = group.calls
    assert reduced.dtype == weighed.dtype == (torch.float32 if dtype is None else dtype)
    assert made.out.dtype == torch.float16


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("name", "shape"), [("out", (5, 12, 8)), ("out", (4, 12, 16)), ("lse", (5, 11)), ("lse", (4, 12)), ("sinks", (11,))]
)
def test_tensors_of_another_shape_are_refused(exchange: str, name: str, shape: tuple[int, ...]) -> None:
    made = merge_of(None, exchange=exchange)
    given = {"out": torch.empty(5, 12, 16), name: torch.empty(shape)}
    with pytest.raises(UsageError, match=f"{name}: shape"):
        made.merge(**given)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("name", "shape"), [("out", (5, 12, 16)), ("lse", (5, 12)), ("sinks", (12,))])
def test_tensors_of_another_dtype_are_refused_before_ranks_wait(
    exchange: str, name: str, shape: tuple[int, ...]
) -> None:
    given = {"out": torch.empty(5, 12, 16), name: torch.empty(shape, dtype=torch.float64)}
    with pytest.raises(UsageError, match=f"{name}: dtype float64, expected"):
        merge_of(None, exchange=exchange).steps(**given)


@pytest.fixture(autouse=True)
def one_rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "group" not in request.fixturenames:
        monkeypatch.setattr(context_merge, "world_and_rank", lambda group: (1, 0))


def test_queries_of_all_ranks_are_received_heads_first(group: Group) -> None:
    gather = HeadGather(group, tokens=5, own_heads=3, head_dim=8, dtype=torch.float32, device="cpu")
    q = torch.rand(5, 3, 8)
    assert gather(q).shape == (5, 3 * group.world, 8)
    ((name, received, sent),) = group.calls
    assert (name, tuple(received.shape)) == ("all_gather", (3 * group.world, 5, 8))
    assert torch.equal(sent, q.transpose(0, 1))


@pytest.mark.parametrize(("name", "size", "words"), [("tokens", 0, "1 or more"), ("own_heads", 1.5, "an integer")])
def test_sizes_of_no_queries_are_refused(group: Group, name: str, size: Any, words: str) -> None:
    sizes = {"tokens": 5, "own_heads": 3, "head_dim": 8, name: size}
    with pytest.raises(UsageError, match=f"{name}={size}: expected {words}"):
        HeadGather(group, **sizes, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("shape", [(4, 3, 8), (5, 2, 8), (5, 3, 16), (3, 5, 8)])
def test_queries_of_another_shape_are_refused(group: Group, shape: tuple[int, ...]) -> None:
    gather = HeadGather(group, tokens=5, own_heads=3, head_dim=8, dtype=torch.float32, device="cpu")
    with pytest.raises(UsageError, match=r"q: shape \(.*\), expected \(5, 3, 8\)"):
        gather(torch.zeros(shape))
    assert group.calls == []


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (collectives.all_gather, "all_gather_into_tensor", "all_gather_single"),
        (collectives.reduce_scatter, "reduce_scatter_tensor", "reduce_scatter_single"),
        (collectives.all_to_all, "all_to_all_single", "all_to_all_single"),
    ],
)
@pytest.mark.parametrize("has_new", [False, True])
def test_operations_under_the_names_of_a_torch_version(
    function: Any, old: str, new: str, has_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, calls = object(), []
    monkeypatch.delattr(torch.distributed, new, raising=False)
    for name in (old, *([new] if has_new else [])):
        monkeypatch.setattr(
            torch.distributed, name, lambda *given, group, name=name: calls.append((name, *given, group)), raising=False
        )
    function("received", "sent", group)
    assert calls == [(new if has_new else old, "received", "sent", group)]


def test_a_group_says_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda asked: 4 if asked is group else 0)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda asked: 3 if asked is group else 0)
    assert collectives.world_and_rank(group) == (4, 3)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sinks_with_gaps_are_refused_before_ranks_wait(group: Group, exchange: str) -> None:
    made = merge_of(group, exchange=exchange)
    with pytest.raises(UsageError, match=r"sinks: strides \(2,\), expected a contiguous tensor"):
        made.merge(torch.empty(5, made.own_heads, 16), sinks=torch.zeros(24)[::2])
    assert group.calls == []


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(12, device="meta"), "sinks: on meta, expected cpu"),
        (torch.zeros(12, requires_grad=True), "sinks: requires grad"),
    ],
)
def test_sinks_that_a_merge_cannot_read_are_refused_before_ranks_wait(
    group: Group, exchange: str, sinks: torch.Tensor, message: str
) -> None:
    made = merge_of(group, exchange=exchange)
    with pytest.raises(UsageError, match=message):
        made.merge(torch.empty(5, made.own_heads, 16), sinks=sinks)
    assert group.calls == []
