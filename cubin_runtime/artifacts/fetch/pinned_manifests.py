"""Pinned manifests: found in a source, compared with the pin's digest, parsed once per process."""

from __future__ import annotations

import threading

from ...errors import CorruptError, MissingError, PinError, SourceError, StoreError
from ..manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from ..pins.pin import Pin, read_manifest
from ..sources.source import FileRequest
from ..sources.source_list import SourceList, remedy, with_hint
from ..store.store import Store
from .loader import ArtifactLoader, listed_digest


class PinnedManifests:
    """Safe to share between threads."""

    def __init__(self, store: Store, source_list: SourceList, loader: ArtifactLoader) -> None:
        self._store, self._sources, self._loader = store, source_list, loader
        self._manifests: dict[str, Manifest] = {}
        self._bytes: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def bytes_of(self, pin: Pin) -> bytes:
        """The bytes of a manifest that ``of`` returned."""
        return self._bytes[pin.manifest_sha256]

    def of(self, pin: Pin, *, network: bool) -> Manifest:
        """Return the manifest from the store or a local source or, with ``network``, from any source.

        Raises:
            PinError: what is there is not the pinned manifest.
            MissingError: it is not available locally (``network`` false).
            SourceError: no source has it, or a local one cannot be read (``network`` false).
            StoreError: no source has it, and the store cannot be read.
        """
        cached = self._manifests.get(pin.manifest_sha256)
        if cached is not None:
            return cached
        request = manifest_request(pin)
        content, reasons = self._loader.at_hand(pin, request)
        unreadable = next((reason for reason in reasons if isinstance(reason, StoreError)), None)
        if content is not None:
            data, origin = content.data, content.origin
        elif network:
            try:
                data, origin = self._from_network(pin, request)
            except SourceError as error:
                raise error if unreadable is None else StoreError(f"{unreadable}; {error}") from None
        else:
            mismatch = next((reason for reason in reasons if isinstance(reason, CorruptError)), None)
            if mismatch is not None:
                raise PinError(f"the manifest of {pin.name!r} is not the pinned one: {mismatch}")
            if unreadable is not None:
                raise unreadable
            how = remedy(pin, pin.name, self._sources.specs(pin))
            if (failed := next((reason for reason in reasons if isinstance(reason, SourceError)), None)) is not None:
                raise SourceError(f"the manifest of {pin.name!r} is not available locally: {failed}; {how}")
            raise MissingError(f"the manifest of {pin.name!r} is not available locally; {how}")
        return self.keep(pin, data, origin)

    def keep(self, pin: Pin, data: bytes, origin: str) -> Manifest:
        """Return the manifest in some bytes, from now on that of ``of``; errors as ``read_manifest``."""
        manifest = read_manifest(pin, data, origin)
        with self._lock:
            self._bytes[pin.manifest_sha256] = data
            return self._manifests.setdefault(pin.manifest_sha256, manifest)

    def _from_network(self, pin: Pin, request: FileRequest) -> tuple[bytes, str]:
        """Through the store if it is writable, so that processes that start together download it once."""
        try:
            if not self._sources.has_network(pin) or not self._can_write():
                return self._sources.read(self._sources.specs(pin), request)
            outcome = self._loader.into_store(pin, [request], 1, None)[0]
            if outcome.error is not None:
                raise outcome.error
            return self._store.read(listed_digest(request), request.limit), outcome.source or str(self._store.root)
        except CorruptError as error:
            raise PinError(f"the manifest of {pin.name!r} is not the pinned one: {error}") from None
        except SourceError as error:
            raise SourceError(with_hint(error, pin)) from None

    def _can_write(self) -> bool:
        try:
            self._store.check_writable()
        except StoreError:
            return False
        return True


def manifest_request(pin: Pin, *, any_digest: bool = False) -> FileRequest:
    """The manifest as a file to fetch; ``any_digest``: with any digest, for a caller that compares it."""
    digest = None if any_digest else pin.manifest_sha256
    return FileRequest(pin.path.child(MANIFEST_NAME), pin.path, digest, MAX_MANIFEST_BYTES)
