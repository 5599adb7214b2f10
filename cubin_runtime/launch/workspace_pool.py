"""The workspaces of a plan, one for each stream."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from ..errors import UsageError
from .driver import Driver
from .streams import PER_THREAD, is_default
from .workspace import Workspace


class WorkspacePool:
    """The workspaces of a plan on one device: one for each stream, made outside of captures, kept until ``close``.

    ``held`` has them by their stream's handle, those of default streams by context and thread (0: the legacy one).
    """

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self._driver = driver
        self._device = device
        self._nbytes = nbytes
        self._lock = threading.RLock()
        self.held: dict[Hashable, Workspace] = {}

    def take(self, stream: int) -> Workspace:
        """The workspace for a stream's handle, in the stream's context; the caller claims it.

        Raises:
            WorkspaceError: it is not there and the stream is capturing, or the stream is of another device.
        """
        if not is_default(stream):
            return self.held.get(stream) or self._make(stream, stream)
        context = self._driver.context_on(self._device)
        key = (context, threading.get_ident() if stream == PER_THREAD else 0)
        return self.held.get(key) or self._make(key, stream)

    def make(self, stream: int) -> Workspace:
        """A workspace that is not of the pool; errors as ``take``."""
        context = self._driver.context_of(stream, self._device)
        return Workspace.allocate(self._driver, context, self._nbytes, stream)

    def _make(self, key: Hashable, stream: int) -> Workspace:
        with self._lock:
            if key not in self.held:
                self.held[key] = self.make(stream)
            return self.held[key]

    def close(self) -> None:
        """Free all of them; no work may still use one."""
        with self._lock:
            held, self.held = self.held, {}
        for workspace in held.values():
            workspace.close()


def context_of_launch(driver: Driver, device: int, workspace: int | None, stream: int) -> int:
    """The context to launch in on a stream of a device, with a workspace of a context; None: of any.

    Raises:
        UsageError: workspace and stream are of two contexts.
    """
    context = driver.context_of(stream, device)
    if workspace is None or workspace == context:
        return context
    if is_default(stream):
        return workspace
    raise UsageError(f"stream {stream:#x}: belongs to another context of device {device} than the workspace")
