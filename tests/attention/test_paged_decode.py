"""The plain function: the plans that it keeps, and what it makes and reads back itself."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, TensorView, paged_decode
from cubin_runtime.attention.fast_path.operator_function import full_path
from cubin_runtime.attention.operators.paged_decode import PAGED_DECODE
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.launch.workspace import SemaphoreWorkspace
from cubin_runtime.tensor import _DLTensor
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import Tensors
from tests.attention.trtllm_calls import MadeUpMemory

GOOD = Tensors()
E4M3 = "float8_e4m3fn"


def call(runtime: Runtime, tensors: Tensors = GOOD, **options: Any) -> Any:
    q, k, v, table, lens, out, lse = tensors.positional
    asked = {"max_seq_len": 1024, "out": out, "lse": lse, "runtime": runtime, **tensors.named, **options}
    return paged_decode(q, k, v, table, lens, **asked)


def sent(standin: StandIn, index: int = -1) -> dict[str, Any]:
    """The parameters of a launch, as they arrived."""
    return PAGED_DECODE_TMA.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[index].seen["parameter0"]))


class Exported:
    """A bf16 view as a tensor of a library that has DLPack alone."""

    def __init__(self, view: TensorView) -> None:
        self.sizes = [(ctypes.c_int64 * len(of))(*of) for of in (view.shape, view.strides)]
        self.tensor = _DLTensor(view.pointer, 2, view.device, len(view.shape), 4, 16, 1, *self.sizes, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, stream: Any = None) -> Any:
        made = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
            ("PyCapsule_New", ctypes.pythonapi)
        )
        return made(ctypes.addressof(self.tensor), b"dltensor", None)


def test_the_default_scale_follows_a_query_that_has_no_shape_attribute(runtime: Runtime, standin: StandIn) -> None:
    call(runtime, replace(GOOD, q=Exported(GOOD.q)))
    assert sent(standin)["softmax_scale_log2"] == pytest.approx(math.log2(math.e) / math.sqrt(128))


def test_a_read_only_output_is_refused(runtime: Runtime, standin: StandIn) -> None:
    described = {"data": (0x7F0030000000, True), "shape": (4, 64), "typestr": "<f4", "version": 3}
    with pytest.raises(UsageError, match=r"^lse: is read-only"):
        call(runtime, lse=SimpleNamespace(__cuda_array_interface__=described))
    assert standin.calls("cuLaunchKernelEx") == []


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bound of each call that was validated in full."""
    seen: list[int] = []
    check = PAGED_DECODE.check
    told = replace(PAGED_DECODE, check=lambda call: (seen.append(call.options.max_seq_len), check(call)))
    monkeypatch.setitem(full_path(paged_decode).__globals__, "PAGED_DECODE", told)
    return seen


def test_it_keeps_its_plan_while_lengths_grow(runtime: Runtime, standin: StandIn, checks: list[int]) -> None:
    for bound in (513, 700, 1024):
        call(runtime, max_seq_len=bound)
    assert [sent(standin, i)["max_seq_len"] for i in range(3)] == [513, 700, 1024]
    assert len(standin.calls("cuModuleLoadData")) == 1
    assert {call.seen["grid"] for call in standin.calls("cuLaunchKernelEx")} == {"4,8,4"}
    assert checks == [513]


@pytest.mark.parametrize("tensors", [GOOD, GOOD.as_torch()], ids=["views", "torch"])
def test_calls_of_one_form_are_checked_once(
    runtime: Runtime, standin: StandIn, checks: list[int], tensors: Tensors
) -> None:
    runtime.memory = MadeUpMemory()
    for scale in (0.1, 0.2):
        call(runtime, tensors, softmax_scale=scale)
    assert sent(standin)["softmax_scale_log2"] == pytest.approx(0.2 * math.log2(math.e))
    assert len(checks) == 1


def test_addresses_of_one_form_may_move(runtime: Runtime, standin: StandIn, checks: list[int]) -> None:
    call(runtime)
    call(runtime, GOOD.changed("q", pointer=0x7F0000009000).changed("v_cache", pointer=0x7F0020000000))
    assert sent(standin)["q"] == 0x7F0000009000
    assert standin.calls("cuTensorMapEncodeTiled")[-1].seen["address"] == hex(0x7F0020000000)
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_seq_len": 1025}, "max_seq_len=1025: expected 0 to 1024"),
        ({"max_seq_len": -1}, "max_seq_len=-1: expected 0 to "),
        ({"max_seq_len": 3.5}, "max_seq_len=3.5: expected an integer"),
        ({"softmax_scale": math.nan}, "softmax_scale=nan"),
        ({"output_scale": math.inf}, "output_scale=inf"),
        ({"softmax_scale": "1"}, "softmax_scale: got str"),
        ({"out": replace(GOOD.out, pointer=0x1004)}, "out: address 0x1004"),
        ({"softmax_scale": 1e300}, r"softmax_scale=1e\+300: expected a finite number"),
        ({"output_scale": 10**400}, "output_scale=inf: expected a finite number"),
        ({"workspace": 3}, "workspace: got int, expected a Workspace"),
        ({"window_left": -5}, "window_left=-5"),
        ({"window_left": [1]}, r"window_left=\[1\]: expected an integer"),
        ({"max_q_len": 2.0}, "max_q_len=2.0: expected an integer"),
        ({"max_q_len": 1}, "max_q_len=1: expected only with q_cu_seq_lens"),
        ({"backend": "fast"}, "backend='fast'"),
        ({"backend": ["fast"]}, r"backend=\['fast'\]: expected a word"),
        ({"kv_layout": ["NHD"]}, r"kv_layout=\['NHD'\]: expected a word"),
        ({"batch_invariant": "no"}, "batch_invariant='no': expected True or False"),
        ({"enable_pdl": "on"}, "enable_pdl='on': expected True or False"),
        ({"batch_invariant": 1}, "batch_invariant=1: expected True or False"),
        ({"enable_pdl": 1}, "enable_pdl=1: expected True or False"),
    ],
)
@pytest.mark.parametrize("planned", [False, True])
def test_what_is_wrong_is_named_with_and_without_a_plan(
    runtime: Runtime, standin: StandIn, options: dict[str, Any], words: str, planned: bool
) -> None:
    if planned:
        call(runtime)
        standin.clear_log()
    with pytest.raises(UsageError, match=words):
        call(runtime, **options)
    assert "cuLaunchKernelEx" not in standin.names()


@pytest.mark.parametrize("name", ["q", "k_cache", "seq_lens"])
@pytest.mark.parametrize("tensors", [GOOD, GOOD.as_torch()], ids=["views", "torch"])
def test_a_tensor_that_is_missing_is_named(runtime: Runtime, tensors: Tensors, name: str) -> None:
    runtime.memory = MadeUpMemory()
    with pytest.raises(UsageError, match=f"{name}: got NoneType, expected a TensorView"):
        call(runtime, replace(tensors, **{name: None}))


def view(dtype: str, *shape: int) -> TensorView:
    return TensorView.contiguous(0x7F0000006000, dtype, shape)


@pytest.mark.parametrize(
    "options",
    [
        {"max_seq_len": 500},
        {"kv_layout": "HND", "k_cache": True},
        {"window_left": 100},
        {"batch_invariant": True},
        {"enable_pdl": True},
        {"backend": "native"},
        {"lse": view("float32", 4, 64)},
        {"mask": view("uint32", 4, 1)},
        {"sinks": view("float32", 64)},
        {"softmax_scale": view("float32", 1)},
        {"output_scale": view("float32", 1)},
        {"out": replace(GOOD.out, dtype="float16")},
    ],
)
def test_every_option_has_a_plan_of_its_own(runtime: Runtime, checks: list[int], options: dict[str, Any]) -> None:
    hnd = {"shape": (100, 8, 64, 128), "strides": (65536, 8192, 128, 1)}
    other = GOOD.changed("k_cache", **hnd).changed("v_cache", **hnd) if options.pop("k_cache", False) else GOOD
    call(runtime)
    call(runtime, other, **options)
    call(runtime)
    assert len(checks) == 2


def test_bounds_of_query_tokens_have_plans_of_their_own(runtime: Runtime, standin: StandIn, checks: list[int]) -> None:
    for bound in (4, 6, 4):
        call(runtime, GOOD.ragged(10), max_q_len=bound)
    assert len(checks) == 2
    assert sent(standin)["q_len"] == 4


def test_a_window_reaches_the_launch(runtime: Runtime, standin: StandIn) -> None:
    call(runtime, window_left=77)
    assert sent(standin)["window_left"] == 77


def ragged(memory: MadeUpMemory, *bounds: int) -> Tensors:
    return GOOD.ragged(10, q_cu_seq_lens=memory.tensor("int32", 5, values=bounds))


def test_the_bound_of_query_tokens_is_read_back_where_none_is_given(runtime: Runtime, standin: StandIn) -> None:
    runtime.memory = memory = MadeUpMemory()
    call(runtime, ragged(memory, 0, 3, 3, 9, 10))
    assert sent(standin)["q_len"] == 6
    assert len(memory.reads) == 1


def test_a_bound_that_is_given_is_taken_without_reading(runtime: Runtime) -> None:
    runtime.memory = memory = MadeUpMemory()
    call(runtime, ragged(memory, 0, 3, 3, 9, 10), max_q_len=8)
    assert memory.reads == []


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((1, 3, 3, 9, 10), r"q_cu_seq_lens: from 1 to 10, expected from 0 to q's 10 tokens"),
        ((0, 3, 3, 9, 9), "q_cu_seq_lens: from 0 to 9, expected from 0 to q's 10"),
        ((0, 5, 3, 9, 10), r"q_cu_seq_lens: 5 is followed by 3, expected none to decrease"),
    ],
)
def test_what_is_read_back_is_checked(runtime: Runtime, bounds: tuple[int, ...], words: str) -> None:
    runtime.memory = memory = MadeUpMemory()
    with pytest.raises(UsageError, match=words):
        call(runtime, ragged(memory, *bounds))


@pytest.mark.parametrize(
    ("dtype", "shape", "words"), [("int64", (5,), "dtype int64"), ("int32", (5, 1), r"shape \(5, 1\)")]
)
def test_what_is_read_back_has_the_form_of_bounds(
    runtime: Runtime, dtype: str, shape: tuple[int, ...], words: str
) -> None:
    runtime.memory = memory = MadeUpMemory()
    with pytest.raises(UsageError, match=f"q_cu_seq_lens: {words}"):
        call(runtime, GOOD.ragged(10, q_cu_seq_lens=memory.tensor(dtype, *shape)))
    assert memory.reads == []


def test_nothing_is_read_back_from_another_device(runtime: Runtime) -> None:
    runtime.memory = memory = MadeUpMemory()
    sums = replace(memory.tensor("int32", 5, values=(0, 3, 3, 9, 10)), device=2)
    with pytest.raises(UsageError, match=r"^q_cu_seq_lens: on device 2, q is on device 0"):
        call(runtime, GOOD.ragged(10, q_cu_seq_lens=sums))
    assert memory.reads == []


def test_a_bound_that_cannot_be_read_back_is_asked_for(runtime: Runtime) -> None:
    with pytest.raises(UsageError, match="max_q_len: None, expected the bound"):
        call(runtime, GOOD.ragged(10))


def test_nothing_is_read_back_while_the_stream_captures(runtime: Runtime, standin: StandIn) -> None:
    runtime.memory = memory = MadeUpMemory(stream=runtime.driver.create_stream())
    runtime.driver.begin_capture(memory.stream)
    with pytest.raises(UsageError, match="max_q_len: None while a stream captures"):
        call(runtime, ragged(memory, 0, 3, 3, 9, 10))
    assert memory.reads == []


@pytest.mark.parametrize("given", [None, False])
def test_no_dependent_launch_may_be_said_in_two_ways(runtime: Runtime, standin: StandIn, given: Any) -> None:
    call(runtime, enable_pdl=given)
    assert "cuLaunchKernelEx" in standin.names()


def test_a_request_of_too_many_query_tokens_is_named(runtime: Runtime) -> None:
    runtime.memory = memory = MadeUpMemory()
    tensors = GOOD.ragged(68, q_cu_seq_lens=memory.tensor("int32", 5, values=(0, 65, 66, 67, 68)))
    with pytest.raises(UsageError, match="q_cu_seq_lens: a request of 65 query tokens, expected at most 64"):
        call(runtime, tensors)


def test_an_output_is_made_like_the_queries(runtime: Runtime) -> None:
    runtime.memory = memory = MadeUpMemory()
    out = call(runtime, GOOD.draft(2), out=None)
    assert (out.dtype, out.shape, memory.made) == ("bfloat16", (4, 2, 64, 128), [("empty", out)])


def test_an_output_for_e4m3_queries_is_bfloat16(runtime: Runtime) -> None:
    runtime.memory = memory = MadeUpMemory()
    with pytest.raises(UsageError, match="no decode kernel for e4m3"):
        call(runtime, GOOD.of_dtypes(E4M3, E4M3, "bfloat16"), out=None)
    assert memory.made[0][1].dtype == "bfloat16"


def test_it_wants_an_output_where_it_cannot_make_one(runtime: Runtime) -> None:
    with pytest.raises(UsageError, match="out: None, expected a tensor"):
        call(runtime, out=None)


def test_it_runs_on_the_stream_of_the_framework(runtime: Runtime, standin: StandIn) -> None:
    runtime.memory = MadeUpMemory(stream=runtime.driver.create_stream())
    call(runtime)
    assert int(standin.calls("cuLaunchKernelEx")[0].seen["stream"], 16) == runtime.memory.stream


def test_a_workspace_of_the_caller_is_used(runtime: Runtime, standin: StandIn) -> None:
    call(runtime, workspace=SemaphoreWorkspace((0x7F0100000000, 8 << 20), (0x7F0200000000, 64 << 20)))
    assert (sent(standin)["status"], sent(standin)["partial_statistics"]) == (0x7F0100000000, 0x7F0200000000)
