"""A launch as a value: which kernel and why, grid, block, attributes, every parameter field."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from math import prod
from operator import gt, index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..values import dataclass
from . import driver_api as api
from .structs import FieldRow, StructLayout

if TYPE_CHECKING:
    from ..artifacts.path import ArtifactPath

Triple = tuple[int, int, int]
_GRID_LIMIT = (2**31 - 1, 65535, 65535)
_BLOCK_LIMIT = (1024, 1024, 64)
_THREADS_LIMIT = 1024
LARGEST_PORTABLE_CLUSTER = 8
_LARGEST_CLUSTER = 16
POLICIES = {0: "default", 1: "spread", 2: "load balancing"}


@dataclass(frozen=True, slots=True)
class LaunchAttributes:
    """Attributes of a launch.

    ``cluster`` is the cluster's size in blocks, ``scheduling_policy`` a CUclusterSchedulingPolicy (0 default,
    1 spread, 2 load balancing); None leaves either out. ``programmatic_serialization`` lets the kernel start
    before the previous one has ended (PDL). ``nonportable_cluster`` allows more than 8 blocks per cluster.
    """

    cluster: Triple | None = None
    scheduling_policy: int | None = None
    programmatic_serialization: bool = False
    nonportable_cluster: bool = False

    def __post_init__(self) -> None:
        if self.cluster is not None:
            object.__setattr__(self, "cluster", _integers("cluster", self.cluster))
            _check_triple("cluster", self.cluster, (_LARGEST_CLUSTER,) * 3)
            limit = _LARGEST_CLUSTER if self.nonportable_cluster else LARGEST_PORTABLE_CLUSTER
            if prod(self.cluster) > limit:
                raise UsageError(
                    f"{prod(self.cluster)} blocks, expected at most {limit} "
                    f"with nonportable_cluster={self.nonportable_cluster}",
                    argument="cluster",
                    value=self.cluster,
                )
        policy = self.scheduling_policy
        if policy is not None and not (isinstance(policy, int) and policy in POLICIES):
            raise UsageError(f"expected one of {POLICIES}", argument="scheduling_policy", value=self.scheduling_policy)

    def entries(self) -> tuple[tuple[int, bytes], ...]:
        """(CUlaunchAttributeID, value bytes) as they are passed: cluster, policy, PDL (always there)."""
        out: list[tuple[int, bytes]] = []
        if self.cluster is not None:
            out.append((api.LAUNCH_CLUSTER_DIMENSION, struct.pack("<III", *self.cluster)))
        if self.scheduling_policy is not None:
            out.append((api.LAUNCH_CLUSTER_SCHEDULING, struct.pack("<i", self.scheduling_policy)))
        serialization = struct.pack("<i", self.programmatic_serialization)
        out.append((api.LAUNCH_PROGRAMMATIC_SERIALIZATION, serialization))
        return tuple(out)

    def __str__(self) -> str:
        words = [f"cluster {self.cluster}"] if self.cluster else []
        if self.scheduling_policy is not None:
            words.append(f"policy {POLICIES[self.scheduling_policy]}")
        words.append(f"pdl {'on' if self.programmatic_serialization else 'off'}")
        return ", ".join(words + ["non-portable"] * self.nonportable_cluster)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything a launch needs except the loaded kernel and the stream.

    ``kernel`` is the readable name, ``symbol`` the one in the cubin, ``path`` and ``sha256`` identify the cubin.
    ``values`` holds every field of ``layout``, a ``TensorMapSpec`` or None for descriptors. ``inputs`` names, for each
    field whose value comes with a run, that value: a number, an address, or where a descriptor's tensor begins; its
    entry in ``values`` is then what holds without one. ``shared_bytes`` is dynamic shared memory per block. ``why``, as
    text, states why this kernel was chosen.

    Raises:
        UsageError: grid, block or cluster is outside what any device takes, or a field is missing or unknown.
    """

    kernel: str
    symbol: str
    path: ArtifactPath
    sha256: str
    layout: StructLayout
    grid: Triple
    block: Triple
    shared_bytes: int
    attributes: LaunchAttributes
    values: Mapping[str, object]
    why: object
    inputs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_triple("grid", self.grid, _GRID_LIMIT)
        _check_triple("block", self.block, _BLOCK_LIMIT)
        if prod(self.block) > _THREADS_LIMIT:
            raise UsageError(
                f"{prod(self.block)} threads, expected at most {_THREADS_LIMIT}", argument="block", value=self.block
            )
        if not 0 <= self.shared_bytes < 1 << 32:
            raise UsageError("expected 0 or more", argument="shared_bytes", value=self.shared_bytes)
        cluster = self.attributes.cluster
        if cluster and any(blocks % by for blocks, by in zip(self.grid, cluster, strict=True)):
            raise UsageError(f"expected multiples of the cluster {cluster}", argument="grid", value=self.grid)
        named = self.layout.names
        if named != self.values.keys():
            raise UsageError(
                f"values of struct {self.layout.name}: missing {sorted(named - set(self.values))}, "
                f"unknown {sorted(set(self.values) - named)}"
            )
        if not named >= self.inputs.keys():
            raise UsageError(f"inputs of struct {self.layout.name}: unknown {sorted(set(self.inputs) - named)}")
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return prod(self.block)

    @property
    def reason(self) -> str:
        """The reason for the choice of this kernel."""
        return str(self.why)

    def describe(self) -> tuple[FieldRow, ...]:
        """The parameter struct field by field as planned; descriptors are still specs, no driver needed."""
        return tuple(FieldRow(m.name, m.type, m.offset, self.values[m.name], m.meaning) for m in self.layout.fields)


def launch_config(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, attributes: LaunchAttributes
) -> api.LaunchConfig:
    """A CUlaunchConfig with its attributes, on stream 0; it keeps the attribute array alive."""
    array, count = _attribute_array(attributes)
    config = api.LaunchConfig(*grid, *block, shared_bytes, 0, ctypes.addressof(array), count)
    config.keep = array
    return config


@lru_cache(maxsize=256)  # nobody writes to it
def _attribute_array(attributes: LaunchAttributes) -> tuple[ctypes.Array[api.LaunchAttribute], int]:
    entries = attributes.entries()
    return api.attribute_array(entries), len(entries)


def _integers(name: str, value: Any) -> Any:
    """``value`` as a tuple of ints.

    Raises:
        UsageError: it is no sequence of integers; the message begins with ``name``.
    """
    try:
        return tuple(map(index, value))
    except TypeError as error:
        raise UsageError("expected three integers", argument=name, value=repr(value)) from error


def _check_triple(name: str, value: Triple, limits: Triple) -> None:
    if len(value) != 3 or min(value) < 1 or any(map(gt, value, limits)):
        raise UsageError(f"expected three numbers from 1 to {limits}", argument=name, value=value)
