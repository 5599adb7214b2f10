"""The call of trtllm-gen kernels that an operator makes of its arguments, on a device that has no release at hand."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.attention.trtllm_gen import Scale
from cubin_runtime.compat import flashinfer
from tests.attention.trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    mla_arguments,
    ragged_arguments,
)

FP8 = "float8_e4m3fn"
DECODE = flashinfer.trtllm_batch_decode_with_kv_cache, decode_arguments
MLA = flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_arguments
CONTEXT = flashinfer.trtllm_batch_context_with_kv_cache, context_arguments
RAGGED = flashinfer.trtllm_ragged_attention_deepseek, ragged_arguments
ALL = pytest.mark.parametrize("operator", [DECODE, MLA, CONTEXT, RAGGED], ids=["decode", "mla", "context", "ragged"])
Operator = tuple[Callable[..., Any], Callable[..., dict[str, Any]]]


class Ran:
    """What was given to the trtllm-gen runner instead of being run."""

    call: Any
    workspace: Any
    options: dict[str, Any]
    result: Any
    is_alive: Callable[[], object] = staticmethod(lambda: None)
    was_alive = False


@pytest.fixture
def ran(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Ran:
    seen = Ran()

    def run(call: Any, workspace: Any, **options: Any) -> None:
        seen.call, seen.workspace, seen.options = call, workspace, options
        seen.was_alive = seen.is_alive() is not None

    monkeypatch.setattr("cubin_runtime.compat.flashinfer.trtllm_gen.run", run)
    return seen


@pytest.fixture
def call(ran: Ran, memory: MadeUpMemory) -> Callable[..., Any]:
    """Call an operator with its usual arguments changed; the call of the kernels that was made."""

    def make(operator: Operator, **changes: Any) -> Any:
        function, arguments = operator
        ran.result = function(**arguments(memory, **changes))
        return ran.call

    return make


@ALL
def test_scales_are_those_of_scores_and_output(call: Callable[..., Any], operator: Operator) -> None:
    made = call(operator, bmm1_scale=0.25, bmm2_scale=0.5)
    assert (made.bmm1, made.bmm2) == (Scale(0.25), Scale(0.5))


@ALL
def test_a_scale_of_scores_on_the_device_is_multiplied_by_log2_of_e_there(
    call: Callable[..., Any], memory: MadeUpMemory, operator: Operator
) -> None:
    scores, output = memory.tensor("float32", 1), memory.tensor("float32", 1)
    made = call(operator, bmm1_scale=scores, bmm2_scale=output)
    product = next(view for what, view in memory.made if what == f"scaled by {math.log2(math.e):.4f}")
    assert (made.bmm1.pointer, made.bmm2.pointer) == (product.pointer, output.pointer)


def test_a_scale_of_scores_in_base_2_goes_as_it_is(call: Callable[..., Any], memory: MadeUpMemory) -> None:
    scale = memory.tensor("float32", 1)
    made = call(DECODE, bmm1_scale=1.0, bmm1_scale_log2=scale)
    assert made.bmm1.pointer == scale.pointer


def test_a_scale_that_was_made_lives_until_the_launch(
    call: Callable[..., Any], ran: Ran, memory: MadeUpMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Product:
        """A tensor that nothing keeps but its references."""

        __cuda_array_interface__: ClassVar = {"shape": (1,), "typestr": "<f4", "data": (0x7000, False), "version": 3}

    def scaled(tensor: TensorView, factor: float) -> Product:
        product = Product()
        ran.is_alive = weakref.ref(product)
        return product

    monkeypatch.setattr(memory, "scaled", scaled)
    assert call(DECODE, bmm1_scale=memory.tensor("float32", 1)).bmm1.pointer == 0x7000
    assert ran.was_alive


@ALL
@pytest.mark.parametrize(("given", "on"), [(None, True), (True, True), (False, False)])
def test_dependent_launch_is_on_unless_switched_off(
    call: Callable[..., Any], operator: Operator, given: bool | None, on: bool
) -> None:
    assert call(operator, enable_pdl=given).pdl is on


@pytest.mark.parametrize("operator", [DECODE, MLA, CONTEXT])
def test_counters_are_handed_on(call: Callable[..., Any], ran: Ran, memory: MadeUpMemory, operator: Operator) -> None:
    counters = memory.tensor("int32", 1024)
    call(operator, multi_ctas_kv_counter_buffer=counters)
    assert ran.options["counters"] is counters
    call(operator)
    assert ran.options["counters"] is None


@ALL
def test_the_workspace_is_handed_on(
    call: Callable[..., Any], ran: Ran, memory: MadeUpMemory, operator: Operator
) -> None:
    workspace = memory.tensor("uint8", 1 << 20)
    call(operator, workspace_buffer=workspace)
    assert ran.workspace is workspace


@pytest.mark.parametrize(
    ("operator", "name", "heads"),
    [(DECODE, "sinks", 32), (MLA, "sinks", 128), (CONTEXT, "sinks", 32), (RAGGED, "attention_sinks", 128)],
)
def test_sinks_come_alone_or_in_a_list(
    call: Callable[..., Any], memory: MadeUpMemory, operator: Operator, name: str, heads: int
) -> None:
    sinks = memory.tensor("float32", heads)
    assert call(operator, **{name: sinks}).sinks == sinks
    assert call(operator, **{name: [sinks]}).sinks == sinks
    assert call(operator).sinks is None


@pytest.mark.parametrize("operator", [DECODE, CONTEXT])
@pytest.mark.parametrize(("layout", "shape"), [("HND", (64, 4, 32, 128)), ("NHD", (64, 32, 4, 128))])
def test_keys_and_values_are_seen_by_head(
    call: Callable[..., Any], memory: MadeUpMemory, operator: Operator, layout: str, shape: tuple[int, ...]
) -> None:
    key, value = memory.tensor("bfloat16", *shape), memory.tensor("bfloat16", *shape)
    made = call(operator, kv_cache=(key, value), kv_layout=layout)
    assert (made.key.pointer, made.value.pointer) == (key.pointer, value.pointer)
    assert (made.key.shape, made.value.shape) == ((64, 4, 32, 128), (64, 4, 32, 128))


def test_one_tensor_holds_keys_before_values(call: Callable[..., Any], memory: MadeUpMemory) -> None:
    cache = memory.tensor("bfloat16", 64, 2, 4, 32, 128)
    made = call(DECODE, kv_cache=cache)
    assert (made.key.pointer, made.value.pointer) == (cache.pointer, cache.pointer + 4 * 32 * 128 * 2)


def test_block_scales_of_keys_come_before_those_of_values(call: Callable[..., Any], memory: MadeUpMemory) -> None:
    scales = memory.tensor(FP8, 64, 2, 4, 32, 8)
    made = call(DECODE, kv_cache_sf=scales)
    assert (made.key_scales.pointer, made.value_scales.pointer) == (scales.pointer, scales.pointer + 4 * 32 * 8)


@pytest.mark.parametrize("shape", [(1024, 64, 576), (1024, 1, 64, 576)])
def test_a_latent_cache_is_keys_and_values(
    call: Callable[..., Any], memory: MadeUpMemory, shape: tuple[int, ...]
) -> None:
    made = call(MLA, kv_cache=memory.tensor("bfloat16", *shape))
    assert made.key == made.value
    assert (made.key.shape, made.key.strides) == ((1024, 1, 64, 576), (64 * 576, 64 * 576, 576, 1))


@pytest.mark.parametrize("operator", [DECODE, MLA, CONTEXT])
@pytest.mark.parametrize("shares", [True, False])
def test_tables_of_keys_and_values_may_be_separate(call: Callable[..., Any], operator: Operator, shares: bool) -> None:
    assert call(operator, uses_shared_paged_kv_idx=shares).shares_index is shares


@pytest.mark.parametrize("operator", [DECODE, CONTEXT, RAGGED])
def test_the_window_goes_as_it_is(call: Callable[..., Any], operator: Operator) -> None:
    assert call(operator, window_left=127).window_left == 127


@pytest.mark.parametrize("operator", [CONTEXT, RAGGED])
def test_cumulative_lengths_and_bounds_are_those_of_queries_and_keys(
    call: Callable[..., Any], memory: MadeUpMemory, operator: Operator
) -> None:
    of_q, of_kv = memory.tensor("int32", 4), memory.tensor("int32", 4)
    made = call(operator, cum_seq_lens_q=of_q, cum_seq_lens_kv=of_kv, max_q_len=7, max_kv_len=9)
    assert (made.cum_seq_lens_q, made.cum_seq_lens_kv, made.max_q, made.max_kv) == (of_q, of_kv, 7, 9)


@ALL
def test_options_reach_the_call(call: Callable[..., Any], operator: Operator) -> None:
    made = call(operator, batch_invariant=True, skip_softmax_threshold_scale_factor=0.5)
    assert (made.batch_invariant, made.skip_softmax_factor) == (True, 0.5)


def test_sparse_mla_reaches_the_call(call: Callable[..., Any], memory: MadeUpMemory) -> None:
    lengths = memory.tensor("int32", 8)
    made = call(MLA, sparse_mla_top_k=64, sparse_mla_top_k_lens=lengths)
    assert (made.top_k, made.top_k_lens) == (64, lengths)


@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_an_output_of_mla_is_made_in_bf16(call: Callable[..., Any], memory: MadeUpMemory, ran: Ran, dtype: str) -> None:
    call(MLA, query=memory.tensor(dtype, 4, 2, 128, 576))
    assert (ran.result.dtype, ran.result.shape) == ("bfloat16", (4, 2, 128, 512))


def test_an_output_of_mla_is_seen_by_token(call: Callable[..., Any], memory: MadeUpMemory, ran: Ran) -> None:
    out = memory.tensor("bfloat16", 4, 2, 128, 512)
    made = call(MLA, out=out)
    assert (made.out.pointer, made.out.shape, ran.result) == (out.pointer, (8, 128, 512), out)


@pytest.mark.parametrize("shape", [(4, 1, 128, 512), (4, 128, 512)])
def test_an_output_of_one_token_per_request_may_lack_its_dimension(
    call: Callable[..., Any], memory: MadeUpMemory, ran: Ran, shape: tuple[int, ...]
) -> None:
    out = memory.tensor("bfloat16", *shape)
    made = call(MLA, query=memory.tensor("bfloat16", 4, 1, 128, 576), out=out)
    assert (made.out, ran.result) == (replace(out, shape=(4, 128, 512), strides=made.out.strides), out)
    assert made.out.strides == (128 * 512, 512, 1)


def test_outputs_of_one_token_per_request_may_differ_in_its_dimension(
    call: Callable[..., Any], memory: MadeUpMemory
) -> None:
    out, lse = memory.tensor("bfloat16", 4, 128, 512), memory.tensor("float32", 4, 1, 128)
    made = call(MLA, query=memory.tensor("bfloat16", 4, 1, 128, 576), out=out, lse=lse)
    assert (made.out.shape, made.lse.shape) == ((4, 128, 512), (4, 128))


@ALL
def test_the_log_sum_exp_is_made_for_every_token_and_head(
    call: Callable[..., Any], ran: Ran, operator: Operator
) -> None:
    made = call(operator, return_lse=True)
    _, lse = ran.result
    assert (made.lse, lse.dtype, lse.shape) == (lse, "float32", made.query.shape[:2])


def test_a_log_sum_exp_of_mla_may_come_by_request(call: Callable[..., Any], memory: MadeUpMemory) -> None:
    lse = memory.tensor("float32", 4, 2, 128)
    assert call(MLA, lse=lse).lse == replace(lse, shape=(8, 128), strides=(128, 1))
