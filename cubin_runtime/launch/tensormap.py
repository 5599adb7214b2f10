"""TMA descriptors as values: described, checked rule by rule, then encoded by the driver and cached.

The rules are those of the driver's documentation (CUDA 13.0), compared with a driver (tests/gpu). Not among them, since
it takes the contrary: that strides grow or divide one another, and that interleave 32B goes with swizzle 32B only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import UsageError

if TYPE_CHECKING:
    from .driver import Driver

_MOST_MOVED = 512


class DataType(NamedTuple):
    """A CUtensorMapDataType: its number, the bits of an element in memory, whether NaN fill makes sense."""

    code: int
    bits: int
    floating: bool


class Swizzle(NamedTuple):
    """A CUtensorMapSwizzle: its number, and the span in bytes that a box row must fit (None: any)."""

    code: int
    span: int | None


DTYPES = {
    "uint8": DataType(0, 8, False),
    "uint16": DataType(1, 16, False),
    "uint32": DataType(2, 32, False),
    "int32": DataType(3, 32, False),
    "uint64": DataType(4, 64, False),
    "int64": DataType(5, 64, False),
    "float16": DataType(6, 16, True),
    "float32": DataType(7, 32, True),
    "float64": DataType(8, 64, True),
    "bfloat16": DataType(9, 16, True),
    "float32_ftz": DataType(10, 32, True),
    "tfloat32": DataType(11, 32, True),
    "tfloat32_ftz": DataType(12, 32, True),
    "16u4_align8b": DataType(13, 4, False),
    "16u4_align16b": DataType(14, 4, False),
    "16u6_align16b": DataType(15, 6, False),
}
INTERLEAVES = {"none": 0, "16B": 1, "32B": 2}
SWIZZLES = {
    "none": Swizzle(0, None),
    "32B": Swizzle(1, 32),
    "64B": Swizzle(2, 64),
    "128B": Swizzle(3, 128),
    "128B_atom_32B": Swizzle(4, 128),
    "128B_atom_32B_flip_8B": Swizzle(5, 128),
    "128B_atom_64B": Swizzle(6, 128),
}
L2_PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
FILLS = {"zero": 0, "nan": 1}

# Packed types that leave gaps in shared memory come in units of 32 bytes and 128 elements.
_GAPPED_SWIZZLES = {
    "16u4_align16b": ("none", "128B", "128B_atom_32B"),
    "16u6_align16b": ("none", "128B", "128B_atom_32B", "128B_atom_64B"),
}
# Not documented: a driver for CUDA 13.0 takes boxes up to all shared memory of an SM of capability 9.0, and no more.
_BOX_BYTES = 228 << 10
RULES = (
    "word",
    "rank",
    "rank-interleaved",
    "shape",
    "address-alignment",
    "address-alignment-32",
    "dim-range",
    "dim0-packed",
    "stride-multiple",
    "stride-multiple-32",
    "stride-range",
    "box-range",
    "box0-packed",
    "box0-bytes",
    "box-bytes",
    "swizzle-span",
    "swizzle-packed",
    "interleave-packed",
    "element-stride-range",
    "nan-fill",
)


_WORDS: Mapping[str, Collection[str]] = {
    "dtype": DTYPES,
    "interleave": INTERLEAVES,
    "swizzle": SWIZZLES,
    "l2_promotion": L2_PROMOTIONS,
    "fill": FILLS,
}


class TensorMapError(UsageError):
    """A descriptor breaks a rule of the driver; ``rule`` is its name, one of ``RULES``."""

    def __init__(self, rule: str, message: str) -> None:
        self.rule = rule
        super().__init__(f"tensor map rule {rule!r}: {message}")


class TensorMapSpec(NamedTuple):
    """A tiled TMA descriptor before it is encoded; innermost dimension first.

    ``address`` is the device address; ``dims`` the size of each dimension in elements; ``strides`` the bytes
    between neighbours in dimensions 1 and up (one fewer than ``dims``; 0 repeats); ``box`` the elements one
    copy brings; ``element_strides`` the step in each dimension. Words for the rest are the keys of the tables
    here: ``dtype`` such as ``bfloat16``; ``interleave`` none, 16B, 32B; ``swizzle`` none,
    32B, 64B, 128B and the atoms; ``l2_promotion`` none, 64B, 128B, 256B; ``fill`` zero or nan, what a read
    outside the tensor gives.
    """

    dtype: str
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: str = "none"
    swizzle: str = "none"
    l2_promotion: str = "none"
    fill: str = "zero"

    def check(self) -> None:
        """Check the spec against every rule of the driver.

        Raises:
            TensorMapError: the first rule broken, in its ``rule``.
        """
        check_tensor_map(self)

    def encode(self, driver: TensorMapEncoder) -> bytes:
        """Check, then let the driver encode: 128 bytes.

        Raises:
            TensorMapError: a rule is broken.
            DriverError: the driver refuses all the same.
        """
        self.check()
        return self.encode_unchecked(driver)

    def encode_unchecked(self, driver: TensorMapEncoder) -> bytes:
        """Skip our rules, so that tests can compare them with the driver's. Words must still be known ones."""
        return driver.encode_tiled(address=self.address, **self.words())

    def encoder(self, driver: Driver) -> Callable[[int], bytes]:
        """A function that encodes the same view of another address, a multiple of 16, without checks.

        Raises:
            TensorMapError: a rule is broken.
        """
        self.check()
        return driver.tiled_encoder(**self.words())

    def words(self) -> dict[str, Any]:
        """All but the address, as the driver takes it."""
        return {
            "dtype": DTYPES[self.dtype].code,
            "dims": self.dims,
            "strides": self.strides,
            "box": self.box,
            "element_strides": self.element_strides,
            "interleave": INTERLEAVES[self.interleave],
            "swizzle": SWIZZLES[self.swizzle].code,
            "l2_promotion": L2_PROMOTIONS[self.l2_promotion],
            "fill": FILLS[self.fill],
        }


class TensorMapEncoder(Protocol):
    """The one driver call that encoding needs; ``Driver`` has it."""

    def encode_tiled(
        self,
        *,
        dtype: int,
        address: int,
        dims: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        element_strides: tuple[int, ...],
        interleave: int,
        swizzle: int,
        l2_promotion: int,
        fill: int,
    ) -> bytes:
        """The 128 bytes of the descriptor."""
        ...


class TensorMapCache:
    """Encoded descriptors by spec, least recently used out first; safe between threads.

    ``encode`` gives the 128 bytes for a spec, from the cache or freshly checked and encoded; errors as
    ``TensorMapSpec.encode``. A descriptor depends on the spec alone, so an entry never goes stale.
    """

    def __init__(self, driver: TensorMapEncoder, entries: int = 4096) -> None:
        cached = lru_cache(maxsize=entries)(partial(_encoded, driver))
        self.encode: Callable[[TensorMapSpec], bytes] = cached
        self._info = cached.cache_info

    def __len__(self) -> int:
        return self._info().currsize


def _encoded(driver: TensorMapEncoder, spec: TensorMapSpec) -> bytes:
    return spec.encode(driver)


class MovedDescriptors:
    """Descriptors of a few specs, each of which stays as it is, at the addresses to which their tensors move.

    The layers of a model come back to the same addresses in every step. Specs are told apart by identity, because to
    hash one takes longer than all else.
    """

    def __init__(self, cache: TensorMapCache, driver: Driver, context: int) -> None:
        """``cache`` encodes, with ``context`` current."""
        self._cache, self._driver, self._context = cache, driver, context
        self._descriptors: dict[tuple[int, int], tuple[TensorMapSpec, bytes]] = {}

    def __call__(self, spec: TensorMapSpec, address: int) -> bytes:
        """The 128 bytes of ``spec`` at another address; errors as ``TensorMapCache.encode``."""
        place = id(spec), address
        moved = self._descriptors.get(place)
        if moved is not None:
            return moved[1]
        with self._driver.using(self._context):
            encoded = self._cache.encode(spec._replace(address=address))
        if len(self._descriptors) >= _MOST_MOVED:
            self._descriptors.clear()
        self._descriptors[place] = spec, encoded  # whose identity no other spec gets while it is here
        return encoded


def check_tensor_map(spec: TensorMapSpec) -> None:
    """Raise ``TensorMapError`` for the first rule that ``spec`` breaks; return if there is none."""
    _check_words(spec)
    _check_shape(spec)
    packed = spec.dtype in _GAPPED_SWIZZLES
    coarse = packed or spec.interleave == "32B"
    _check_memory(spec, packed, coarse)
    _check_box(spec, packed)
    _check_modes(spec, packed)


def _check_words(spec: TensorMapSpec) -> None:
    for name, numbers in _WORDS.items():
        value = getattr(spec, name)
        if value not in numbers:
            raise TensorMapError("word", f"{name}={value!r}: expected one of {', '.join(numbers)}")


def _check_shape(spec: TensorMapSpec) -> None:
    rank = len(spec.dims)
    if not 1 <= rank <= 5:
        raise TensorMapError("rank", f"dims={spec.dims}: expected 1 to 5 dimensions")
    if spec.interleave != "none" and rank < 3:
        raise TensorMapError(
            "rank-interleaved", f"dims={spec.dims} with interleave {spec.interleave}: expected 3 to 5 dimensions"
        )
    for name, length in (("strides", rank - 1), ("box", rank), ("element_strides", rank)):
        value = getattr(spec, name)
        if len(value) != length:
            raise TensorMapError("shape", f"{name}={value}: expected {length} of them for {rank} dimensions")


def _check_memory(spec: TensorMapSpec, packed: bool, coarse: bool) -> None:
    if spec.address % 16 or not 0 <= spec.address < 1 << 64:
        raise TensorMapError("address-alignment", f"address={spec.address:#x}: expected a multiple of 16 below 2^64")
    if coarse and spec.address % 32:
        at = f"address={spec.address:#x}"
        raise TensorMapError("address-alignment-32", f"{at}: expected a multiple of 32 ({_why(spec)})")
    for i, dim in enumerate(spec.dims):
        if not 1 <= dim <= 1 << 32:
            raise TensorMapError("dim-range", f"dims[{i}]={dim}: expected 1 to 2^32")
    unit = 128 if packed else 2 if spec.dtype == "16u4_align8b" else 1
    if spec.dims[0] % unit:
        raise TensorMapError("dim0-packed", f"dims[0]={spec.dims[0]}: expected a multiple of {unit} ({spec.dtype})")
    for i, stride in enumerate(spec.strides):
        if stride % 16:
            raise TensorMapError("stride-multiple", f"strides[{i}]={stride}: expected a multiple of 16 bytes")
        if coarse and stride % 32:
            raise TensorMapError(
                "stride-multiple-32", f"strides[{i}]={stride}: expected a multiple of 32 bytes ({_why(spec)})"
            )
        if not 0 <= stride < 1 << 40:
            raise TensorMapError("stride-range", f"strides[{i}]={stride}: expected 0 to below 2^40")


def _why(spec: TensorMapSpec) -> str:
    return f"{spec.dtype}, interleave {spec.interleave}"


def _check_box(spec: TensorMapSpec, packed: bool) -> None:  # noqa: C901
    for i, extent in enumerate(spec.box):
        if not 1 <= extent <= 256:
            raise TensorMapError("box-range", f"box[{i}]={extent}: expected 1 to 256")
    for i, step in enumerate(spec.element_strides):
        if not 1 <= step <= 8:
            raise TensorMapError("element-stride-range", f"element_strides[{i}]={step}: expected 1 to 8")
    if packed:
        if spec.box[0] != 128:
            raise TensorMapError("box0-packed", f"box[0]={spec.box[0]}: expected 128 ({spec.dtype})")
        return
    bits = spec.box[0] * DTYPES[spec.dtype].bits
    nbytes = prod(spec.box) * DTYPES[spec.dtype].bits // 8
    if nbytes > _BOX_BYTES:
        raise TensorMapError(
            "box-bytes", f"box={spec.box} of {spec.dtype} is {nbytes} bytes: expected {_BOX_BYTES} at most"
        )
    if spec.interleave == "none":
        if bits % 128:
            raise TensorMapError(
                "box0-bytes", f"box[0]={spec.box[0]} of {spec.dtype} is {bits / 8:g} bytes: expected a multiple of 16"
            )
        span = SWIZZLES[spec.swizzle].span
        if span is not None and bits > span * 8:
            raise TensorMapError(
                "swizzle-span",
                f"box[0]={spec.box[0]} of {spec.dtype} is {bits / 8:g} bytes: swizzle {spec.swizzle} takes at most "
                f"{span}",
            )


def _check_modes(spec: TensorMapSpec, packed: bool) -> None:
    if packed:
        swizzles = _GAPPED_SWIZZLES[spec.dtype]
        if spec.swizzle not in swizzles:
            raise TensorMapError(
                "swizzle-packed", f"swizzle={spec.swizzle}: expected one of {', '.join(swizzles)} for {spec.dtype}"
            )
    if spec.dtype == "16u6_align16b" and spec.interleave != "none":
        raise TensorMapError("interleave-packed", f"interleave={spec.interleave}: expected none for {spec.dtype}")
    if spec.fill != "zero" and not DTYPES[spec.dtype].floating:
        raise TensorMapError(
            "nan-fill", f"fill={spec.fill}: expected zero for {spec.dtype}, which is not a floating-point type"
        )
