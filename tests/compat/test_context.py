"""The context operators on Hopper: what reaches the native kernel's parameters, and each option that none honours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.attention import BackendError, Runtime
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.prefill.params import CONTEXT_ATTENTION
from cubin_runtime.testing import StandIn
from tests.attention.device_calls import native_ragged_arguments
from tests.attention.trtllm_calls import MadeUpMemory, context_arguments, made, tensor

pytestmark = pytest.mark.usefixtures("hopper")

LOG2_E = math.log2(math.e)
NO_WINDOW = 1 << 30
FP8 = "float8_e4m3fn"
OPERATORS = {
    "paged": (flashinfer.trtllm_batch_context_with_kv_cache, context_arguments),
    "ragged": (flashinfer.trtllm_ragged_attention_deepseek, native_ragged_arguments),
}
Attend = Callable[..., dict[str, Any]]


def sent(standin: StandIn) -> dict[str, Any]:
    (launch,) = standin.calls("cuLaunchKernelEx")
    return CONTEXT_ATTENTION.unpack(bytes.fromhex(launch.seen["parameter0"]))


def addresses(standin: StandIn) -> list[str]:
    """Of all tensors that descriptors were made for."""
    return [call.seen["address"] for call in standin.calls("cuTensorMapEncodeTiled")]


@pytest.fixture
def paged(standin: StandIn, memory: MadeUpMemory) -> Attend:
    def call(**changes: Any) -> dict[str, Any]:
        flashinfer.trtllm_batch_context_with_kv_cache(**context_arguments(memory, **changes))
        return sent(standin)

    return call


@pytest.fixture
def ragged(standin: StandIn, memory: MadeUpMemory) -> Attend:
    def call(**changes: Any) -> dict[str, Any]:
        flashinfer.trtllm_ragged_attention_deepseek(**native_ragged_arguments(memory, **changes))
        return sent(standin)

    return call


@pytest.fixture(params=OPERATORS)
def attend(request: pytest.FixtureRequest, standin: StandIn, memory: MadeUpMemory) -> Attend:
    """Call one of the operators with its usual arguments changed; what arrived."""
    operator, arguments = OPERATORS[request.param]

    def call(**changes: Any) -> dict[str, Any]:
        operator(**arguments(memory, **changes))
        return sent(standin)

    return call


def test_sizes_of_paged_keys_arrive(paged: Attend) -> None:
    seen = paged()
    sizes = ("batch", "tokens", "q_len", "group", "page_size_log2", "num_pages", "max_seq_len", "table_stride")
    assert [seen[name] for name in sizes] == [3, 300, 128, 8, 5, 64, 500, 16]
    assert (seen["kv_cu_seq_lens"], seen["window_left"], seen["window_right"]) == (0, NO_WINDOW, 0)


def test_e4m3_keys_and_values_arrive(paged: Attend, memory: MadeUpMemory) -> None:
    cache = memory.tensor(FP8, 64, 2, 4, 32, 128)
    seen = paged(kv_cache=cache)
    assert (seen["page_size_log2"], seen["num_pages"]) == (5, 64)


def test_page_tables_of_keys_and_of_values_arrive(paged: Attend, memory: MadeUpMemory) -> None:
    tables = memory.tensor("int32", 3, 2, 16)
    seen = paged(block_tables=tables, uses_shared_paged_kv_idx=False, max_kv_len=1 << 20)
    assert [seen[name] for name in ("page_table", "table_stride", "v_table_offset", "max_seq_len")] == [
        tables.pointer,
        32,
        16,
        512,
    ]


def test_sizes_of_ragged_keys_arrive(ragged: Attend, memory: MadeUpMemory) -> None:
    q_sums, kv_sums, lengths = memory.tensor("int32", 3), memory.tensor("int32", 3), memory.tensor("int32", 2)
    seen = ragged(cum_seq_lens_q=q_sums, cum_seq_lens_kv=kv_sums, seq_lens=lengths)
    assert [seen[name] for name in ("batch", "tokens", "kv_tokens", "q_len", "max_seq_len")] == [2, 200, 400, 128, 256]
    sums = [seen[name] for name in ("q_cu_seq_lens", "kv_cu_seq_lens", "seq_lens", "page_table")]
    assert sums == [q_sums.pointer, kv_sums.pointer, lengths.pointer, 0]


@pytest.mark.parametrize(("causal", "right"), [(True, 0), (False, NO_WINDOW)])
def test_the_mask_of_paged_attention(paged: Attend, causal: bool, right: int) -> None:
    assert paged(causal=causal)["window_right"] == right


@pytest.mark.parametrize(("causal", "right"), [(True, 0), (False, NO_WINDOW)])
def test_the_mask_of_ragged_attention(ragged: Attend, causal: bool, right: int) -> None:
    assert ragged(is_causal=causal)["window_right"] == right


def test_the_window(attend: Attend) -> None:
    assert attend(window_left=100)["window_left"] == 100


def test_a_window_without_a_causal_mask(paged: Attend) -> None:
    seen = paged(window_left=100, causal=False)
    assert (seen["window_left"], seen["window_right"]) == (100, NO_WINDOW)


def test_a_window_on_both_sides(paged: Attend) -> None:
    seen = paged(window_left=100, window_right=7, causal=False)
    assert (seen["window_left"], seen["window_right"]) == (100, 7)


@pytest.mark.parametrize("right", [-1, 0])
def test_a_window_to_the_right_of_a_causal_mask(paged: Attend, right: int) -> None:
    assert paged(window_left=100, window_right=right)["window_right"] == 0


@pytest.mark.parametrize("factor", [0, 1e-30, 1000.0])
def test_keys_of_little_weight_count_too(attend: Attend, factor: float) -> None:
    assert attend(skip_softmax_threshold_scale_factor=factor)["window_left"] == NO_WINDOW


@pytest.mark.parametrize("ones", [(), (1,), (1, 1, 1)])
def test_dimensions_of_1_may_follow_the_lengths(paged: Attend, memory: MadeUpMemory, ones: tuple[int, ...]) -> None:
    lengths = memory.tensor("int32", 3, *ones)
    assert paged(seq_lens=lengths)["seq_lens"] == lengths.pointer


def test_the_scales(attend: Attend) -> None:
    seen = attend(bmm1_scale=0.125, bmm2_scale=0.5)
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(0.125 * LOG2_E), 0.5)


def test_scales_on_the_device(attend: Attend, memory: MadeUpMemory) -> None:
    scores, output = memory.tensor("float32", 1), memory.tensor("float32")
    seen = attend(bmm1_scale=scores, bmm2_scale=output)
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (scores.pointer, output.pointer)
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(LOG2_E), 1.0)


@pytest.mark.parametrize("listed", [False, True])
def test_sinks_of_paged_attention(paged: Attend, memory: MadeUpMemory, listed: bool) -> None:
    sinks = memory.tensor("float32", 32)
    assert paged(sinks=[sinks] if listed else sinks)["sinks"] == sinks.pointer


def test_sinks_of_ragged_attention(ragged: Attend, memory: MadeUpMemory) -> None:
    sinks = memory.tensor("float32", 16)
    assert ragged(attention_sinks=sinks)["sinks"] == sinks.pointer


def test_the_log_sum_exp_is_in_base_2_with_the_sink(attend: Attend) -> None:
    seen = attend(return_lse=True)
    assert (seen["lse"] > 0, seen["lse_scale"], seen["lse_sink"]) == (True, 1.0, 1)


@pytest.mark.parametrize("name", OPERATORS)
def test_output_and_log_sum_exp_are_made_and_returned(standin: StandIn, memory: MadeUpMemory, name: str) -> None:
    operator, arguments = OPERATORS[name]
    given = arguments(memory, return_lse=True)
    out, lse = operator(**given)
    seen = sent(standin)
    assert (seen["out"], seen["lse"]) == (out.pointer, lse.pointer)
    assert (out.shape, out.dtype) == (given["query"].shape, "bfloat16")
    assert (lse.shape, lse.dtype) == (given["query"].shape[:2], "float32")


@pytest.mark.parametrize("name", OPERATORS)
def test_a_given_output_is_returned_and_a_given_log_sum_exp_filled(
    standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    shape = arguments(memory)["query"].shape
    out, lse = memory.tensor("bfloat16", *shape), memory.tensor("float32", *shape[:2])
    assert operator(**arguments(memory, out=out, lse=lse)) is out
    seen = sent(standin)
    assert (seen["out"], seen["lse"]) == (out.pointer, lse.pointer)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_tensor_holds_both_halves(paged: Attend, standin: StandIn, memory: MadeUpMemory, layout: str) -> None:
    tokens_heads = (32, 4) if layout == "NHD" else (4, 32)
    cache = memory.tensor("bfloat16", 64, 2, *tokens_heads, 128)
    seen = paged(kv_cache=cache, kv_layout=layout)
    assert (seen["page_size_log2"], seen["num_pages"], seen["group"]) == (5, 64, 8)
    assert addresses(standin)[-2:] == [hex(cache.pointer), hex(cache.pointer + 2 * 4 * 32 * 128)]


def test_a_bound_over_the_table_is_what_the_table_holds(paged: Attend) -> None:
    assert paged(max_kv_len=1 << 20)["max_seq_len"] == 16 * 32


def test_a_bound_over_the_keys_is_how_many_there_are(ragged: Attend) -> None:
    assert ragged(max_kv_len=1 << 20)["max_seq_len"] == 400


def test_counters_begin_as_zeros_of_the_calls_own(attend: Attend, memory: MadeUpMemory) -> None:
    seen = attend()
    ((_, zeros),) = [item for item in memory.made if item[0] == "zeros"]
    end = zeros.pointer + zeros.shape[0]
    assert zeros.pointer <= seen["status"] < seen["counters"] < end


@pytest.mark.parametrize(("enable_pdl", "pdl"), [(None, "1"), (True, "1"), (False, "0")])
def test_programmatic_launches_are_the_default(
    paged: Attend, standin: StandIn, enable_pdl: bool | None, pdl: str
) -> None:
    paged(enable_pdl=enable_pdl)
    assert standin.calls("cuLaunchKernelEx")[-1].seen["pdl"] == pdl


@pytest.mark.parametrize("backend", ["trtllm-gen", "auto", "native"])
def test_the_peers_default_takes_what_the_device_has(attend: Attend, backend: str) -> None:
    assert attend(backend=backend)["batch"] > 0


def test_lengths_on_the_host_may_be_zero(ragged: Attend) -> None:
    assert ragged(q_seq_lens_cpu=[0, 200], kv_seq_lens_cpu=[400, 0], skip_all_rows_active_check=False)["batch"] == 2


def test_the_scale_of_block_scaled_outputs_is_unused(ragged: Attend) -> None:
    assert ragged(o_sf_scale=1.0)["output_scale"] == 1.0


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"backend": "cake"}, "backend='cake': expected auto or one of native, trtllm-gen"),
    ({"batch_size": 7}, "batch_size=7: seq_lens has"),
    (
        {"skip_softmax_threshold_scale_factor": -1.0},
        "skip_softmax_threshold_scale_factor=-1.0: expected None, 0 or more",
    ),
    ({"use_fp16_softmax": True}, "use_fp16_softmax=True"),
    ({"uses_spcompress": True}, "uses_spcompress=True"),
    ({"max_q_len": 0}, "max_q_len=0: expected 1"),
    ({"max_q_len": None}, "max_q_len=None: expected an integer"),
    ({"max_kv_len": -1}, "max_kv_len=-1: expected 0"),
    ({"max_kv_len": 1.5}, "max_kv_len=1.5: expected an integer"),
    ({"window_left": -2}, "window_left=-2: expected -1"),
    ({"bmm1_scale": math.nan}, "bmm1_scale=nan"),
    ({"bmm2_scale": tensor("float32", 2)}, "bmm2_scale: float32 .*expected one float32"),
    ({"cum_seq_lens_q": tensor("int32", 9)}, r"cum_seq_lens_|seq_lens: shape|block_tables"),
    ({"cum_seq_lens_q": None}, "cum_seq_lens_q: got NoneType"),
    ({"cum_seq_lens_kv": tensor("int32", 9)}, "cum_seq_lens_kv"),
    ({"query": tensor("float32", 200, 16, 128)}, "query: dtype float32"),
    ({"lse": tensor("float32", 3, 3)}, r"lse: shape \(3, 3\)"),
    ({"out": tensor("bfloat16", 3, 3, 128)}, r"out: shape \(3, 3, 128\)"),
    ({"workspace_buffer": tensor("uint8", 64, device=1)}, "workspace_buffer: on device 1"),
]
PAGED: list[tuple[dict[str, Any], str]] = [
    ({"window_right": 1}, "window_right=1: expected -1 or 0 with causal=True"),
    ({"window_right": 2.5}, "window_right=2.5: expected an integer"),
    ({"variable_window_token_starts": tensor("int32", 300)}, "variable_window_token_starts=a TensorView"),
    ({"variable_window_token_ends": tensor("int32", 300)}, "variable_window_token_ends=a TensorView"),
    ({"kv_cache_sf": tensor(FP8, 64, 2, 4, 32, 8)}, "kv_cache_sf=a TensorView.*'native'"),
    ({"uses_shared_paged_kv_idx": False}, r"block_tables: shape \(3, 16\), expected \[batch, 2, columns\] with"),
    ({"o_sf_scale": 1.0}, "o_sf_scale=1.0"),
    ({"o_sf_vec_size": 16}, "o_sf_vec_size=16"),
    ({"out_dtype": "nvfp4"}, "out_dtype or out is nvfp4"),
    ({"out_dtype": "torch.float16"}, "out_dtype: float16, expected that of query .*bfloat16"),
    ({"out": tensor("float16", 300, 32, 128)}, "out: dtype float16, expected bfloat16"),
    ({"block_tables": tensor("int32", 3, 2, 16)}, r"block_tables: shape \(3, 2, 16\), expected \[batch, columns\]"),
    ({"block_tables": tensor("int32", 4, 16)}, r"block_tables: shape \(4, 16\), expected \[3, columns\]"),
    ({"kv_layout": "NDH"}, "kv_layout='NDH'"),
    ({"kv_cache": tensor("bfloat16", 64, 2, 4, 24, 128)}, r"kv_cache \(K\): page size 24"),
    ({"query": tensor("bfloat16", 300, 32, 96)}, "query: head dimension 96, expected"),
    ({"sinks": tensor("float32", 5)}, r"sinks: shape \(5,\)"),
]
RAGGED: list[tuple[dict[str, Any], str]] = [
    ({"sage_attn_sfs": (tensor("float32", 1), None, None, None)}, "sage_attn_sfs: given"),
    ({"value": tensor("bfloat16", 400, 4, 64)}, "(value|out): shape .*64"),
    ({"attention_sinks": tensor("float32", 5)}, r"attention_sinks: shape \(5,\)"),
    ({"key": tensor("bfloat16", 300, 4, 128)}, "value: shape"),
    ({"key": tensor("bfloat16", 400, 128)}, "key: shape"),
    ({"value": tensor("bfloat16", 400, 128)}, "value: shape .*3 dimensions"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *(("paged", *case) for case in [*BOTH, *PAGED]),
        *(("ragged", *case) for case in [*BOTH, *RAGGED]),
    ],
)
def test_what_cannot_be_honoured_names_the_argument(
    standin: StandIn, memory: MadeUpMemory, name: str, changes: dict[str, Any], message: str
) -> None:
    operator, arguments = OPERATORS[name]
    with pytest.raises(UsageError, match=message):
        operator(**arguments(memory, **made(memory, changes)))
    assert standin.calls("cuLaunchKernelEx") == []


def test_the_head_dimensions_of_deepseek(standin: StandIn, memory: MadeUpMemory) -> None:
    tensors = {"query": (200, 16, 192), "key": (400, 16, 192), "value": (400, 16, 128)}
    given = {name: memory.tensor("bfloat16", *shape) for name, shape in tensors.items()}
    out = flashinfer.trtllm_ragged_attention_deepseek(**native_ragged_arguments(memory, **given))
    assert (out.shape, sent(standin)["out"]) == ((200, 16, 128), out.pointer)
    assert standin.calls("cuLaunchKernelEx")[0].seen["symbol"] == "stub_context_attention_bf16_d192"


@pytest.mark.parametrize("name", OPERATORS)
def test_other_devices_have_neither_backend(hopper: Runtime, standin: StandIn, memory: MadeUpMemory, name: str) -> None:
    standin.pose_as(8, 9)
    operator, arguments = OPERATORS[name]
    with pytest.raises(BackendError, match=r"no backend supports it \(native: measured on 9.0; trtllm-gen"):
        operator(**arguments(memory))


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariant_takes_the_kernel_that_has_the_bits_of_decode(
    paged: Attend, standin: StandIn, invariant: bool
) -> None:
    paged(batch_invariant=invariant)
    assert ("segments" in standin.calls("cuLaunchKernelEx")[-1].seen["symbol"]) == invariant
