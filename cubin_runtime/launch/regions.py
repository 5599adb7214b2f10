"""The parts of a workspace: their sizes and alignments, and where they lie in a buffer."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError, WorkspaceError
from ..values import dataclass

REGION_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a workspace that a plan needs: its name, size in bytes and alignment (a power of two).

    ``zeroed``: it must be zero when a kernel first gets it, and kernels leave it so (but for a status word). ``lent``:
    it is too large for every plan to keep one, so a call with torch tensors takes torch's memory for the time of a run.
    """

    name: str
    nbytes: int
    alignment: int = REGION_ALIGNMENT
    zeroed: bool = False
    lent: bool = False

    def __hash__(self) -> int:  # the regions of a plan differ in their names
        return hash(self.name)

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise UsageError(f"{self}: expected bytes of 0 or more and an alignment that is a power of two")


def workspace_size(regions: Sequence[Region]) -> int:
    """Bytes that always suffice for ``regions``, wherever an address begins that is a multiple of 16."""
    slack = max([region.alignment for region in regions], default=1) - 16
    end = 0
    for region in regions:
        end += -end % region.alignment + region.nbytes
    return end + max(0, slack)


def place_regions(what: str, address: int, nbytes: int, needed: Sequence[Region]) -> dict[str, int]:
    """The address of each region, one after another from ``address``, each aligned as it asks.

    Raises:
        WorkspaceError: the ``nbytes`` there are too few; the message begins with ``what``.
    """
    addresses: dict[str, int] = {}
    at = address
    for region in needed:
        at += -at % region.alignment
        addresses[region.name] = at
        at += region.nbytes
    if at - address > nbytes:
        parts = ", ".join(f"{region.name} {region.nbytes}" for region in needed)
        error = WorkspaceError(f"{what} of {nbytes} bytes: {at - address} bytes are needed ({parts})")
        error.argument = what
        raise error
    return addresses
