"""The configured sources, opened: local ones once for all threads, network ones for each worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import Config
from ...errors import SourceError
from ...values import dataclass
from ..pins.pin import Pin
from .failover import FetchPolicy, Progress, read_with_failover
from .http_pace import HttpLimits
from .source import FileRequest, Source, SourceSpec, parse_source

if TYPE_CHECKING:
    from .archive import ArchiveSource
    from .directory import DirectorySource
    from .package import PackageSource

    LocalSource = DirectorySource | ArchiveSource | PackageSource

_log = logging.getLogger("cubin_runtime")
_NOT_PUBLISHED = frozenset({"trtllm-gen-0.6.18.post1"})  # flashinfer-cubin ended before it


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """The values that a worker process needs to open the same sources and store; picklable."""

    config: Config
    limits: HttpLimits
    policy: FetchPolicy
    specs: tuple[SourceSpec, ...]
    threads: int
    log_level: int


class _OfflineSource:
    """A placeholder for a network source while the network is off."""

    local = False

    def __init__(self, label: str) -> None:
        self.label = label

    def read(self, request: FileRequest) -> bytes:
        """Always raise ``SourceError``."""
        raise SourceError(f"{self.label}: skipped, the network is disabled (offline)")

    def forget(self) -> None:
        """Do nothing: this source keeps nothing."""

    def close(self) -> None:
        """Do nothing: this source holds nothing open."""


class SourceList:
    """The sources of one configuration.

    Raises:
        UsageError: on construction, if a configured source is no source.
    """

    def __init__(self, config: Config, limits: HttpLimits, policy: FetchPolicy) -> None:
        self._configured = None if config.sources is None else tuple(map(parse_source, config.sources))
        self._config = config
        self._offline = config.offline
        self._limits = limits
        self._policy = policy
        self._locals: dict[SourceSpec, LocalSource] = {}
        self._lock = threading.RLock()

    def specs(self, pin: Pin | None) -> tuple[SourceSpec, ...]:
        """The configured sources, otherwise ``package`` and the pin's own, in order."""
        if self._configured is not None:
            return self._configured
        sources = () if pin is None else pin.sources
        return (SourceSpec("package", "package"), *map(parse_source, sources))

    def has_network(self, pin: Pin) -> bool:
        """Return whether a source may be asked over the network."""
        return not self._offline and any(spec.kind == "http" for spec in self.specs(pin))

    def local_sources(self, pin: Pin) -> list[LocalSource]:
        """The sources that need no network."""
        return [self.local(spec) for spec in self.specs(pin) if spec.kind != "http"]

    def local(self, spec: SourceSpec) -> LocalSource:
        """Local sources are opened once and shared by all threads."""
        with self._lock:
            if spec not in self._locals:
                self._locals[spec] = _opened(spec)
            return self._locals[spec]

    def open(self, specs: Sequence[SourceSpec], progress: Progress) -> list[Source]:
        """The sources of one worker: shared local ones, and its own network ones."""
        sources: list[Source] = []
        for spec in specs:
            if spec.kind != "http":
                sources.append(self.local(spec))
            elif self._offline:
                sources.append(_OfflineSource(spec.label))
            else:
                from .http import HttpSource

                sources.append(
                    HttpSource(spec, self._limits, self._config.network, stop=progress.stop, tick=progress.tick)
                )
        return sources

    def order(self, specs: Sequence[SourceSpec], threads: int = 1) -> WorkOrder:
        """The values that a worker process needs to open the same."""
        return WorkOrder(self._config, self._limits, self._policy, tuple(specs), threads, _log.getEffectiveLevel())

    def read(self, specs: Sequence[SourceSpec], request: FileRequest) -> tuple[bytes, str]:
        """The verified bytes of one object and where they came from, into no store; see ``read_with_failover``."""
        progress = Progress(self._policy)
        sources = self.open(specs, progress)
        try:
            return read_with_failover(request, sources, self._policy, progress)
        finally:
            for source in sources:
                if not source.local:
                    source.close()


def _opened(spec: SourceSpec) -> LocalSource:
    """A local source; what only some kinds need is imported for those."""
    if spec.kind == "archive":
        from .archive import ArchiveSource

        return ArchiveSource(Path(spec.text))
    if spec.kind == "package":
        from .package import PackageSource

        return PackageSource()
    from .directory import DirectorySource

    return DirectorySource(Path(spec.text))


def hint(pin: Pin) -> str:
    """Say how to install a package that contains the release, for a message; empty if there is none."""
    family, _, version = pin.name.rpartition("-")
    if family == "trtllm-gen" and pin.name not in _NOT_PUBLISHED:
        return f"'pip install flashinfer-cubin=={version}' installs it"
    if family == "hopper":
        return f"'pip install cubin-runtime-kernels=={version}' installs it, and so does 'make install' in a clone"
    return ""


def with_hint(message: object, pin: Pin) -> str:
    """An error's message, and in a line of its own how to install a package that contains the release."""
    return f"{message}\n  {text}" if (text := hint(pin)) else str(message)


def remedy(pin: Pin, what: str, specs: Sequence[SourceSpec]) -> str:
    """The command that makes ``what`` of the release available, for commands that read local sources only."""
    if any(spec.kind == "http" for spec in specs):
        return "; ".join(filter(None, (f"'cubin-runtime fetch {what}' gets it", hint(pin))))
    place = f"'cubin-runtime fetch {what} --source PLACE' gets it from a folder, wheel or URL that has it"
    return "; ".join(filter(None, (hint(pin), place)))
