"""The part of the CUDA driver that we use: each function with its argument types, the enum values, two structures."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ..values import dataclass

_INT = ctypes.c_int
_UINT = ctypes.c_uint
_SIZE = ctypes.c_size_t
_U64 = ctypes.c_uint64
_TEXT = ctypes.c_char_p
# Handles (CUcontext, CUstream, ...), output pointers and arrays all travel as addresses.
_ADDRESS = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Prototype:
    """A driver function: symbols to try in order, and ctypes argument types; all return CUresult.

    Not ``converted``: callers pass ctypes objects instead of numbers, which spares a third of a call's cost.
    ``relaxed``: it allocates, frees, loads or waits, which the driver takes for unsafe beside a capture of another
    thread in global mode, and spoils that capture, unless the calling thread's mode is relaxed.
    """

    symbols: tuple[str, ...]
    arguments: tuple[Any, ...]
    converted: bool = True
    relaxed: bool = False


def _f(symbols: str, *arguments: Any, relaxed: bool = False) -> Prototype:
    return Prototype(tuple(symbols.split()), arguments, relaxed=relaxed)


PROTOTYPES: dict[str, Prototype] = {
    "cuInit": _f("cuInit", _UINT),
    "cuDriverGetVersion": _f("cuDriverGetVersion", _ADDRESS),
    "cuGetErrorName": _f("cuGetErrorName", _INT, _ADDRESS),
    "cuGetErrorString": _f("cuGetErrorString", _INT, _ADDRESS),
    "cuDeviceGetCount": _f("cuDeviceGetCount", _ADDRESS),
    "cuDeviceGet": _f("cuDeviceGet", _ADDRESS, _INT),
    "cuDeviceGetName": _f("cuDeviceGetName", _ADDRESS, _INT, _INT),
    "cuDeviceGetAttribute": _f("cuDeviceGetAttribute", _ADDRESS, _INT, _INT),
    "cuDevicePrimaryCtxRetain": _f("cuDevicePrimaryCtxRetain", _ADDRESS, _INT, relaxed=True),
    "cuDevicePrimaryCtxRelease": _f("cuDevicePrimaryCtxRelease_v2", _INT, relaxed=True),
    "cuCtxGetCurrent": _f("cuCtxGetCurrent", _ADDRESS),
    "cuCtxSetCurrent": _f("cuCtxSetCurrent", _ADDRESS),
    "cuCtxPushCurrent": _f("cuCtxPushCurrent_v2", _ADDRESS),
    "cuCtxPopCurrent": _f("cuCtxPopCurrent_v2", _ADDRESS),
    "cuCtxGetDevice": _f("cuCtxGetDevice", _ADDRESS),
    "cuMemGetInfo": _f("cuMemGetInfo_v2", _ADDRESS, _ADDRESS, relaxed=True),
    "cuMemAlloc": _f("cuMemAlloc_v2", _ADDRESS, _SIZE, relaxed=True),
    "cuMemFree": _f("cuMemFree_v2", _U64, relaxed=True),
    "cuMemcpyHtoD": _f("cuMemcpyHtoD_v2", _U64, _ADDRESS, _SIZE, relaxed=True),
    "cuMemcpyDtoH": _f("cuMemcpyDtoH_v2", _ADDRESS, _U64, _SIZE, relaxed=True),
    "cuMemsetD8Async": _f("cuMemsetD8Async", _U64, ctypes.c_ubyte, _SIZE, _ADDRESS),
    "cuMemsetD32Async": _f("cuMemsetD32Async", _U64, _UINT, _SIZE, _ADDRESS),
    "cuStreamCreate": _f("cuStreamCreate", _ADDRESS, _UINT, relaxed=True),
    "cuStreamDestroy": _f("cuStreamDestroy_v2", _ADDRESS, relaxed=True),
    "cuStreamSynchronize": _f("cuStreamSynchronize", _ADDRESS, relaxed=True),
    "cuThreadExchangeStreamCaptureMode": _f("cuThreadExchangeStreamCaptureMode", _ADDRESS),
    "cuStreamIsCapturing": _f("cuStreamIsCapturing", _ADDRESS, _ADDRESS),
    "cuStreamGetCaptureInfo": _f("cuStreamGetCaptureInfo_v3", *[_ADDRESS] * 7),
    "cuStreamGetId": _f("cuStreamGetId", _ADDRESS, _ADDRESS),
    "cuStreamGetCtx": _f("cuStreamGetCtx", _ADDRESS, _ADDRESS),
    "cuUserObjectCreate": _f("cuUserObjectCreate", _ADDRESS, _ADDRESS, _ADDRESS, _UINT, _UINT),
    "cuGraphRetainUserObject": _f("cuGraphRetainUserObject", _ADDRESS, _ADDRESS, _UINT, _UINT),
    "cuEventCreate": _f("cuEventCreate", _ADDRESS, _UINT),
    "cuEventDestroy": _f("cuEventDestroy_v2", _ADDRESS, relaxed=True),
    "cuEventRecord": _f("cuEventRecord", _ADDRESS, _ADDRESS),
    "cuEventSynchronize": _f("cuEventSynchronize", _ADDRESS, relaxed=True),
    "cuEventElapsedTime": _f("cuEventElapsedTime_v2 cuEventElapsedTime", _ADDRESS, _ADDRESS, _ADDRESS),
    "cuModuleLoadData": _f("cuModuleLoadData", _ADDRESS, _ADDRESS, relaxed=True),
    "cuModuleUnload": _f("cuModuleUnload", _ADDRESS, relaxed=True),
    "cuModuleGetFunction": _f("cuModuleGetFunction", _ADDRESS, _ADDRESS, _TEXT, relaxed=True),
    "cuFuncGetAttribute": _f("cuFuncGetAttribute", _ADDRESS, _INT, _ADDRESS, relaxed=True),
    "cuFuncSetAttribute": _f("cuFuncSetAttribute", _ADDRESS, _INT, _INT, relaxed=True),
    "cuFuncGetParamInfo": _f("cuFuncGetParamInfo", _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, relaxed=True),
    "cuFuncLoad": _f("cuFuncLoad", _ADDRESS, relaxed=True),
    "cuOccupancyMaxActiveClusters": _f("cuOccupancyMaxActiveClusters", _ADDRESS, _ADDRESS, _ADDRESS, relaxed=True),
    "cuTensorMapEncodeTiled": _f(
        "cuTensorMapEncodeTiled",
        *(_ADDRESS, _INT, _UINT, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT, _INT, _INT, _INT),
    ),
    "cuTensorMapReplaceAddress": _f("cuTensorMapReplaceAddress", _ADDRESS, _ADDRESS),
    "cuLaunchKernelEx": Prototype(("cuLaunchKernelEx",), (_ADDRESS,) * 4, converted=False),
}

# CUdevice_attribute
DEVICE_MULTIPROCESSORS = 16
DEVICE_L2_BYTES = 38
DEVICE_CAPABILITY_MAJOR = 75
DEVICE_CAPABILITY_MINOR = 76
DEVICE_SHARED_PER_MULTIPROCESSOR = 81
DEVICE_SHARED_PER_BLOCK_OPTIN = 97
# CUfunction_attribute
FUNC_MAX_THREADS = 0
FUNC_STATIC_SHARED_BYTES = 1
FUNC_LOCAL_BYTES = 3
FUNC_REGISTERS = 4
FUNC_MAX_DYNAMIC_SHARED_BYTES = 8
FUNC_NONPORTABLE_CLUSTER = 14
# CUlaunchAttributeID
LAUNCH_CLUSTER_DIMENSION = 4
LAUNCH_CLUSTER_SCHEDULING = 5
LAUNCH_PROGRAMMATIC_SERIALIZATION = 6
# CUstreamCaptureStatus
CAPTURE_NONE = 0
# CUstreamCaptureMode
CAPTURE_MODE_RELAXED = 2
# CUstream_flags and CUevent_flags
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
# CUuserObject_flags and CUuserObjectRetain_flags
USER_OBJECT_NO_DESTRUCTOR_SYNC = 1
GRAPH_USER_OBJECT_MOVE = 1
# CUresult values that code decides on
INVALID_VALUE = 1
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
CAPTURE_UNSUPPORTED = 900
CAPTURE_IMPLICIT = 906
INVALID_CLUSTER_SIZE = 912


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: 72 bytes, the 64-byte value union at offset 8."""

    _fields_ = [("id", _INT), ("pad", ctypes.c_ubyte * 4), ("value", ctypes.c_ubyte * 64)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: 56 bytes; ``stream`` and ``attributes`` are addresses."""

    _fields_ = [
        *((name, _UINT) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", _UINT),
        ("stream", _ADDRESS),
        ("attributes", _ADDRESS),
        ("attribute_count", _UINT),
    ]


def attribute_array(entries: Sequence[tuple[int, bytes]]) -> ctypes.Array[LaunchAttribute]:
    """A CUlaunchAttribute array from (id, value bytes) pairs, the rest of each union zero."""
    array = (LaunchAttribute * max(1, len(entries)))()
    for slot, (identity, value) in zip(array, entries, strict=False):
        slot.id = identity
        slot.value[: len(value)] = list(value)
    return array
