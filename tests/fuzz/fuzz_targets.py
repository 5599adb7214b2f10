"""What is fuzzed: each target takes any bytes, and gives a word for what came of them.

A target lets through only the errors that its parser promises; what parses is held to what the rest of the
package relies on. The word is the refusal with its particulars taken out, so that a new word is a new way.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from math import prod
from pathlib import Path

from cubin_runtime.artifacts.cubins.cubin import parse_cubin
from cubin_runtime.artifacts.manifest import MANIFEST_NAME, parse_manifest
from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.sources.archive import ArchiveSource
from cubin_runtime.artifacts.sources.source import FileRequest, NotHereError
from cubin_runtime.artifacts.tables.metadata import MetadataError, parse_header
from cubin_runtime.artifacts.tables.metadata_index import MetadataIndex, build_index
from cubin_runtime.cli.output import escape
from cubin_runtime.debug.recorded.call_file import parse_call
from cubin_runtime.debug.recorded.references import NoReferenceError, reference_of
from cubin_runtime.dtypes import ITEM_BYTES
from cubin_runtime.errors import CorruptError, SourceError
from tests.fuzz.cli_targets import CLI_TARGETS

FOLDER = ArtifactPath("made/fmha")
LIMIT = 1 << 16
_MOST_READ = 16
_PARTICULARS = re.compile(r"(?<=got ).*|'[^']*'|\"[^\"]*\"|\bm[A-Z]\w+|[0-9a-f]{8,}|\d+", re.DOTALL)


def fuzz_manifest(data: bytes) -> str:
    """``checksums.txt``: what parses has names that stay below the folder, and reads back the same."""
    try:
        manifest = parse_manifest(data, FOLDER, "checksums.txt")
    except CorruptError as error:
        return word_of(error)
    for path, digest in manifest.digests.items():
        assert path.is_below(FOLDER)
        assert not {"", ".", ".."} & set(path.parts)
        assert re.fullmatch("[0-9a-f]{64}", digest)
        assert escape(path).isprintable()
    lines = "".join(f"{digest}  {path.relative_to(FOLDER)}\n" for path, digest in manifest.digests.items())
    assert parse_manifest(lines.encode(), FOLDER, "again").digests == manifest.digests
    return "parsed"


def fuzz_header(data: bytes) -> str:
    """The metadata header: what parses makes an index that finds every row again."""
    try:
        table = parse_header(data)
    except MetadataError as error:
        return word_of(error)
    index = MetadataIndex(build_index(table))
    for row in table.rows:
        assert index.find(row.symbol) == row
        try:
            str(row.architecture)
        except MetadataError:
            return "parsed, architecture refused"
    return f"parsed, {'some' if table.rows else 'no'} rows"


def fuzz_elf(data: bytes) -> str:
    """A cubin: what parses states facts within bounds."""
    try:
        cubin = parse_cubin(data)
    except CorruptError as error:
        return word_of(error)
    for symbol, kernel in cubin.kernels.items():
        assert symbol == kernel.symbol
        assert kernel.static_shared_bytes >= 0
        assert all(one.size > 0 and one.offset >= 0 for one in kernel.parameters)
    return f"parsed, {min(len(cubin.kernels), 3)} kernels, {cubin.architecture.suffix or 'no suffix'}"


def fuzz_zip(data: bytes) -> str:
    """A zip as a source: no member is longer than the limit, none is found under a name that climbs."""
    descriptor = os.memfd_create("archive")
    try:
        os.write(descriptor, data)
        return _read_archive(ArchiveSource(Path(f"/proc/self/fd/{descriptor}")))
    finally:
        os.close(descriptor)


def _read_archive(source: ArchiveSource) -> str:
    words = []
    try:
        for name in [MANIFEST_NAME, *sorted(source.names(FOLDER))[:_MOST_READ]]:
            try:
                path = FOLDER.child(name)
            except ValueError:
                words.append("odd name")
                continue
            source.where(path, FOLDER)
            try:
                assert len(source.read(FileRequest(path, FOLDER, None, LIMIT))) <= LIMIT
                words.append("read")
            except (NotHereError, SourceError) as error:
                words.append(word_of(error))
    except (NotHereError, SourceError) as error:
        words.append(word_of(error))
    finally:
        source.close()
    return ", ".join(sorted(set(words)))


def _redigested(data: bytes) -> bytes:
    """A recorded call with the digest of its elements as they are, so that changed ones are looked at too."""
    body = data[8 + int.from_bytes(data[:8], "little") :]
    return re.sub(rb'(?<="sha256": ")[0-9a-f]{64}', hashlib.sha256(body).hexdigest().encode(), data, count=1)


def word_of(error: Exception) -> str:
    """The refusal without its particulars."""
    return f"{type(error).__name__}: {_PARTICULARS.sub('#', str(error))}"[:120]


def fuzz_call(data: bytes) -> str:
    """A recorded call: what parses has tensors of the sizes it says, and a reference or a refusal."""
    try:
        parse_call(data, "call")
    except CorruptError as error:
        if "another sha256" not in str(error):
            return word_of(error)
    try:
        call = parse_call(_redigested(data), "call")
    except CorruptError as error:
        return word_of(error)
    for tensor in call.tensors.values():
        shape = (len(call.page_ids), *tensor.view.shape[1:]) if tensor.paged else tensor.view.shape
        assert len(tensor.data) in (0, prod(shape) * ITEM_BYTES[tensor.view.dtype])
        assert tensor.data or tensor.output or not prod(shape)
    if prod(call.tensors["q"].view.shape if "q" in call.tensors else (1,)) > LIMIT:
        return "parsed, large"
    try:
        return f"parsed, {reference_of(call).out.ndim} dimensions"
    except NoReferenceError:
        return "parsed, no reference"
    except CorruptError as error:
        return f"parsed, {word_of(error)[:40]}"


TARGETS: dict[str, Callable[[bytes], str]] = {
    "manifest": fuzz_manifest,
    "header": fuzz_header,
    "elf": fuzz_elf,
    "zip": fuzz_zip,
    "call": fuzz_call,
    **CLI_TARGETS,
}
