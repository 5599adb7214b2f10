"""A recorded call as a file: tensors as safetensors has them, and the call as JSON among their metadata.

Eight bytes of length, a JSON header, the tensors' elements one after another. A tensor is stored contiguous, in the
order of its shape; its strides and its address are in the call. Nothing in a file is executed or trusted: what is not
as the format says is a ``CorruptError``.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...dtypes import DTYPES, ITEM_BYTES
from ...errors import CorruptError, MissingError, StoreError
from ...tensor import TensorView
from .call import Option, RecordedCall, RecordedTensor
from .snapshot import span_of

if TYPE_CHECKING:
    from ...protocols import DTypeName

SCHEMA = 1
MAX_FILE_BYTES = 64 << 30
_FORMAT = "cubin_runtime.call"
_PAGES = "page_ids"  # the tensor of the pages that are stored
_MAX_HEADER_BYTES = 16 << 20
_MAX_RANK = 8
_MAX_NUMBER = 1 << 62
_MAX_MESSAGE = 500
_DTYPES = {dtype.stored: dtype.name for dtype in DTYPES.values()}


def write_call(call: RecordedCall, file: Path) -> None:
    """Write a call to a new file, whole or not at all.

    Raises:
        StoreError: the file cannot be written.
    """
    pieces, header = _parts(call)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        try:
            with temporary.open("xb") as opened:
                opened.write(header)
                for piece in pieces:
                    opened.write(piece)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"the recorded call {file} cannot be written: {error}") from error


def read_call(file: Path | str, *, max_bytes: int = MAX_FILE_BYTES) -> RecordedCall:
    """Read a recorded call into private memory.

    Raises:
        MissingError: there is no such file.
        StoreError: it is not a regular file, or cannot be read.
        CorruptError: it is larger than ``max_bytes``, or not what ``write_call`` writes.
    """
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"{file} is not a regular file, expected a recorded call")
            if status.st_size > max_bytes:
                raise CorruptError(f"{file} is {status.st_size} bytes, at most {max_bytes} are read")
            data = opened.read(status.st_size)
    except FileNotFoundError:
        raise MissingError(f"{file} does not exist, expected a recorded call") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}") from error
    return parse_call(data, str(file))


def parse_call(data: bytes, where: str) -> RecordedCall:
    """The call in the bytes of a file, called ``where`` in errors; raises ``CorruptError``."""
    try:
        return _parse(data)
    except CorruptError as error:
        raise CorruptError(f"{where}: {str(error)[:_MAX_MESSAGE]}") from None
    except RecursionError:
        raise CorruptError(f"{where}: the header is nested too deeply") from None


def _parts(call: RecordedCall) -> tuple[list[bytes], bytes]:
    """The elements in the order of the file, and what stands in front of them."""
    stored: dict[str, tuple[str, list[int], bytes]] = {}
    for name, tensor in call.tensors.items():
        shape = list(tensor.view.shape)
        if tensor.paged:
            shape[0] = len(call.page_ids)
        if tensor.data or not tensor.output:
            stored[name] = (tensor.view.dtype, shape, tensor.data)
    if call.page_ids:
        ids = b"".join(page.to_bytes(8, "little") for page in call.page_ids)
        stored[_PAGES] = ("int64", [len(call.page_ids)], ids)
    forms = {
        name: {
            "dtype": tensor.view.dtype,
            "shape": list(tensor.view.shape),
            "strides": list(tensor.view.strides),
            "address": tensor.view.pointer,
            "paged": tensor.paged,
            "output": tensor.output,
        }
        for name, tensor in call.tensors.items()
    }
    described = {
        "schema": SCHEMA,
        "operator": call.operator,
        "tensors": forms,
        "options": dict(call.options),
        "kernels": [dict(kernel) for kernel in call.kernels],
        "origin": dict(call.origin),
        "error": call.error,
    }
    pieces = [piece for _, _, piece in stored.values()]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    metadata = {"format": _FORMAT, "call": json.dumps(described), "sha256": digest.hexdigest()}
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, (dtype, shape, piece) in stored.items():
        header[name] = {"dtype": DTYPES[dtype].stored, "shape": shape, "data_offsets": [begin, begin + len(piece)]}
        begin += len(piece)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return pieces, len(text).to_bytes(8, "little") + text


def _parse(data: bytes) -> RecordedCall:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise CorruptError(f"a header of {size} bytes in a file of {len(data)}, expected a recorded call")
    header = _json(data[8 : 8 + size], "header")
    body = memoryview(data)[8 + size :]
    metadata = _mapping(header.pop("__metadata__", None), "__metadata__")
    if metadata.get("format") != _FORMAT:
        raise CorruptError(f"format {metadata.get('format')!r}, expected {_FORMAT!r}")
    if hashlib.sha256(body).hexdigest() != metadata.get("sha256"):
        raise CorruptError("the sha256 of the elements differs from the one in the header")
    text = metadata.get("call")
    call = _json(text.encode("utf-8", "replace"), "call") if isinstance(text, str) else {}
    if call.get("schema") != SCHEMA:
        raise CorruptError(f"schema {call.get('schema')!r}, expected {SCHEMA}")
    stored = dict(_stored(header, body))
    pages = _page_ids(stored.pop(_PAGES, None))
    forms = _mapping(call.get("tensors"), "tensors")
    tensors = {name: _tensor(name, _mapping(form, name), stored, len(pages)) for name, form in forms.items()}
    if stored.keys() - forms.keys():
        raise CorruptError(f"tensors {sorted(stored.keys() - forms.keys())}, which the call does not have")
    kernels = call.get("kernels")
    if not isinstance(kernels, list):
        raise CorruptError("kernels: expected a list")
    return RecordedCall(
        operator=_text(call.get("operator"), "operator"),
        tensors=tensors,
        options={name: _option(name, value) for name, value in _mapping(call.get("options"), "options").items()},
        page_ids=pages,
        kernels=tuple(_texts(kernel, "kernels") for kernel in kernels),
        origin=_texts(call.get("origin"), "origin"),
        error=_text(call.get("error"), "error"),
    )


def _stored(header: Mapping[str, Any], body: memoryview) -> Iterator[tuple[str, tuple[str, list[int], bytes]]]:
    """Each stored tensor's dtype, shape and elements; they lie one behind the other and fill the file."""
    end = 0
    for name, described in header.items():
        entry = _mapping(described, name)
        dtype, shape = _DTYPES.get(str(entry.get("dtype"))), _numbers(entry.get("shape"), name)
        offsets = _numbers(entry.get("data_offsets"), name)
        if dtype is None or len(offsets) != 2:
            raise CorruptError(f"{name}: dtype {entry.get('dtype')!r} at {offsets}, expected one that is known")
        begin, last = offsets
        if begin != end or last - begin != prod(shape) * ITEM_BYTES[dtype] or last > len(body):
            raise CorruptError(f"{name}: {dtype} {shape} at {offsets}, expected it at {end} and inside the file")
        end = last
        yield name, (dtype, shape, bytes(body[begin:last]))
    if end != len(body):
        raise CorruptError(f"{len(body) - end} bytes after the last tensor")


def _tensor(
    name: str, form: Mapping[str, Any], stored: Mapping[str, tuple[str, list[int], bytes]], pages: int
) -> RecordedTensor:
    shape, strides = _numbers(form.get("shape"), name), _numbers(form.get("strides"), name)
    (address,) = _numbers([form.get("address")], name)
    paged, output, word = form.get("paged"), form.get("output"), form.get("dtype")
    if len(shape) != len(strides) or type(paged) is not bool or type(output) is not bool or str(word) not in DTYPES:
        raise CorruptError(f"{name}: {form!r}, expected a tensor's dtype, shape and strides")
    expected = [pages, *shape[1:]] if paged and shape else shape
    dtype, stored_shape, data = stored.get(name, (word, expected, b""))
    if (dtype, stored_shape) != (word, expected) or (name not in stored and not output):
        raise CorruptError(f"{name}: {dtype} {stored_shape} is stored, expected {word} {expected}")
    view = TensorView(address, cast("DTypeName", word), tuple(shape), tuple(strides))
    if span_of(view) > _MAX_NUMBER:
        raise CorruptError(f"{name}: {shape} in strides {strides}, more than any memory has")
    return RecordedTensor(view, data, paged=paged, output=output)


def _page_ids(stored: tuple[str, list[int], bytes] | None) -> tuple[int, ...]:
    if stored is None:
        return ()
    dtype, shape, data = stored
    ids = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    if dtype != "int64" or len(shape) != 1 or ids != sorted(set(ids)) or ids[-1:] > [_MAX_NUMBER]:
        raise CorruptError(f"{_PAGES}: expected int64 numbers in increasing order")
    return tuple(ids)


def _json(text: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(text, parse_constant=_no_number, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise CorruptError(f"{what}: invalid JSON ({type(error).__name__})") from None
    return dict(_mapping(document, what))


def _no_number(word: str) -> float:
    raise ValueError(word)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name twice")
    return members


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CorruptError(f"{what}: {type(value).__name__}, expected an object")
    return value


def _numbers(value: Any, what: str) -> list[int]:
    """A list of integers from 0 to what an address or a size can be."""
    whole = isinstance(value, list) and len(value) <= _MAX_RANK and all(type(number) is int for number in value)
    if not whole or not all(0 <= number <= _MAX_NUMBER for number in value):
        raise CorruptError(f"{what}: {str(value)[:80]}, expected sizes")
    return list(value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise CorruptError(f"{what}: {type(value).__name__}, expected text")
    return value


def _texts(value: Any, what: str) -> dict[str, str]:
    return {name: _text(text, what) for name, text in _mapping(value, what).items()}


def _option(name: str, value: Any) -> Option:
    fits = value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < _MAX_NUMBER)
    if fits or (isinstance(value, float) and isfinite(value)):
        return value  # type: ignore[no-any-return]
    raise CorruptError(f"{name}: {str(value)[:80]!r}, expected a number, text, true, false or null")
