"""The parameter struct of the kernels that measure read bandwidth: one source for Python and for C++."""

from __future__ import annotations

from types import MappingProxyType

from ....launch.structs import Field, StructLayout

STREAMING_READ = StructLayout.declare(
    "StreamingReadParams",
    (
        Field("data", "ptr", "what is read, aligned to 16 bytes"),
        Field("sums", "ptr", "uint32 [CTAs], sum of the 32-bit words that each CTA read, modulo 2^32"),
        Field("counters", "ptr", "uint32 [2], zero before and after a launch; bulk copies take turns by them"),
        Field("units", "int64", "16-byte units to read"),
    ),
)

ROW_READ = StructLayout.declare(
    "RowReadParams",
    (
        Field("data", "ptr", "rows, each as many bytes behind the one before, aligned to 16 bytes"),
        Field("indices", "ptr", "int32 [rows], the rows that are read"),
        Field("sums", "ptr", "uint32 [CTAs], sum of the 32-bit words that each CTA read, modulo 2^32"),
        Field("rows", "int32", "how many rows are read"),
        Field("row_bytes", "int32", "bytes of a row, a multiple of 16"),
    ),
)

LAYOUTS = MappingProxyType({layout.name: layout for layout in (STREAMING_READ, ROW_READ)})
