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

LAYOUTS = MappingProxyType({STREAMING_READ.name: STREAMING_READ})
