from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubin_runtime.errors import UsageError
from cubin_runtime.launch.structs import FastModDiv, Field, StructLayout
from cubin_runtime.testing.standin import compile_c

SCALARS = ("bool", "int32", "uint32", "int64", "uint64", "float", "ptr")
TYPES = (*SCALARS, "CUtensorMap", "FastModDiv", "int32[3]", "ptr[2]", "float[5]", "bool[7]")
structs = st.builds(
    lambda types, alignment: StructLayout.declare(
        "S", [Field(f"f{i}", kind) for i, kind in enumerate(types)], alignment
    ),
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=9),
    st.sampled_from([64, 128]),
)


def compiled(layout: StructLayout) -> dict[str, int]:
    """Offsets, size and alignment as a program reports that was built from the generated header."""
    report = "".join(f'  printf("%s\\"{m.name}\\": %zu", "{", "}", offsetof(S, {m.name}));\n' for m in layout.fields)
    program = (
        '#include "s.h"\n#include <stdio.h>\nint main(void) {\n'
        '  printf("{\\"size\\": %zu, \\"alignment\\": %zu", sizeof(S), alignof(S));\n'
        f'{report}  printf("}}\\n");\n  return 0;\n}}\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "s.h").write_text(layout.c_declaration())
        source = Path(folder) / "s.c"
        source.write_text(program)
        compile_c(source, Path(folder) / "s")
        return dict(json.loads(subprocess.check_output([str(Path(folder) / "s")])))


@settings(max_examples=25, deadline=None)
@given(structs)
def test_layout_is_what_the_c_compiler_makes_of_the_generated_header(layout: StructLayout) -> None:
    expected = {m.name: m.offset for m in layout.fields} | {
        "size": layout.size,
        "alignment": layout.alignment,
    }
    assert compiled(layout) == expected


def declare(*types: str, alignment: int = 64) -> StructLayout:
    return StructLayout.declare("S", [Field(f"f{i}", kind, f"field {i}") for i, kind in enumerate(types)], alignment)


@pytest.mark.parametrize(("alignment", "offset", "size"), [(64, 64, 192), (128, 128, 256)])
def test_a_descriptor_is_aligned_as_its_toolkit_aligns_it(alignment: int, offset: int, size: int) -> None:
    layout = declare("int32", "CUtensorMap", alignment=alignment)
    assert (layout.fields[1].offset, layout.size) == (offset, size)


values_of = {
    "bool": st.booleans(),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "ptr": st.integers(0, 2**64 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "CUtensorMap": st.binary(min_size=128, max_size=128),
    "FastModDiv": st.integers(1, 2**31 - 1).map(FastModDiv.of),
}


@settings(max_examples=100)
@given(st.data())
def test_unpacking_gives_back_what_was_packed(data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(sorted(values_of)), min_size=1, max_size=12))
    layout = declare(*types)
    values = {m.name: data.draw(values_of[m.type]) for m in layout.fields}
    assert layout.unpack(layout.pack(values)) == values


def test_padding_is_zero() -> None:
    layout = declare("bool", "int64", "bool")
    assert layout.pack({"f0": True, "f1": -1, "f2": True}).hex() == "01" + "00" * 7 + "ff" * 8 + "01" + "00" * 7


def test_arrays_pack_element_by_element() -> None:
    assert declare("int32[3]").pack({"f0": [1, 2, 3]}).hex() == "010000000200000003000000"


def test_arrays_unpack_as_tuples() -> None:
    assert declare("int32[2]").unpack(bytes(8)) == {"f0": (0, 0)}


def test_none_is_a_null_pointer_and_a_descriptor_not_built() -> None:
    assert declare("CUtensorMap", "ptr").pack({"f0": None, "f1": None}) == bytes(192)


def test_a_divisor_is_packed_as_its_words() -> None:
    assert declare("FastModDiv").pack({"f0": 3}).hex() == "03000000abaaaaaa0000000001000000"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int32", 2**31),
        ("uint32", -1),
        ("int32", 1.5),
        ("int32", None),
        ("ptr", -1),
        ("ptr", "0x10"),
        ("ptr", 16.0),
        ("bool", 2),
        ("float", "1"),
        ("float", 1e60),
        ("int32[2]", [1]),
        ("int32[2]", 5),
        ("FastModDiv", 0),
        ("CUtensorMap", b"short"),
        ("CUtensorMap", 7),
    ],
)
def test_a_value_that_does_not_fit_names_its_field(kind: str, value: Any) -> None:
    with pytest.raises(UsageError, match="f0="):
        declare(kind).pack({"f0": value})


@pytest.mark.parametrize("values", [{}, {"f0": 1, "other": 2}])
def test_missing_and_unknown_fields_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"missing \[.*\], unknown \[.*\]"):
        declare("int32").pack(values)


@pytest.mark.parametrize(
    ("name", "fields", "alignment"),
    [
        ("S", [], 64),
        ("1S", [Field("a", "int32")], 64),
        ("S", [Field("a b", "int32")], 64),
        ("S", [Field("a", "int32"), Field("a", "int32")], 64),
        ("S", [Field("a", "int16")], 64),
        ("S", [Field("a", "int32[0]")], 64),
        ("S", [Field("a", "CUtensorMap[2]")], 64),
        ("S", [Field("a", "int32")], 32),
    ],
)
def test_a_bad_declaration_is_refused(name: str, fields: list[Field], alignment: int) -> None:
    with pytest.raises(UsageError):
        StructLayout.declare(name, fields, alignment)


def test_describe_gives_a_row_a_field_with_its_meaning() -> None:
    layout = declare("ptr", "FastModDiv", "float")
    rows = layout.describe(layout.pack({"f0": 0xABC, "f1": 5, "f2": 0.5}))
    assert [(row.name, row.offset, row.text, row.meaning) for row in rows] == [
        ("f0", 0, "0xabc", "field 0"),
        ("f1", 8, "/ 5", "field 1"),
        ("f2", 24, "0.5", "field 2"),
    ]


def test_describe_shows_null_pointers_and_descriptors_not_built() -> None:
    assert [row.text for row in declare("CUtensorMap", "ptr").describe(bytes(192))] == ["not built", "null"]


@pytest.mark.parametrize("nbytes", [3, 5])
def test_describe_refuses_another_size(nbytes: int) -> None:
    with pytest.raises(UsageError, match=f"got {nbytes} bytes, expected 4"):
        declare("int32").describe(bytes(nbytes))


@pytest.mark.parametrize(
    "other",
    [
        declare("int32", "uint32"),
        declare("int32", "int32", "int32"),
        StructLayout.declare("S", [Field("f0", "int32"), Field("g1", "int32")]),
    ],
)
def test_fingerprint_changes_with_names_types_and_fields(other: StructLayout) -> None:
    assert other.fingerprint != declare("int32", "int32").fingerprint


def test_fingerprint_changes_with_descriptor_alignment() -> None:
    assert declare("int32", "CUtensorMap").fingerprint != declare("int32", "CUtensorMap", alignment=128).fingerprint


def test_fingerprint_does_not_change_with_meanings() -> None:
    first, second = (StructLayout.declare("S", [Field("a", "int32", text)]) for text in ("x", "y"))
    assert first.fingerprint == second.fingerprint


def test_fingerprint_is_the_digest_of_its_documented_lines() -> None:
    assert declare("int32").fingerprint == "0443a451a0e7f3b15835734e454a43538096b4d21e961053877a29a1f756e32c"


def test_a_meaning_cannot_swallow_the_next_member() -> None:
    layout = StructLayout.declare("S", [Field("f0", "int32", "ends in \\"), Field("f1", "int32", "two\nlines")])
    assert compiled(layout) == {"f0": 0, "f1": 4, "size": 8, "alignment": 4}


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(UsageError, match="no field 'nope'"):
        declare("int32").field("nope")


def test_a_member_is_a_field() -> None:
    with pytest.raises(UsageError, match=r"struct 'S': fields: got tuple, expected Field\(name, type\)"):
        StructLayout.declare("S", [("f0", "int32")])  # type: ignore[list-item]
