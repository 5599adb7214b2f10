"""The places of a plan's regions in the workspaces that its runs have used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from ..launch.regions import Region
from ..provenance import traced

if TYPE_CHECKING:
    from ..launch.semaphore_workspace import AnyWorkspace

_MAX_PLACES = 1024  # that are remembered


class RegionPlaces:
    """The addresses of a plan's regions, by the place that ``claim`` gave; safe between threads.

    It knows no plan: the fast paths that a plan keeps refer to it.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._lock = threading.RLock()
        self._places: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()

    def __call__(self, workspace: AnyWorkspace, place: Hashable) -> tuple[int, ...]:
        """The address of each region in a place of the workspace.

        Raises:
            WorkspaceError: the place is too small.
        """
        addresses = self._places.get(place)
        if addresses is not None and not traced.call:  # a caller's buffers are to be seen in the addresses
            return addresses
        regions = workspace.regions(self._regions, place)
        addresses = tuple(regions[region.name] for region in self._regions)
        with self._lock:
            self._places[place] = addresses
            while len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)
        return addresses
