from __future__ import annotations

import json
from pathlib import Path

import pytest

from cubin_runtime.kernels.abi import abi_layouts
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.launch.structs import PlacedField
from cubin_runtime.testing.standin import compile_c

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "trtllm_gen_layout.json").read_text())
STRUCT = RECORDED["KernelParams"]
OUR_NAMES = {"float32": "float", "fast_mod_div_int32": "FastModDiv"}


def test_fields_lie_where_the_reference_launcher_has_them() -> None:
    expected = [(f["name"], OUR_NAMES.get(f["type"], f["type"]), f["offset"], f["size"]) for f in STRUCT["fields"]]
    assert [(m.name, m.type, m.offset, m.size) for m in KERNEL_PARAMS.fields] == expected


def test_size_and_alignment_are_those_of_the_reference() -> None:
    assert (KERNEL_PARAMS.size, KERNEL_PARAMS.alignment) == (STRUCT["sizeof"], STRUCT["alignof"])


def test_padding_is_where_the_reference_has_it() -> None:
    used = bytearray(KERNEL_PARAMS.size)
    for member in KERNEL_PARAMS.fields:
        used[member.offset : member.offset + member.size] = b"\1" * member.size
    unused = [i for i, mark in enumerate(used) if not mark]
    assert unused == [i for begin, end in RECORDED["padding_bytes"] for i in range(begin, end)]


@pytest.mark.parametrize("member", KERNEL_PARAMS.fields, ids=lambda m: m.name)
def test_every_field_says_what_it_means(member: PlacedField) -> None:
    assert member.meaning


def test_the_c_compiler_agrees_with_every_offset(tmp_path: Path) -> None:
    (tmp_path / "params.h").write_text(KERNEL_PARAMS.c_declaration())
    source = tmp_path / "params.c"
    source.write_text('#include "params.h"\n')
    compile_c(source, tmp_path / "params.o", "-c")
    assert KERNEL_PARAMS.c_declaration().count("offsetof") == len(STRUCT["fields"])


def test_the_release_abi_holds_this_struct() -> None:
    assert abi_layouts("trtllm-gen-0.6.13") == {"KernelParams": KERNEL_PARAMS}
