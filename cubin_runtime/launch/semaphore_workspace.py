"""Scratch in two buffers of the caller's: semaphores, which hold zeros between launches, and the rest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING

from ..dtypes import ITEM_BYTES
from ..errors import UsageError, WorkspaceError
from ..tensor import Tensor, view_of
from ..values import dataclass
from .regions import Region, place_regions
from .workspace import Place, Workspace

if TYPE_CHECKING:
    from ..protocols import Stream


@dataclass(frozen=True, slots=True)
class SemaphoreWorkspace:
    """A caller's two buffers, each ``(address, bytes)``, for operators that keep such a convention.

    ``semaphores`` is zero before the first launch that gets it and holds nothing but regions that begin as zeros,
    so that launches of any plan may follow one another on it; ``scratch`` may hold anything. The caller keeps work on
    other streams away from both. ``context`` is where they live; None: the current one, or the device's primary one.
    ``owner`` is held as long as this is, where somebody else's dropping it would free the semaphores.
    """

    semaphores: tuple[int, int]
    scratch: tuple[int, int]
    context: int | None = None
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, (address, nbytes) in (("semaphores", self.semaphores), ("scratch", self.scratch)):
            if nbytes < 0 or address % 16:
                raise WorkspaceError(f"{name} at {address:#x} of {nbytes} bytes: expected a multiple of 16")

    @classmethod
    def of(cls, semaphores: Tensor, scratch: Tensor) -> SemaphoreWorkspace:
        """Return a workspace over two contiguous CUDA tensors of any shape and dtype, which it keeps alive.

        Raises:
            UsageError: one is no such tensor.
            WorkspaceError: one does not begin at a multiple of 16 bytes.
        """
        parts = []
        for name, tensor in (("semaphores", semaphores), ("scratch", scratch)):
            view = view_of(tensor, name, written=True)
            if not view.is_contiguous:
                raise UsageError(f"strides {view.strides}, expected a contiguous tensor", argument=name)
            parts.append((view.pointer, prod(view.shape) * ITEM_BYTES[view.dtype]))
        return cls(parts[0], parts[1], owner=(semaphores, scratch))

    def regions(self, needed: Sequence[Region], place: Hashable = None) -> dict[str, int]:
        """The device address of each region: those that begin as zeros in the semaphores, the others in the scratch.

        Raises:
            WorkspaceError: a buffer is too small; the message names it and the bytes needed.
        """
        zeroed = [region for region in needed if region.zeroed]
        others = [region for region in needed if not region.zeroed]
        return place_regions("semaphores", *self.semaphores, zeroed) | place_regions("scratch", *self.scratch, others)

    def claim(self, stream: Stream | None) -> tuple[Place, Place]:
        """The buffers as they are: that one stream at a time uses them is the caller's affair."""
        return self.semaphores, self.scratch

    def places(self) -> tuple[tuple[Place, Place], ...]:
        """All its buffers."""
        return ((self.semaphores, self.scratch),)


AnyWorkspace = Workspace | SemaphoreWorkspace


def check_workspace(workspace: object) -> None:
    """Raise ``UsageError`` for anything else, such as a tensor."""
    if not isinstance(workspace, (Workspace, SemaphoreWorkspace)):
        raise UsageError(
            f"got {type(workspace).__name__}, expected a Workspace or a SemaphoreWorkspace", argument="workspace"
        )
