"""Our structures, numbers and prototypes against the C compiler (through the stand-in) and cuda.bindings."""

from __future__ import annotations

import ctypes
import re

import pytest
from cuda.bindings import driver as reference

from cubin_runtime.launch import driver_api as api
from cubin_runtime.launch.driver_errors import STICKY
from cubin_runtime.launch.tensormap import DTYPES, FILLS, INTERLEAVES, L2_PROMOTIONS, SWIZZLES
from cubin_runtime.testing import StandIn
from cubin_runtime.testing.graph_driver import CAPTURE_MODES, PROTOTYPES
from cubin_runtime.testing.standin import cuda_include

HEADER = (cuda_include() / "cuda.h").read_text(errors="replace")
C_TYPES = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "cuuint32_t": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "unsigned long long": ctypes.c_ulonglong,
    "unsigned char": ctypes.c_ubyte,
    "CUdevice": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    "void": None,
}

ALL = {**api.PROTOTYPES, **PROTOTYPES}


def ctype_of(declared: str) -> object:
    """The ctypes type for one C parameter as it is written in the header."""
    text = declared.replace("const ", "").strip()
    if re.fullmatch(r"char \*\w+", text) and "*name" in text and declared.startswith("const"):
        return ctypes.c_char_p
    if "*" in text:
        return ctypes.c_void_p
    kind = text.rsplit(" ", 1)[0] if " " in text else text
    if kind in C_TYPES:
        return C_TYPES[kind]
    is_enum = re.search(rf"typedef enum \w+ \{{[^}}]*\}} {kind};", HEADER) is not None
    return ctypes.c_int if is_enum else ctypes.c_void_p


def header_arguments(symbol: str) -> list[object]:
    """The parameter types of the header's prototype; versions of a name are reached through its base name."""
    base = re.sub(r"_v[0-9]+$", "", symbol)
    base = "cuGraphInstantiate" if base == "cuGraphInstantiateWithFlags" else base
    text = re.search(rf"^CUresult CUDAAPI {base}\(([^;]*)\);", HEADER, re.MULTILINE)
    assert text is not None
    parameters = [p for p in text[1].split(",") if p.strip() != "void"]
    return [ctype_of(p.strip()) for p in parameters]


@pytest.mark.parametrize("name", sorted(ALL))
def test_argument_types_are_those_of_the_header(name: str) -> None:
    assert list(ALL[name].arguments) == header_arguments(ALL[name].symbols[0])


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_symbol_is_the_version_that_the_header_maps_the_name_to(name: str) -> None:
    mapped = re.search(rf"^ *#define {name} +(?:__CUDA_API_PT..\()?(\w+)", HEADER, re.MULTILINE)
    expected = mapped[1] if mapped else name
    assert ALL[name].symbols[0] == expected.removesuffix("_ptsz").removesuffix("_ptds")


def test_the_stand_in_has_exactly_the_functions_we_use(standin: StandIn) -> None:
    assert standin.exports() == {p.symbols[0] for p in ALL.values()}


@pytest.mark.parametrize(
    ("ours", "theirs", "size"),
    [
        (api.LaunchConfig, reference.CUlaunchConfig, 56),
        (api.LaunchAttribute, reference.CUlaunchAttribute, 72),
    ],
)
def test_structure_sizes(ours: type, theirs: type, size: int) -> None:
    assert ctypes.sizeof(ours) == size
    assert theirs().getPtr()


NUMBERS = [
    (api.DEVICE_MULTIPROCESSORS, "CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
    (api.DEVICE_L2_BYTES, "CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE"),
    (api.DEVICE_CAPABILITY_MAJOR, "CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
    (api.DEVICE_CAPABILITY_MINOR, "CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
    (
        api.DEVICE_SHARED_PER_MULTIPROCESSOR,
        "CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    ),
    (
        api.DEVICE_SHARED_PER_BLOCK_OPTIN,
        "CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    ),
    (api.FUNC_MAX_THREADS, "CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK"),
    (api.FUNC_STATIC_SHARED_BYTES, "CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"),
    (api.FUNC_LOCAL_BYTES, "CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES"),
    (api.FUNC_REGISTERS, "CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS"),
    (
        api.FUNC_MAX_DYNAMIC_SHARED_BYTES,
        "CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    ),
    (
        api.FUNC_NONPORTABLE_CLUSTER,
        "CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
    ),
    (api.LAUNCH_CLUSTER_DIMENSION, "CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"),
    (
        api.LAUNCH_CLUSTER_SCHEDULING,
        "CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE",
    ),
    (
        api.LAUNCH_PROGRAMMATIC_SERIALIZATION,
        "CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    ),
    (api.CAPTURE_NONE, "CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE"),
    (CAPTURE_MODES["global"], "CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL"),
    (CAPTURE_MODES["thread_local"], "CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"),
    (CAPTURE_MODES["relaxed"], "CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED"),
    (api.STREAM_NON_BLOCKING, "CUstream_flags.CU_STREAM_NON_BLOCKING"),
    (api.EVENT_DISABLE_TIMING, "CUevent_flags.CU_EVENT_DISABLE_TIMING"),
    (api.USER_OBJECT_NO_DESTRUCTOR_SYNC, "CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC"),
    (api.GRAPH_USER_OBJECT_MOVE, "CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE"),
    (api.INVALID_VALUE, "CUresult.CUDA_ERROR_INVALID_VALUE"),
    (api.INVALID_CONTEXT, "CUresult.CUDA_ERROR_INVALID_CONTEXT"),
    (api.INVALID_HANDLE, "CUresult.CUDA_ERROR_INVALID_HANDLE"),
    (api.CAPTURE_UNSUPPORTED, "CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (api.CAPTURE_IMPLICIT, "CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
]


@pytest.mark.parametrize(("ours", "theirs"), NUMBERS, ids=[name for _, name in NUMBERS])
def test_enum_values(ours: int, theirs: str) -> None:
    enum, member = theirs.split(".")
    assert ours == int(getattr(getattr(reference, enum), member))


def names_of(enum: type, prefix: str) -> dict[str, int]:
    """A reference enum with its prefix cut off and in lower case."""
    return {
        name.removeprefix(prefix).lower(): int(value)
        for name, value in enum.__members__.items()  # type: ignore[attr-defined]
    }


def test_tensor_map_data_types() -> None:
    theirs = names_of(reference.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE_")
    assert {name: t.code for name, t in DTYPES.items()}.items() <= theirs.items()


def test_tensor_map_swizzles() -> None:
    theirs = names_of(reference.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE_")
    assert {name.lower(): s.code for name, s in SWIZZLES.items()}.items() <= theirs.items()


def test_tensor_map_interleaves() -> None:
    theirs = names_of(reference.CUtensorMapInterleave, "CU_TENSOR_MAP_INTERLEAVE_")
    assert {name.lower(): code for name, code in INTERLEAVES.items()}.items() <= theirs.items()


def test_tensor_map_promotions() -> None:
    theirs = names_of(reference.CUtensorMapL2promotion, "CU_TENSOR_MAP_L2_PROMOTION_")
    assert {name if name == "none" else f"l2_{name.lower()}": c for name, c in L2_PROMOTIONS.items()} == theirs


def test_tensor_map_fills() -> None:
    theirs = names_of(reference.CUtensorMapFloatOOBfill, "CU_TENSOR_MAP_FLOAT_OOB_FILL_")
    ours = {"none": FILLS["zero"], "nan_request_zero_fma": FILLS["nan"]}
    assert ours.items() <= theirs.items()


@pytest.mark.parametrize("code", sorted(STICKY))
def test_sticky_codes_exist(code: int) -> None:
    assert reference.CUresult(code).name.startswith("CUDA_ERROR_")
