"""The C and C++ text of a parameter struct, with the assertions that tie it to the Python side."""

from __future__ import annotations

from collections.abc import Sequence

from .struct_types import ElementType

_FAST_MOD_DIV = """
#ifndef CUBIN_RUNTIME_FAST_MOD_DIV
#define CUBIN_RUNTIME_FAST_MOD_DIV
struct FastModDiv { int32_t divisor; uint32_t multiplier; uint32_t add; int32_t shift; };
#ifndef __cplusplus
typedef struct FastModDiv FastModDiv;
#endif
#endif
"""
# A 64-aligned struct must not depend on the toolkit: cuda.h of CUDA 13 aligns its own type to 128.
_TENSOR_MAP_64 = """
#ifndef CUBIN_RUNTIME_TENSOR_MAP_64
#define CUBIN_RUNTIME_TENSOR_MAP_64
typedef struct TensorMap64 { alignas(64) uint64_t opaque[16]; } TensorMap64;
#endif
"""


def c_text(
    name: str,
    members: Sequence[tuple[str, ElementType, int, str]],
    size: int,
    alignment: int,
    tensor_map_alignment: int,
) -> str:
    """The whole header; ``members`` are (name, type, offset, meaning) in order."""
    types = {kind.name for _, kind, _, _ in members}
    wide_maps = "CUtensorMap" in types and tensor_map_alignment == 128
    out = "#pragma once\n#include <assert.h>\n#include <stddef.h>\n#include <stdint.h>\n"
    out += "#ifndef __cplusplus\n#include <stdalign.h>\n#include <stdbool.h>\n#endif\n"
    out += "#include <cuda.h>\n" if wide_maps else ""
    out += _FAST_MOD_DIV if "FastModDiv" in types else ""
    out += _TENSOR_MAP_64 if "CUtensorMap" in types and not wide_maps else ""
    out += f"\nstruct\n#ifdef __cplusplus\n    alignas({alignment})\n#endif\n{name} {{\n"
    for member, kind, _, meaning in members:
        spelled = "TensorMap64" if kind.name == "CUtensorMap" and not wide_maps else kind.c_name
        count = "" if kind.count is None else f"[{kind.count}]"
        out += f"  {spelled} {member}{count};" + (f"  // {_one_line(meaning)}" if meaning else "") + "\n"
    out += "};\n"
    out += f"#ifndef __cplusplus\ntypedef struct {name} {name};\n#endif\n\n"
    out += f'static_assert(sizeof({name}) == {size}, "{name}: size");\n'
    out += f'static_assert(alignof({name}) == {alignment}, "{name}: alignment");\n'
    for member, _, offset, _ in members:
        out += f'static_assert(offsetof({name}, {member}) == {offset}, "{name}.{member}: offset");\n'
    return out


def _one_line(text: str) -> str:
    # A trailing backslash would pull the next member into the comment.
    return " ".join(text.split()).replace("\\", "/")
