from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace

import pytest

from cubin_runtime.kernels.trtllm_gen.grid import Geometry
from cubin_runtime.kernels.trtllm_gen.parameter_values import parameter_values
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.kernels.trtllm_gen.problem import Bindings
from cubin_runtime.kernels.trtllm_gen.tensor_maps import describe_tensors
from cubin_runtime.kernels.trtllm_gen.workspace_layout import partial_offset
from cubin_runtime.launch.structs import FastModDiv
from tests.kernels.trtllm_examples import MLA, PROBLEM, ROW

GEOMETRY = Geometry((16, 8, 1), 1, 3, 16, 4, None)
DESCRIPTORS = {name: bytes((place,)) * 128 for place, name in enumerate(("tmaQ_", "tmaK_", "tmaV_", "tmaO_"), 1)}
NEVER_SET = (
    "logicalGridDimX",
    "logicalGridDimY",
    "logicalGridDimZ",
    "ptrDebugO",
    "ptrSkipSoftmaxStats",
    "mInflateMax",
    "ptrScaleSfKv",
    "ptrScaleSfO",
    "ptrCustomMask",
    "ptrCustomMaskOffsets",
    "ptrFirstSparseMaskOffsetsKv",
    "mUseBlockSparseAttention",
    "mChunkedAttentionSizeLog2",
)


def filled(problem=PROBLEM, row=ROW, **changes):
    problem = replace(problem, **changes)
    bindings = problem.bindings.with_partial_out(partial_offset(problem, row))
    return parameter_values(problem, GEOMETRY, describe_tensors(problem, row), bindings)


def packed(values: dict[str, object], descriptors: Mapping[str, bytes]) -> bytes:
    return KERNEL_PARAMS.pack({**values, **{name: descriptors.get(name) for name in values if name.startswith("tma")}})


def test_values_come_in_the_order_of_the_struct() -> None:
    assert list(filled()) == [member.name for member in KERNEL_PARAMS.fields]


@pytest.mark.parametrize("name", NEVER_SET)
def test_what_the_reference_never_sets_is_nothing(name: str) -> None:
    assert not filled()[name]


def test_descriptors_that_are_not_built_are_zero() -> None:
    assert packed(filled(), {})[:896] == bytes(896)


def test_padding_is_zero() -> None:
    data = packed(filled(), DESCRIPTORS)
    assert (data[908:912], data[1254:]) == (bytes(4), bytes(26))


def test_a_group_of_one_head_divides_by_one() -> None:
    divisor = filled(heads_q=8)["mNumHeadsQPerKvDivisor"]
    assert divisor == FastModDiv(1, 1 << 31, 0, -1)
    assert isinstance(divisor, FastModDiv)
    assert divisor.to_bytes().hex() == "010000000000008000000000ffffffff"


def test_partial_results_begin_with_their_statistics() -> None:
    values = filled()
    assert (values["ptrPartialStats"], values["ptrPartialO"]) == (0x6000, 0x6000 + 8 * 148 * 16)


def test_without_scratch_the_partial_output_is_an_offset_alone() -> None:
    values = filled(bindings=Bindings(query=1, key=2, value=3, out=4))
    assert (values["ptrPartialStats"], values["ptrPartialO"]) == (0, 8 * 148 * 16)


def test_hidden_elements_count_the_head_dimension_of_the_query() -> None:
    assert filled(MLA)["mNumHiddenEltsO"] == 16 * 576


@pytest.mark.parametrize(("page", "log2"), [(0, -1), (1, 0), (32, 5), (512, 9)])
def test_the_page_size_is_stated_by_its_logarithm(page: int, log2: int) -> None:
    values = parameter_values(replace(PROBLEM, page=page), GEOMETRY, describe_tensors(PROBLEM, ROW), PROBLEM.bindings)
    assert values["mNumTokensPerPageLog2"] == log2


def test_sage_blocks_are_stated_by_their_logarithms() -> None:
    values = filled(sage_blocks=(1, 4, 0, 16))
    assert [values[f"mLogNumEltsPerSageAttnBlk{part}"] for part in "QKPV"] == [0, 2, 0, 4]


def test_the_split_is_stated() -> None:
    values = filled()
    assert (values["mMaxNumCtasQ"], values["mMaxNumCtasKv"]) == (3, 16)


def test_the_window_is_stated_where_it_lies() -> None:
    data = packed(filled(window=1024), {})
    assert struct.unpack_from("<i", data, KERNEL_PARAMS.field("mAttentionWindowSize").offset) == (1024,)
