"""Pins from FlashInfer's own list of artifacts: ``flashinfer/artifacts.py`` is read as text, never imported or run."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from ...errors import CorruptError, CubinRuntimeError, PinError, StoreError
from ...values import dataclass
from ..bounded_read import open_regular, read_bounded
from ..path import ArtifactPath
from ..zip_reader import read_directory, read_member
from .pin import Pin, format_pin, parse_pins
from .pin_file import DEFAULT_MAX_FILE_BYTES

INSTALLED = "installed"
REPOSITORY = "https://edge.urm.nvidia.com/artifactory/sw-kernelinferencelibrary-public-generic-local"
LICENCE = "Apache-2.0"
MAX_TEXT_BYTES = 1 << 20
_DISTRIBUTION = "flashinfer-python"
_FILE = "flashinfer/artifacts.py"
_VERSION = re.compile(r"[0-9A-Za-z.!+]+")
_WHEEL = re.compile(rf"flashinfer_python-({_VERSION.pattern})-")
_WORDS = {
    "TRTLLM_GEN_FMHA": "fmha",
    "TRTLLM_GEN_BMM": "batched-gemm",
    "TRTLLM_GEN_GEMM": "gemm",
    "DEEPGEMM": "deep-gemm",
    "DSL_FMHA": "cute-dsl",
}


@dataclass(frozen=True, slots=True)
class FlashInferPins:
    """The releases that a version of FlashInfer names: for ``unpinnable`` folders it has no manifest digest."""

    group: str
    pins: tuple[Pin, ...]
    unpinnable: tuple[str, ...]


def flashinfer_pins(place: str) -> FlashInferPins:
    """Pins for every artifact family that FlashInfer has a manifest digest for.

    ``place`` is a wheel of flashinfer-python, or ``installed``.

    Raises:
        PinError: there is no such package or wheel, or its list of artifacts does not read.
    """
    version, text = _installed() if place == INSTALLED else _from_wheel(Path(place))
    return parse_artifacts(text, version, place)


def parse_artifacts(text: bytes, version: str, origin: str) -> FlashInferPins:
    """The pins of FlashInfer's ``artifacts.py``.

    Raises:
        PinError: it is no Python, or names no artifact with a digest in the form that is known.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in text that is not ours
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise PinError(f"{origin}: {_FILE} cannot be parsed as Python") from None
    paths, digests = (_constants(tree, name) for name in ("ArtifactPath", "CheckSumHash"))
    group = f"flashinfer-{version}"
    pins: list[Pin] = []
    unpinnable: list[str] = []
    for name, folder in paths.items():
        if not isinstance(folder, str):
            continue
        word = _WORDS.get(name, name.lower().replace("_", "-"))
        releases = list(_releases(folder, digests.get(name), digests.get(f"{name}_CHECKSUMS")))
        if not releases:
            unpinnable.append(folder.rstrip("/"))
        for suffix, path, digest in releases:
            pins.append(_pin(f"{group}-{word}{suffix}", path, digest, group, origin))
    if not pins:
        raise PinError(f"{origin}: {_FILE} does not list artifacts in a known way")
    return FlashInferPins(group, tuple(pins), tuple(unpinnable))


def _releases(folder: str, digest: object, by_target: object) -> Iterator[tuple[str, str, str]]:
    """End of the name, path and digest of each release of a family: one, or one for each CPU and SM."""
    if isinstance(digest, str):
        yield "", folder, digest
    if isinstance(by_target, dict):
        for cpu, targets in by_target.items():
            for sm, one in targets.items() if isinstance(targets, dict) else ():
                if all(isinstance(word, str) for word in (cpu, sm, one)):
                    yield f"-{cpu}-{sm}", f"{folder.rstrip('/')}/{cpu}/{sm}", one


def _pin(name: str, path: str, digest: str, group: str, origin: str) -> Pin:
    try:
        pin = Pin(
            name=name,
            path=ArtifactPath(path.rstrip("/")),
            manifest_sha256=digest,
            files=0,
            bytes=0,
            max_file_bytes=DEFAULT_MAX_FILE_BYTES,
            index_sha256=None,
            abi=None,
            licence=LICENCE,
            sources=(REPOSITORY,),
            groups=(group,),
        )
        return parse_pins(format_pin(pin).encode(), origin)[0]
    except UnicodeEncodeError:
        raise PinError(f"{origin}: {_FILE}: {path!r} is not valid Unicode") from None
    except CubinRuntimeError as error:
        raise PinError(f"{origin}: {_FILE}: {error}") from None


def _constants(tree: ast.Module, name: str) -> dict[str, object]:
    """Return what a class of constants assigns, as far as it is literal."""
    constants: dict[str, object] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for line in node.body:
            if not isinstance(line, ast.AnnAssign | ast.Assign) or line.value is None:
                continue
            targets = [line.target] if isinstance(line, ast.AnnAssign) else line.targets
            # computed values, such as the table of all manifests, are passed over
            with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                value = ast.literal_eval(line.value)
                constants |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return constants


def _from_wheel(file: Path) -> tuple[str, bytes]:
    named = _WHEEL.match(file.name)
    if named is None:
        raise PinError(f"{file}: expected a wheel named flashinfer_python-VERSION-..., or the word {INSTALLED!r}")
    with _opened(file) as (descriptor, _):
        place = read_directory(descriptor, str(file)).places.get(_FILE)
        if place is None:
            raise PinError(f"{file}: has no {_FILE}")
        return named[1], read_member(descriptor, _FILE, place, MAX_TEXT_BYTES, f"{file}: {_FILE}", check=True)


def _installed() -> tuple[str, bytes]:
    try:
        distribution = metadata.distribution(_DISTRIBUTION)
        version, file = distribution.version, Path(str(distribution.locate_file(_FILE)))
    except metadata.PackageNotFoundError:
        raise PinError(f"{_DISTRIBUTION} is not installed; install it, or name its wheel") from None
    except Exception as error:  # the standard library's reader lets errors of many kinds through
        raise PinError(f"{_DISTRIBUTION}: its metadata cannot be read: {type(error).__name__}") from None
    if not isinstance(version, str) or _VERSION.fullmatch(version) is None:
        raise PinError(f"{_DISTRIBUTION}: its metadata states the version {version!r}")
    with _opened(file) as (descriptor, size):
        return version, read_bounded(descriptor, size, MAX_TEXT_BYTES, str(file))


@contextmanager
def _opened(file: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file; in the block, whatever cannot be read is a ``PinError``."""
    try:
        descriptor, status = open_regular(str(file), str(file), follow=True)
        try:
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PinError(f"{file}: {error.strerror}") from None
    except (CorruptError, StoreError) as error:
        raise PinError(str(error)) from None
