"""Fetch, load and verify artifacts by name or path: what ``cubin_runtime`` exports from this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import UsageError
from .fetch.loader import Artifact
from .fetch.report import FetchReport
from .library import DEFAULT_JOBS, Library
from .releases.targets import chosen, resolved
from .tables.kernel_filter import KernelFilter

if TYPE_CHECKING:
    from pathlib import Path

    from .path import ArtifactPath
    from .pins.pin import Pin
    from .verification import VerifyReport

__all__ = ["Artifact", "FetchReport", "fetch", "load", "open_library", "verify"]


def open_library(config: Config | None = None) -> Library:
    """Open the pins, the store and the sources of a configuration.

    ``fetch``, ``load`` and ``verify`` open one for each call unless they get one as ``library``, which saves reading
    pins and manifests again.

    Args:
        config: the configuration; None reads the environment (``Config.from_environment``).

    Raises:
        PinError: a pin file cannot be read, or two pins disagree.
        UsageError: a setting or a source is invalid.
    """
    return Library(Config.from_environment() if config is None else config)


def fetch(
    target: str,
    *,
    sm: int | str | None = None,
    family: str | Sequence[str] | None = None,
    dtype: str | Sequence[str] | None = None,
    head_dim: int | Sequence[int] | None = None,
    match: str | Sequence[str] | None = None,
    jobs: int = DEFAULT_JOBS,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    library: Library | None = None,
) -> FetchReport:
    """Fetch files of a pinned release into the store, each verified against the release's manifest.

    What the store has already is left alone.

    Args:
        target: a pin's name (``"trtllm-gen-0.6.13"``), a folder in a release, or the path of one file.
        sm: only kernels that run on this device, for example 100 or ``"sm_90"``.
        family: only this family (``"fmha"``) or use (``"decode"``, ``"prefill"``); one or several.
        dtype: only kernels with this type of Q, K, V or output, for example ``"bf16"``, or for any type (appending,
            draft masks); one or several.
        head_dim: only kernels with this head dimension (in a latent cache that of its rows or values), or for any
            (appending, merging, draft masks); one or several.
        match: only files or symbols that match this glob, case-sensitive; one or several.
        jobs: how many files are fetched at a time.
        dry_run: compare with the store and fetch nothing but the manifest and the metadata.
        progress: called with the number of files that are done and the number of files, now and then also without
            news; from the calling thread.
        library: what ``open_library`` returned; None opens one from the environment.

    Returns:
        What was there, what was fetched, how many bytes, and from which sources.

    Raises:
        PinError: the target is not pinned, or the sources have another manifest than the pinned one.
        UsageError: a filter matches no kernel, or the target is the name of several files or of a group.
        SourceError, CorruptError: some files could not be fetched; the others are in the store.
        StoreError: the store is full or cannot be written.
    """
    library = library or open_library()
    pin, name = _pin_of(library, target)
    paths = chosen(library, pin, name, _filter(sm, family, dtype, head_dim, match))
    report = _counter(progress, lambda: len(paths))
    return library.fetch(pin, paths, jobs=jobs, dry_run=dry_run, progress=report)


def load(path: str | ArtifactPath, *, fetch: bool | None = None, library: Library | None = None) -> Artifact:
    """Return the verified bytes of one file, hashed again at every call.

    Args:
        path: its artifact path (``"RELEASE/FAMILY/.../FILE"``), or the name of a kernel or file in a release whose
            manifest is available locally.
        fetch: whether a file that is neither in the store nor in a local source is fetched over the network and kept
            in the store; None: as the configuration says (``lazy_fetch``, ``offline``).
        library: what ``open_library`` returned; None opens one from the environment.

    Returns:
        The artifact: ``data``, ``sha256``, ``origin``, and ``cubin`` with the facts of a cubin's kernels.

    Raises:
        PinError: no pin covers the path, or its release's manifest does not list it.
        UsageError: the path is a release or a folder, or the name of several files.
        MissingError: the file is not available locally, and ``fetch`` is off.
        SourceError: no source delivered it.
        CorruptError: its bytes do not have the digest that the manifest lists.
        StoreError: the store cannot be read or written.
    """
    library = library or open_library()
    pin, name = _pin_of(library, str(path))
    may_fetch = library.config.lazy_fetch and not library.config.offline if fetch is None else fetch
    if name in (pin.name, pin.path.text) or library.has_folder(pin, name, network=may_fetch):
        raise UsageError(f"load {str(path)!r}: is a release or a folder, expected the path of one file")
    return library.load(name, fetch=may_fetch)


def verify(
    target: str,
    *,
    sm: int | str | None = None,
    family: str | Sequence[str] | None = None,
    dtype: str | Sequence[str] | None = None,
    head_dim: int | Sequence[int] | None = None,
    match: str | Sequence[str] | None = None,
    complete: bool = False,
    tree: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    library: Library | None = None,
) -> VerifyReport:
    """Hash files of a release, in the store or in a published tree, and compare them with the pinned manifest.

    Args:
        target, sm, family, dtype, head_dim, match: as in ``fetch``.
        complete: whether files that were never fetched are an error.
        tree: a directory, a ``.zip`` or ``.whl``, or ``"package"``, to check instead of the store; a file in it that
            no pinned release lists is an error, unless only a part of a release is verified.
        progress: called with the number of files that are done and the number of files, from any thread.
        library: what ``open_library`` returned; None opens one from the environment.

    Returns:
        How many files and bytes are right, and which files are missing.

    Raises:
        CorruptError: files do not have their digest; the message names them.
        MissingError: files are missing (``complete``), or the tree has no manifest.
        ExtraError: the tree has files that no pinned release lists.
        PinError: the target is not pinned, or the manifest is not the pinned one.
        UsageError: a filter matches no kernel, or the target is the name of several files or of a group.
        StoreError: the store cannot be read.
    """
    library = library or open_library()
    pin, name = _pin_of(library, target)
    kernel_filter = _filter(sm, family, dtype, head_dim, match)
    whole = kernel_filter.is_empty and name in (pin.name, pin.path.text)
    paths = None if whole else chosen(library, pin, name, kernel_filter)

    def total() -> int:  # known once the manifest is, with which a verification begins
        return len(library.manifest(pin, network=False).digests if paths is None else paths)

    place = None if tree is None else str(tree)
    report = library.verify(pin, paths, complete=complete, tree=place, progress=_counter(progress, total))
    report.raise_problems()
    return report


def _pin_of(library: Library, target: str) -> tuple[Pin, str]:
    """The pin that covers a target, and the target's name or path."""
    if group := library.pins.group(target):
        raise UsageError(
            f"{target!r}: is a group of {len(group)} releases, expected one: {', '.join(pin.name for pin in group[:4])}"
            + (", ..." if len(group) > 4 else "")
        )
    name = resolved(library, target).rstrip("/")
    return library.pins.get(name), name


def _filter(
    sm: int | str | None,
    family: str | Sequence[str] | None,
    dtype: str | Sequence[str] | None,
    head_dim: int | Sequence[int] | None,
    match: str | Sequence[str] | None,
) -> KernelFilter:
    heads = [head_dim] if isinstance(head_dim, int) else head_dim
    return KernelFilter.from_words(
        None if sm is None else str(sm),
        _words(family),
        _words(dtype),
        None if heads is None else list(heads),
        _words(match),
    )


def _words(words: str | Sequence[str] | None) -> list[str] | None:
    return None if words is None else [words] if isinstance(words, str) else list(words)


def _counter(progress: Callable[[int, int], None] | None, total: Callable[[], int]) -> Callable[[int], None] | None:
    """Return the function that counts steps and reports their sum."""
    if progress is None:
        return None
    done = 0

    def advance(step: int) -> None:
        nonlocal done
        done += step
        progress(done, total())

    return advance
