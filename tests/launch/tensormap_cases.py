"""Descriptors at the edge of each rule: ones that must be accepted, and ones that break exactly one rule."""

from __future__ import annotations

from cubin_runtime.launch.tensormap import TensorMapSpec

BASE = TensorMapSpec(
    dtype="bfloat16",
    address=0x7F0000000000,
    dims=(128, 64, 8, 100),
    strides=(2048, 256, 131072),
    box=(64, 64, 1, 1),
    element_strides=(1, 1, 1, 1),
    swizzle="128B",
    l2_promotion="128B",
)
FLAT = TensorMapSpec("uint8", 0x7F0000000000, (1024,), (), (256,), (1,))
INTERLEAVED = BASE._replace(interleave="16B", swizzle="none", dims=(8, 64, 100), strides=(2048, 4096), box=(8, 8, 1))
INTERLEAVED = INTERLEAVED._replace(element_strides=(1, 1, 1))
INTERLEAVED_32 = INTERLEAVED._replace(interleave="32B", swizzle="32B")
FP4 = BASE._replace(dtype="16u4_align16b", dims=(256, 64, 8, 100), box=(128, 64, 1, 1))
FP6 = FP4._replace(dtype="16u6_align16b")
FP4_DENSE = BASE._replace(dtype="16u4_align8b", dims=(256, 64, 8, 100), box=(128, 64, 1, 1))


def dims(spec: TensorMapSpec, index: int, value: int) -> TensorMapSpec:
    return spec._replace(dims=_with(spec.dims, index, value))


def stride(spec: TensorMapSpec, index: int, value: int) -> TensorMapSpec:
    return spec._replace(strides=_with(spec.strides, index, value))


def box(spec: TensorMapSpec, index: int, value: int) -> TensorMapSpec:
    return spec._replace(box=_with(spec.box, index, value))


def step(spec: TensorMapSpec, index: int, value: int) -> TensorMapSpec:
    return spec._replace(element_strides=_with(spec.element_strides, index, value))


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def of_rank(rank: int) -> TensorMapSpec:
    return TensorMapSpec("float32", 0x7F0000000000, (64,) * rank, (256,) * (rank - 1), (4,) * rank, (1,) * rank)


ACCEPTED: dict[str, TensorMapSpec] = {
    "paged keys": BASE,
    "rank 1": FLAT,
    "rank 5": of_rank(5),
    "interleaved 16B": INTERLEAVED,
    "interleaved 32B": INTERLEAVED_32,
    "interleaved 32B without swizzle": INTERLEAVED_32._replace(swizzle="none"),
    "address 16": BASE._replace(address=0x7F0000000010),
    "address 32, interleaved 32B": INTERLEAVED_32._replace(address=0x7F0000000020),
    "address 32, packed": FP4._replace(address=0x7F0000000020),
    "dim 1": dims(BASE, 3, 1),
    "dim 2^32": dims(BASE, 3, 1 << 32),
    "stride 0": stride(BASE, 2, 0),
    "stride 16": stride(BASE, 0, 16),
    "stride below 2^40": stride(BASE, 2, (1 << 40) - 16),
    "strides that shrink": BASE._replace(strides=(131072, 256, 2048)),
    "strides that do not divide": BASE._replace(strides=(48, 80, 112)),
    "box 1": box(BASE, 1, 1),
    "box 256": box(BASE, 1, 256),
    "box larger than dim": BASE._replace(dims=(64, 2, 2, 2), box=(64, 4, 4, 4)),
    "box of 228 KiB": BASE._replace(box=(64, 228, 8, 1)),
    "inner box 16 bytes": box(BASE, 0, 8),
    "inner box fills the 32B span": box(BASE, 0, 16)._replace(swizzle="32B"),
    "inner box fills the 64B span": box(BASE, 0, 32)._replace(swizzle="64B"),
    "inner box 512 bytes without swizzle": box(BASE, 0, 256)._replace(swizzle="none", dims=(256, 64, 8, 100)),
    "element stride 8": step(BASE, 1, 8),
    "nan fill": BASE._replace(fill="nan"),
    "nan fill float64": of_rank(2)._replace(dtype="float64", fill="nan"),
    "l2 256B": BASE._replace(l2_promotion="256B"),
    "packed fp4": FP4,
    "packed fp6": FP6._replace(swizzle="none"),
    "dense fp4": FP4_DENSE,
    "atom 32B": BASE._replace(swizzle="128B_atom_32B"),
    "atom 64B": BASE._replace(swizzle="128B_atom_64B"),
    "atom 32B flip 8B": BASE._replace(swizzle="128B_atom_32B_flip_8B"),
    "packed fp4, atom 32B": FP4._replace(swizzle="128B_atom_32B"),
    "packed fp6, atom 64B": FP6._replace(swizzle="128B_atom_64B"),
}
BROKEN: dict[str, tuple[str, TensorMapSpec]] = {
    "rank 0": ("rank", TensorMapSpec("uint8", 0, (), (), (), ())),
    "rank 6": ("rank", of_rank(6)),
    "rank 2, interleaved": ("rank-interleaved", of_rank(2)._replace(interleave="16B")),
    "address 8": ("address-alignment", BASE._replace(address=0x7F0000000008)),
    "address 16, interleaved 32B": (
        "address-alignment-32",
        INTERLEAVED_32._replace(address=0x7F0000000010),
    ),
    "address 16, packed fp4": ("address-alignment-32", FP4._replace(address=0x7F0000000010)),
    "address 16, packed fp6": ("address-alignment-32", FP6._replace(address=0x7F0000000010)),
    "dim 0": ("dim-range", dims(BASE, 3, 0)),
    "dim 2^32 + 1": ("dim-range", dims(BASE, 3, (1 << 32) + 1)),
    "dim0 no multiple of 128, packed fp4": ("dim0-packed", dims(FP4, 0, 192)),
    "dim0 no multiple of 128, packed fp6": ("dim0-packed", dims(FP6, 0, 192)),
    "dim0 odd, dense fp4": ("dim0-packed", dims(FP4_DENSE, 0, 255)),
    "stride 8": ("stride-multiple", stride(BASE, 0, 2056)),
    "stride 16, interleaved 32B": ("stride-multiple-32", stride(INTERLEAVED_32, 0, 2064)),
    "stride 16, packed fp4": ("stride-multiple-32", stride(FP4, 0, 2064)),
    "stride 16, packed fp6": ("stride-multiple-32", stride(FP6, 0, 2064)),
    "stride 2^40": ("stride-range", stride(BASE, 2, 1 << 40)),
    "box 0": ("box-range", box(BASE, 1, 0)),
    "box 257": ("box-range", box(BASE, 1, 257)),
    "box0 64, packed fp4": ("box0-packed", box(FP4, 0, 64)),
    "box0 64, packed fp6": ("box0-packed", box(FP6, 0, 64)),
    "inner box 8 bytes": ("box0-bytes", box(BASE, 0, 4)),
    "inner box 24 bytes": ("box0-bytes", box(BASE, 0, 12)),
    "inner box 4 bytes, dense fp4": ("box0-bytes", box(FP4_DENSE, 0, 8)),
    "inner box over the 32B span": ("swizzle-span", box(BASE, 0, 32)._replace(swizzle="32B")),
    "inner box over the 64B span": ("swizzle-span", BASE._replace(swizzle="64B")),
    "inner box over the 128B span": ("swizzle-span", box(BASE, 0, 128)),
    "inner box over the atom's span": ("swizzle-span", box(BASE, 0, 128)._replace(swizzle="128B_atom_32B")),
    "box over 228 KiB": ("box-bytes", BASE._replace(box=(64, 229, 8, 1))),
    "swizzle 64B, packed fp4": ("swizzle-packed", FP4._replace(swizzle="64B")),
    "swizzle atom 64B, packed fp4": ("swizzle-packed", FP4._replace(swizzle="128B_atom_64B")),
    "swizzle 32B, packed fp6": ("swizzle-packed", FP6._replace(swizzle="32B")),
    "interleaved, packed fp6": ("interleave-packed", FP6._replace(interleave="16B")),
    "element stride 0": ("element-stride-range", step(BASE, 1, 0)),
    "element stride 9": ("element-stride-range", step(BASE, 1, 9)),
    "inner element stride 0": ("element-stride-range", step(BASE, 0, 0)),
    "inner element stride 9": ("element-stride-range", step(BASE, 0, 9)),
    "nan fill of integers": ("nan-fill", FLAT._replace(fill="nan")),
    "nan fill of fp4": ("nan-fill", FP4._replace(fill="nan")),
}
