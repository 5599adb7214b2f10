"""torch tensors on fast paths: what changed in place is refused, modes of torch are minded. Its CPU build serves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest

from cubin_runtime.attention import Runtime, context_attention, mla_decode, paged_decode, pipeline, plan_paged_decode
from cubin_runtime.attention.fast_path import guards, operator_function
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.launch import senders
from cubin_runtime.launch.workspace import SemaphoreWorkspace
from cubin_runtime.testing import StandIn
from tests.attention.fast_path_calls import FullPaths, placed, suspended
from tests.attention.host_tensors import memory_of_host_tensors

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BF16 = torch.bfloat16


@pytest.fixture(params=["accelerator", "accelerator of an older torch", "guards", "attributes"])
def runtime(runtime: Runtime, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """One for whose calls host tensors are on device 0, compared by the accelerator, torch's guards or attributes."""
    runtime.memory = memory_of_host_tensors(monkeypatch)
    if request.param == "accelerator of an older torch":
        monkeypatch.setattr(guards, "exchange_api", lambda: None)
    elif request.param != "accelerator":
        monkeypatch.setattr(guards, "accelerator", lambda: None)
        monkeypatch.setattr(senders, "accelerator", lambda: None)
    if request.param == "attributes":
        monkeypatch.setattr(guards, "_guards_work", lambda: False)
    return runtime


def given(**changes: Any) -> dict[str, Any]:
    made = {
        "q": torch.zeros(2, 32, 128, dtype=BF16),
        "k_cache": torch.zeros(8, 64, 4, 128, dtype=BF16),
        "v_cache": torch.zeros(8, 64, 4, 128, dtype=BF16),
        "page_table": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "out": torch.zeros(2, 32, 128, dtype=BF16),
    }
    return {**made, **changes}


def ragged(tokens: int) -> dict[str, Any]:
    rows = {name: torch.zeros(tokens, 32, 128, dtype=BF16) for name in ("q", "out")}
    return given(**rows, q_cu_seq_lens=torch.zeros(3, dtype=torch.int32))


def latent() -> dict[str, Any]:
    made = {"q": torch.zeros(2, 16, 576, dtype=BF16), "kv_cache": torch.zeros(8, 64, 576, dtype=BF16)}
    more = {name: value for name, value in given().items() if name in ("page_table", "seq_lens")}
    return {**made, **more, "softmax_scale": 0.1, "out": torch.zeros(2, 16, 512, dtype=BF16)}


def flashinfer_s() -> dict[str, Any]:
    own = given()
    return {
        "query": own["q"],
        "kv_cache": (own["k_cache"], own["v_cache"]),
        "workspace_buffer": torch.zeros(16 << 20, dtype=torch.uint8),
        "block_tables": own["page_table"],
        "seq_lens": own["seq_lens"],
        "max_seq_len": 256,
        "kv_layout": "NHD",
        "out": own["out"],
    }


def shorten(tensor: Any) -> None:
    tensor.data = tensor.data[:1]


def reinterpret(tensor: Any) -> None:
    tensor.data = tensor.data.view(torch.float16)


def misplace(tensor: Any) -> None:
    tensor.data = torch.zeros(1 + tensor.numel(), dtype=tensor.dtype)[1:].view(tensor.shape)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data shortened": shorten,
    "data of another dtype": reinterpret,
    "data at an odd address": misplace,
    "transposed": lambda tensor: tensor.transpose_(0, 1),
    "resized": lambda tensor: tensor.resize_(1, 32, 128),
    "strides set": lambda tensor: tensor.as_strided_((2, 32, 128), (4096, 64, 1)),
    "memory taken": lambda tensor: tensor.untyped_storage().resize_(0),
}


def sent(standin: StandIn) -> list[str]:
    return [launch.seen["parameter0"] for launch in standin.calls("cuLaunchKernelEx")]


def test_memory_that_torch_lends_is_asked_for_by_each_call_of_any_size(runtime: Runtime, standin: StandIn) -> None:
    context = runtime.driver.primary_context(0)
    regions = ((0x7F_F100_0000_00, 1 << 16), (0x7F_F200_0000_00, 9 << 20))  # too small for the 16-bit copy
    own = {name: torch.zeros(64, 64, 8, 128, dtype=torch.float8_e4m3fn) for name in ("k", "v")}
    own |= {"seq_lens": torch.ones(1, dtype=torch.int32), "page_table": torch.zeros(1, 64, dtype=torch.int32)}
    own |= {"q_cu_seq_lens": torch.zeros(2, dtype=torch.int32)}

    def call(tokens: int) -> None:
        rows = {name: torch.zeros(tokens, 32, 128, dtype=BF16) for name in ("q", "out")}
        options = {"max_seq_len": 4096, "max_q_len": tokens, "workspace": SemaphoreWorkspace(*regions, context)}
        context_attention(**own, **rows, **options, runtime=runtime)

    for tokens in (3, 4, 5, 2000, 2000, 2000, 2000):
        standin.clear_log()
        call(tokens)
    assert len(sent(standin)) > 1  # the conversion, and attention


def test_scales_without_a_dimension_have_a_path_for_any_size(runtime: Runtime, full_paths: FullPaths) -> None:
    caches = {name: torch.zeros(8, 64, 4, 128, dtype=torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    scales = {name: torch.ones(()) for name in ("k_scale", "v_scale")}  # as of a layer of vLLM
    for tokens in range(2, 8):
        paged_decode(**ragged(tokens) | caches | scales, max_q_len=8, max_seq_len=256, runtime=runtime)
    assert full_paths.count == 2


CALLS: dict[str, Callable[[Runtime], Callable[[], Any]]] = {
    "paged_decode": lambda runtime: _call(paged_decode, max_seq_len=256, runtime=runtime, **given()),
    "mla_decode": lambda runtime: _call(mla_decode, max_seq_len=256, runtime=runtime, **latent()),
    "xqa_batch": lambda _: _call(flashinfer.xqa_batch_decode_with_kv_cache, **flashinfer_s()),
    "trtllm_batch": lambda _: _call(flashinfer.trtllm_batch_decode_with_kv_cache, **flashinfer_s()),
}


def test_one_tensor_may_be_two_arguments(runtime: Runtime, full_paths: FullPaths) -> None:
    own = given()
    own["v_cache"] = own["k_cache"]
    for _ in range(3):
        paged_decode(**own, max_seq_len=256, runtime=runtime)
    assert full_paths.count == 1
    paged_decode(**own | {"v_cache": torch.zeros_like(own["k_cache"])}, max_seq_len=256, runtime=runtime)
    assert full_paths.count == 2


def _call(function: Callable[..., Any], **arguments: Any) -> Callable[[], Any]:
    return lambda: function(**arguments)


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_takes_the_fast_path(
    runtime: Runtime, standin: StandIn, full_paths: FullPaths, name: str
) -> None:
    call = CALLS[name](runtime)
    for _ in range(3):
        call()
    assert full_paths.count == 1
    with suspended():
        call()
    assert len(sent(standin)) == 4
    assert len(set(sent(standin))) == 1


@pytest.mark.parametrize("face", ["run", "step", "step of a layer"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_in_place_is_refused(runtime: Runtime, standin: StandIn, change: str, face: str) -> None:
    own = given()
    plan = plan_paged_decode(**own, max_seq_len=256, runtime=runtime)
    bound = ("k_cache", "v_cache") if face == "step of a layer" else ()
    step = plan.bind(**{name: own[name] for name in bound})
    moving = {name: value for name, value in own.items() if name not in bound}

    def send() -> None:
        plan.run(**own) if face == "run" else step.step(**moving)

    for _ in range(3):
        send()
    CHANGES[change](own["q"])
    for _ in range(2):
        with pytest.raises(UsageError, match=r"^q: "):
            send()
    assert len(sent(standin)) == 3


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_in_place_is_for_a_function_another_call(runtime: Runtime, standin: StandIn, change: str) -> None:
    own = given()
    for _ in range(3):
        paged_decode(**own, max_seq_len=256, runtime=runtime)
    CHANGES[change](own["q"])
    operator, full = outcomes(own, standin, runtime)
    assert operator == full


def outcomes(arguments: dict[str, Any], standin: StandIn, runtime: Runtime) -> list[str]:
    """What a call sends, or its error: of the operator, and of its full path."""
    found = []
    for function in (paged_decode, paged_decode.__wrapped__):
        standin.clear_log()
        try:
            function(**_complete(arguments), runtime=runtime)
            found.append(str(sent(standin)))
        except UsageError as error:
            found.append(str(error))
    return found


def _complete(arguments: dict[str, Any]) -> dict[str, Any]:
    defaults = paged_decode.__wrapped__.__kwdefaults__
    return {name: value for name, value in {**defaults, **arguments, "max_seq_len": 256}.items() if name != "runtime"}


UNFAITHFUL: dict[str, Callable[[Any], Any]] = {
    "negated": torch._neg_view,
    "with a tangent": lambda tensor: torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor)),
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "sparse": lambda tensor: tensor.to_sparse_csr(),
    "number": lambda _: 1.0,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("face", ["paged_decode", "any size", "run", "step", "step of a layer"])
@pytest.mark.parametrize("form", UNFAITHFUL)
def test_a_tensor_that_is_not_what_its_memory_holds_is_refused(
    runtime: Runtime, standin: StandIn, form: str, face: str
) -> None:
    own = given()
    plan = plan_paged_decode(**own, max_seq_len=256, runtime=runtime)
    bound = ("k_cache", "v_cache") if face == "step of a layer" else ()
    step = plan.bind(**{name: own[name] for name in bound})
    for batch in (3, 4, 5) if face == "any size" else ():
        paged_decode(**of_batch(batch), max_seq_len=256, runtime=runtime)

    def send(**changes: Any) -> None:
        arguments = {**own, **changes}
        if face in ("paged_decode", "any size"):
            paged_decode(**arguments, max_seq_len=256, runtime=runtime)
        elif face == "run":
            plan.run(**arguments)
        else:
            step.step(**{name: value for name, value in arguments.items() if name not in bound})

    for _ in range(3):
        send()
    standin.clear_log()
    with torch.autograd.forward_ad.dual_level():
        for name in ("q", "out"):
            for _ in range(2):
                with pytest.raises(UsageError, match=f"^{name}: "):
                    send(**{name: UNFAITHFUL[form](own[name])})
        assert sent(standin) == []
        send()
    send()
    assert len(sent(standin)) == 2


def test_tensors_that_dlpack_does_not_describe_are_compared_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def test_of(*sizes: int) -> Any:
        example = torch.zeros(sizes)
        test = guards.form_test([example], [list(sizes)], [list(example.stride())])
        assert test is not None
        assert test(torch.ones(sizes))
        assert not test(torch.ones(*sizes, 1))
        return test

    named = "alike" if guards.accelerator() is not None and guards.exchange_api() is not None else "guard"
    assert (test_of(2, 3).__name__, test_of(*[1] * 7).__name__) == (named, "guard")
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", object(), raising=False)  # as of a later version
    assert test_of(2, 3).__name__ == "guard"


def test_calls_go_on_with_a_torch_whose_exchange_api_is_unknown(
    runtime: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", object(), raising=False)
    own = given()
    step = plan_paged_decode(**own, max_seq_len=256, runtime=runtime).bind(**own)
    for batch in (3, 4, 5, 5, 5):
        step.step()
        paged_decode(**of_batch(batch, out=None), max_seq_len=256, runtime=runtime)
    assert len(sent(standin)) == 10


@pytest.mark.parametrize("name", ["q", "out"])
def test_a_lazily_negated_tensor_is_refused(runtime: Runtime, standin: StandIn, name: str) -> None:
    halves = {key: t.half() for key, t in given().items() if t.dtype is BF16}
    own = given(**halves)
    for _ in range(3):
        paged_decode(**own, max_seq_len=256, runtime=runtime)
    parts = torch.view_as_complex(torch.zeros(2, 32, 128, 2, dtype=torch.half)).conj().imag
    negated = torch._neg_view(own[name])
    assert negated.is_neg()
    assert parts.is_neg(), "as public functions make one"
    for tensor in (negated, parts):
        with pytest.raises(UsageError, match=f"^{name}: "):
            paged_decode(**own | {name: tensor}, max_seq_len=256, runtime=runtime)
    assert len(sent(standin)) == 3


def test_an_output_is_made_for_each_call(runtime: Runtime, full_paths: FullPaths) -> None:
    own = given(out=None)
    outs = [paged_decode(**own, max_seq_len=256, runtime=runtime) for _ in range(3)]
    assert len({out.data_ptr() for out in outs}) == 3
    assert {(tuple(out.shape), out.dtype) for out in outs} == {((2, 32, 128), BF16)}
    assert full_paths.count == 1


def of_batch(batch: int, **changes: Any) -> dict[str, Any]:
    """The call with so many requests."""
    own = given(**changes)
    sized = ("q", "page_table", "seq_lens", "out")
    return {name: t.new_zeros(batch, *t.shape[1:]) if name in sized and t is not None else t for name, t in own.items()}


def launched(standin: StandIn) -> dict[str, str]:
    """The launch, but for how its parameters are aligned on the host."""
    return {name: value for name, value in standin.call("cuLaunchKernelEx").items() if name != "aligned0"}


def in_full(arguments: dict[str, Any], standin: StandIn, runtime: Runtime) -> dict[str, str]:
    """What the full path launches."""
    standin.clear_log()
    with suspended():
        paged_decode(**arguments, max_seq_len=256, runtime=runtime)
    return launched(standin)


def test_batches_of_any_size_share_a_path(runtime: Runtime, standin: StandIn, full_paths: FullPaths) -> None:
    for batch in (3, 1, *range(4, 30)):
        own = of_batch(batch)
        standin.clear_log()
        paged_decode(**own, max_seq_len=256, runtime=runtime)
        sent, full = launched(standin), in_full(own, standin, runtime)
        assert placed(repr(sent), runtime) == placed(repr(full), runtime)
    assert full_paths.count == 2


def test_batches_of_any_size_share_the_workspaces_of_few_plans(runtime: Runtime, standin: StandIn) -> None:
    standin.clear_log()
    for batch in range(1, 60):
        paged_decode(**of_batch(batch), max_seq_len=256, runtime=runtime)
    assert 1 < len(standin.calls("cuMemAlloc")) == len(runtime.plans._plans) < 8


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_in_place_is_another_call_to_a_path_for_any_size(
    runtime: Runtime, standin: StandIn, change: str
) -> None:
    for batch in (3, 4, 5):
        paged_decode(**of_batch(batch), max_seq_len=256, runtime=runtime)
    own = of_batch(2)
    paged_decode(**own, max_seq_len=256, runtime=runtime)
    CHANGES[change](own["q"])
    operator, full = outcomes(own, standin, runtime)
    assert operator == full


def test_outputs_are_made_in_the_size_of_each_call(runtime: Runtime, full_paths: FullPaths) -> None:
    outs = [paged_decode(**of_batch(batch, out=None), max_seq_len=256, runtime=runtime) for batch in range(1, 9)]
    assert [tuple(out.shape) for out in outs] == [(batch, 32, 128) for batch in range(1, 9)]
    assert full_paths.count == 2


def test_an_output_is_made_where_another_context_is_current(
    runtime: Runtime, standin: StandIn, full_paths: FullPaths
) -> None:
    kept = [paged_decode(**of_batch(batch, out=None), max_seq_len=256, runtime=runtime) for batch in (3, 4, 5, 5, 5)]
    runtime.driver.set_current(standin.make_context(0))
    standin.clear_log()
    out = paged_decode(**of_batch(5, out=None), max_seq_len=256, runtime=runtime)
    assert out.data_ptr().to_bytes(8, "little").hex() in str(standin.call("cuLaunchKernelEx"))
    assert (full_paths.count, len(kept)) == (2, 5)


def test_rows_between_other_columns_get_a_contiguous_output_in_any_size(runtime: Runtime) -> None:
    for batch in range(1, 9):
        own = of_batch(batch, out=None) | {"q": torch.zeros(batch, 48, 128, dtype=BF16)[:, 16:]}
        out = paged_decode(**own, max_seq_len=256, runtime=runtime)
        assert (tuple(out.shape), out.is_contiguous()) == ((batch, 32, 128), True)


def test_tensors_that_require_grad_are_refused_with_grad_mode_on(runtime: Runtime, full_paths: FullPaths) -> None:
    own = given()
    for _ in range(2):
        paged_decode(**own, max_seq_len=256, runtime=runtime)
    own["q"].requires_grad_()
    for _ in range(2):
        with pytest.raises(UsageError, match="q: requires grad"):
            paged_decode(**own, max_seq_len=256, runtime=runtime)
        with torch.no_grad():
            paged_decode(**own, max_seq_len=256, runtime=runtime)
            paged_decode(**own, max_seq_len=256, runtime=runtime)
    # The accelerator sends the calls without grad as before; for a guard, they are of another form.
    assert full_paths.count == (4 if guards.exchange_api() is None or guards.accelerator() is None else 3)


@pytest.mark.parametrize("part", [0, 1])
def test_a_traced_cache_that_requires_grad_is_refused(runtime: Runtime, part: int) -> None:
    from torch._subclasses import FakeTensorMode

    own = flashinfer_s()
    own["kv_cache"][part].requires_grad_()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(UsageError, match="kv_cache: requires grad"):
            flashinfer.xqa_batch_decode_with_kv_cache(**own)
        with torch.no_grad():
            flashinfer.xqa_batch_decode_with_kv_cache(**own)


def test_inference_tensors_are_taken(runtime: Runtime, standin: StandIn) -> None:
    with torch.inference_mode():
        own = given()
        for _ in range(3):
            paged_decode(**own, max_seq_len=256, runtime=runtime)
    assert len(set(sent(standin))) == 1
    assert len(sent(standin)) == 3


def test_a_class_of_tensors_goes_through_the_op(runtime: Runtime, standin: StandIn) -> None:
    class Logged(torch.Tensor):
        seen: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.append(str(func))

    own = given()
    paged_decode(**own, max_seq_len=256, runtime=runtime)
    standin.clear_log()
    own["q"] = torch.Tensor._make_subclass(Logged, own["q"])
    paged_decode(**own, max_seq_len=256)
    assert Logged.seen == ["cubin_runtime.paged_decode.default"]
    assert sent(standin) == []


def test_fake_tensors_go_through_the_op(runtime: Runtime, standin: StandIn) -> None:
    from torch._subclasses import FakeTensorMode

    own = given(out=None)
    paged_decode(**own, max_seq_len=256, runtime=runtime)
    standin.clear_log()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) if value is not None else None for name, value in own.items()}
        assert paged_decode(**fake, max_seq_len=256).shape == (2, 32, 128)
    assert sent(standin) == []


@pytest.mark.parametrize("name", ["paged_decode", "xqa_batch"])
def test_torch_traces_one_op_for_a_call(runtime: Runtime, standin: StandIn, name: str) -> None:
    own, theirs, graphs = given(), flashinfer_s(), []
    del own["q"], own["out"], theirs["query"], theirs["out"]
    function: Callable[[Any], Any] = {
        "paged_decode": lambda q: paged_decode(q, **own, max_seq_len=256),
        "xqa_batch": lambda q: flashinfer.xqa_batch_decode_with_kv_cache(q, **theirs),
    }[name]
    q = torch.zeros(2, 32, 128, dtype=BF16)
    function(q)
    standin.clear_log()

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return lambda *_: (q,)

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=backend)(q)
    (graph,) = graphs
    ops = [str(node.target) for node in graph.graph.nodes if "cubin_runtime" in str(node.target)]
    assert len(ops) == 1
    assert sent(standin) == []


def test_use_on_another_stream_is_recorded(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    uses: list[tuple[int, int]] = []
    noted = "cubin_runtime.attention.fast_path.{}.record_use"
    for module in ("operator_function", "path"):
        monkeypatch.setattr(noted.format(module), lambda stream, _, tensors: uses.append((stream, len(tensors))))
    own, side = given(out=None), runtime.driver.create_stream()
    for _ in range(3):
        paged_decode(**own, max_seq_len=256, runtime=runtime, stream=side)
    paged_decode(**own, max_seq_len=256, runtime=runtime, stream=0)
    assert uses == [(side, 6)] * 3


@pytest.mark.parametrize("of_any_size", [False, True])
def test_each_graph_that_torch_captures_has_scratch_of_its_own(
    runtime: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch, of_any_size: bool
) -> None:
    stream = runtime.driver.create_stream()
    monkeypatch.setattr(runtime.memory, "current_stream", lambda like: stream)
    monkeypatch.setattr(runtime.memory, "stream_query", lambda device: stream, raising=False)
    of_graphs: list[Any] = []

    def torch_bytes(size: int, device: int, *, zeroed: bool) -> Any:
        of_graphs.append(torch.zeros(size, dtype=torch.uint8))
        return of_graphs[-1]

    monkeypatch.setattr(pipeline, "torch_bytes", torch_bytes)
    if of_any_size:
        monkeypatch.setattr(operator_function, "FULL_RUNS", 1 << 30)
        for tokens in (3, 4, 2, 2, 2):
            paged_decode(**ragged(tokens), max_seq_len=256, max_q_len=4, runtime=runtime)
        assert [len(paths.entries) for paths in runtime.family_paths.values()] == [1]
    tensors = ragged(2) | {"max_q_len": 4} if of_any_size else given()
    of_new_size = ragged(7) | {"max_q_len": 4} if of_any_size else tensors  # whose first call is captured

    def counters(tensors: dict[str, Any] = tensors) -> object:
        paged_decode(**tensors, max_seq_len=256, runtime=runtime)
        sent = bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"])
        return PAGED_DECODE_TMA.unpack(sent)["counters"]

    eager = {counters() for _ in range(2)}
    captured = []
    for called in (tensors, tensors, of_new_size, tensors, of_new_size):
        runtime.driver.begin_capture(stream)
        captured.append(counters(called))
        runtime.driver.end_capture(stream)
    assert len(eager) == 1
    assert len(set(captured)) == 5


@pytest.mark.parametrize("face", ["run", "step", "paged_decode"])
def test_tensors_and_plans_are_gone_when_they_are_dropped(runtime: Runtime, face: str) -> None:
    gc.collect()
    gc.disable()
    try:
        own = given()
        plan = plan_paged_decode(**own, max_seq_len=256, runtime=runtime)
        step = plan.bind(**own)
        for _ in range(4):
            if face == "run":
                plan.run(**own)
            elif face == "step":
                step.step()
            else:
                paged_decode(**own, max_seq_len=256, runtime=runtime)
        gone = [ref(plan), ref(step), *map(ref, own.values())]
        del plan, step, own
        assert [reference() for reference in gone if reference() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("columns", "requests", "transform"),
    [(32, (2, 2, 2), torch.func.grad), (32, (2, 1, 2), torch.func.grad), (48, (2, 2, 2), torch.func.functionalize)],
    ids=["grad", "grad, calls of any size", "functionalize"],
)
def test_an_output_without_memory_of_a_function_transform_is_refused_after_calls_like_it_too(
    runtime: Runtime, standin: StandIn, columns: int, requests: tuple[int, ...], transform: Any
) -> None:
    # For rows between other columns the output is made from nothing, which functionalize wraps.
    queries = [torch.zeros(batch, columns, 128, dtype=BF16)[:, -32:] for batch in requests]
    calls = [of_batch(len(q), out=None) | {"q": q} for q in queries]
    for _ in range(2):
        for own in calls:
            paged_decode(**own, max_seq_len=256, runtime=runtime)
    standin.clear_log()

    def traced(x: Any) -> Any:
        paged_decode(**calls[-1], max_seq_len=256, runtime=runtime)
        return x

    with pytest.raises(UsageError, match="out: "):
        transform(traced)(torch.zeros(()))
    assert sent(standin) == []


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
@pytest.mark.parametrize("name", ["paged_decode", "calls of any size", "xqa_batch", "plan.run"])
def test_a_tensor_of_a_function_transform_is_refused_after_calls_like_it_too(
    runtime: Runtime, standin: StandIn, name: str, transform: str
) -> None:
    own, compat = given(), flashinfer_s()
    plan, out = plan_paged_decode(**own, max_seq_len=256, runtime=runtime), own.pop("out")

    def call(q: Any) -> Any:
        if name == "xqa_batch":
            return flashinfer.xqa_batch_decode_with_kv_cache(**{**compat, "query": q})
        return plan.run(**{**own, "q": q, "out": out}) if name == "plan.run" else sized(q)

    def sized(q: Any) -> Any:
        requests = len(q)
        rows = {name: own[name][:requests] for name in ("page_table", "seq_lens")}
        return paged_decode(**{**own, **rows, "q": q}, max_seq_len=256, runtime=runtime)

    for requests in (2, 1, 2, 2, 2) if name == "calls of any size" else (2, 2, 2, 2):
        call(own["q"][:requests])
    transforms = {
        "vmap": lambda: torch.vmap(call)(own["q"].unsqueeze(0)),
        "grad": lambda: torch.func.grad(lambda q: call(q).sum())(own["q"]),
        "functionalize": lambda: torch.func.functionalize(call)(own["q"]),
    }
    before = len(sent(standin))
    with pytest.raises((RuntimeError, UsageError)) as refused:
        transforms[transform]()
    assert not str(refused.value).startswith("Cannot access data pointer")  # which names no argument
    assert len(sent(standin)) == before
