"""Numbers on both sides of a launch: declared in Python, generated for C++, and written nowhere else."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from cubin_runtime.kernels.native.constants import (
    ATTENTION_TYPES,
    CONSTANTS,
    MERGE_TYPES,
    StatusBit,
    cpp_header,
    cpp_names,
)
from kernels_src.build import SOURCES

TEXTS = {path.relative_to(SOURCES): path.read_text() for path in sorted(SOURCES.rglob("*.cu*"))}


def test_the_header_compiles_to_the_numbers_of_the_table(tmp_path: Path) -> None:
    asserted = "".join(f'static_assert({name} == {number}, "");\n' for name, number in cpp_names().items())
    (tmp_path / "KernelConstants.h").write_text(cpp_header())
    (tmp_path / "test.cpp").write_text(f'#include "KernelConstants.h"\n#include "KernelConstants.h"\n{asserted}')
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "test.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_every_number_is_in_the_header_under_the_name_of_its_declaration() -> None:
    names = cpp_names()
    assert names["TYPE_E4M3"] == ATTENTION_TYPES["e4m3"] == 2
    assert names["STATUS_QUERIES"] == StatusBit.QUERIES == 8
    assert names["DECODE_SPLIT_TOKENS"] == CONSTANTS.decode_split_tokens


def test_the_merge_kernel_has_the_codes_of_its_struct() -> None:
    declared = re.search(r"constexpr int (BF16.*);", TEXTS[Path("merge/merge_states.cu")])
    assert declared is not None
    assert declared[1] == ", ".join(f"{dtype.upper()} = {code}" for dtype, code in MERGE_TYPES.items())


def test_a_number_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        CONSTANTS.decode_split_tokens = 1
    with pytest.raises(TypeError):
        ATTENTION_TYPES["bf16"] = 1


@pytest.mark.parametrize("name", cpp_names())
def test_kernels_take_each_number_from_the_header_alone(name: str) -> None:
    declared = re.compile(rf"#\s*define\s+{name}\b|\b{name}\s*(=[^=]|\{{)")
    assert [str(path) for path, text in TEXTS.items() if declared.search(text)] == []
    assert [str(path) for path, text in TEXTS.items() if re.search(rf"\b{name}\b", text)] != []


def test_status_bits_are_bits() -> None:
    assert [bit.bit_count() for bit in StatusBit] == [1] * len(StatusBit)
    assert sum(StatusBit) == (1 << len(StatusBit)) - 1
