"""TMA descriptors as values: described, checked rule by rule, then encoded by the driver and cached."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from ..values import dataclass
from .tensormap_rules import (
    DTYPES,
    FILLS,
    INTERLEAVES,
    L2_PROMOTIONS,
    SWIZZLES,
    TensorMapError,
    check_tensor_map,
)

if TYPE_CHECKING:
    from .driver import Driver

__all__ = ["MovedDescriptors", "TensorMapCache", "TensorMapEncoder", "TensorMapError", "TensorMapSpec"]
_MOST_MOVED = 128


@dataclass(frozen=True, slots=True)
class TensorMapSpec:
    """A tiled TMA descriptor before it is encoded; innermost dimension first.

    ``address`` is the device address; ``dims`` the size of each dimension in elements; ``strides`` the bytes
    between neighbours in dimensions 1 and up (one fewer than ``dims``; 0 repeats); ``box`` the elements one
    copy brings; ``element_strides`` the step in each dimension. Words for the rest are the keys of the tables
    in ``tensormap_rules``: ``dtype`` such as ``bfloat16``; ``interleave`` none, 16B, 32B; ``swizzle`` none,
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

    def moved(self, address: int) -> TensorMapSpec:
        """The same view of another address."""
        return TensorMapSpec(
            self.dtype,
            address,
            self.dims,
            self.strides,
            self.box,
            self.element_strides,
            self.interleave,
            self.swizzle,
            self.l2_promotion,
            self.fill,
        )

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
        return driver.encode_tiled(
            dtype=DTYPES[self.dtype].code,
            address=self.address,
            dims=self.dims,
            strides=self.strides,
            box=self.box,
            element_strides=self.element_strides,
            interleave=INTERLEAVES[self.interleave],
            swizzle=SWIZZLES[self.swizzle].code,
            l2_promotion=L2_PROMOTIONS[self.l2_promotion],
            fill=FILLS[self.fill],
        )


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

    A descriptor depends on the spec alone, so an entry never goes stale.
    """

    def __init__(self, driver: TensorMapEncoder, entries: int = 4096) -> None:
        self._driver = driver
        self._limit = entries
        self._lock = threading.RLock()
        self._encoded: OrderedDict[TensorMapSpec, bytes] = OrderedDict()

    def encode(self, spec: TensorMapSpec) -> bytes:
        """The 128 bytes for ``spec``, from the cache or freshly checked and encoded; errors as ``encode``."""
        with self._lock:
            found = self._encoded.get(spec)
            if found is not None:
                self._encoded.move_to_end(spec)
                return found
        encoded = spec.encode(self._driver)
        with self._lock:
            self._encoded[spec] = encoded
            while len(self._encoded) > self._limit:
                self._encoded.popitem(last=False)
        return encoded

    def __len__(self) -> int:
        return len(self._encoded)


class MovedDescriptors:
    """Descriptors of a few specs, each of which stays as it is, at the addresses to which their tensors move.

    The layers of a model come back to the same addresses in every step. Specs are told apart by identity, because to
    hash one takes longer than all else.
    """

    def __init__(self, cache: TensorMapCache, driver: Driver, context: int) -> None:
        """``cache`` encodes, with ``context`` current."""
        self._cache, self._driver, self._context = cache, driver, context
        self._found: dict[tuple[int, int], tuple[TensorMapSpec, bytes]] = {}

    def __call__(self, spec: TensorMapSpec, address: int) -> bytes:
        """The 128 bytes of ``spec`` at another address; errors as ``TensorMapCache.encode``."""
        place = id(spec), address
        found = self._found.get(place)
        if found is not None:
            return found[1]
        with self._driver.using(self._context):
            encoded = self._cache.encode(spec.moved(address))
        if len(self._found) >= _MOST_MOVED:
            self._found.clear()
        self._found[place] = spec, encoded  # whose identity no other spec gets while it is here
        return encoded
