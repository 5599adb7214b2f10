"""Signatures of operators' pin files: Ed25519 over the exact bytes, checked before anything is parsed.

A pin file ``NAME`` is signed by ``NAME.sig`` beside it: the 64 raw bytes that ``openssl pkeyutl -sign -rawin``
writes, or lines of base64, one per signature. One signature by one of the keys is enough, so that during a
rotation old and new keys, or old and new signatures, may stand side by side. Nothing here opens a socket.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import local_path
from ...errors import CubinRuntimeError
from ...values import dataclass
from ..bounded_read import digest_of, read_regular
from .bounded_toml import MAX_PIN_FILE_BYTES
from .signed_statement import SignatureError, check_statement

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

KEYS_VARIABLE = "CUBIN_RUNTIME_PIN_KEYS"
SIGNATURE_SUFFIX = ".sig"
MAX_KEY_FILE_BYTES = 64 << 10
MAX_SIGNATURES = 16

_SIGNATURE_BYTES = 64
_FIELD = 2**255 - 19
_ORDER_8_Y = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
# the y of the eight points whose order divides 8: (0, 1), (0, -1), two with y = 0, and four of order 8
_SMALL_ORDER_Y = frozenset({0, 1, _FIELD - 1, _ORDER_8_Y, _FIELD - _ORDER_8_Y})
_RAW_KEY = re.compile(r"[0-9a-f]{64}")
_PEM_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----\s.*?-----END PUBLIC KEY-----\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PinKey:
    """A public key; ``name`` is for people: the first 16 hex digits of the SHA-256 of its 32 bytes."""

    name: str
    origin: str
    verifies: Callable[[bytes, bytes], bool]


def load_keys(texts: Sequence[str]) -> tuple[PinKey, ...]:
    """The keys that ``CUBIN_RUNTIME_PIN_KEYS`` names: 64 hex digits, or a file of PEM public keys, each.

    Raises:
        SignatureError: the package ``cryptography`` is missing, or a key cannot be read, is no Ed25519 key, or is
            one for which anybody can sign.
    """
    if not texts:
        return ()
    try:
        import cryptography.exceptions  # noqa: F401
    except ImportError:
        raise SignatureError(
            f"{KEYS_VARIABLE} is set, and checking signatures needs the package 'cryptography': "
            "pip install 'cubin-runtime[signing]'"
        ) from None
    return tuple(key for text in texts for key in _keys_of(text))


def read_pin_file(file: Path, keys: Sequence[PinKey], state: Path | None = None) -> bytes:
    """The bytes of an operator's pin file; with ``keys`` only if one of them signed exactly these bytes.

    A signed file is also checked for what it states: its name, its expiry, and the newest version that
    ``state`` remembers (None: nothing is remembered).

    Raises:
        PinError: it cannot be read.
        SignatureError: it is not signed, or by none of the keys; or it has expired, or is an older one put back.
    """
    data = read_small_file(file, MAX_PIN_FILE_BYTES, "pins")
    if keys:
        check_statement(file, data, [key.name for key in signers_of(file, data, keys)], state)
    return data


def signers_of(file: Path, data: bytes, keys: Sequence[PinKey]) -> tuple[PinKey, ...]:
    """Return those of the keys that signed ``data``, at least one, by the signatures beside ``file``.

    Raises:
        SignatureError: there is no signature, it has no known form, or none of the keys made it.
    """
    beside = file.with_name(file.name + SIGNATURE_SUFFIX)
    if not os.path.lexists(beside):
        raise SignatureError(f"{file}: is not signed ({beside.name} is missing), and {KEYS_VARIABLE} is set")
    signatures = _signatures(read_small_file(beside, MAX_KEY_FILE_BYTES, "signature"), str(beside))
    if signers := tuple(key for key in keys if any(key.verifies(one, data) for one in signatures)):
        return signers
    names = ", ".join(key.name for key in keys)
    raise SignatureError(f"{beside}: is not a signature of {file.name} by a configured key ({names})")


def _signatures(data: bytes, origin: str) -> list[bytes]:
    if len(data) == _SIGNATURE_BYTES:
        return [data]
    try:
        signatures = [base64.b64decode(line, validate=True) for line in data.split()]
    except (binascii.Error, ValueError):
        signatures = []
    if not 0 < len(signatures) <= MAX_SIGNATURES or any(len(one) != _SIGNATURE_BYTES for one in signatures):
        raise SignatureError(
            f"{origin}: expected an Ed25519 signature of 64 bytes, or up to {MAX_SIGNATURES} lines of base64 of them"
        )
    return signatures


def _keys_of(text: str) -> list[PinKey]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if _RAW_KEY.fullmatch(text):
        return [_key(Ed25519PublicKey.from_public_bytes(bytes.fromhex(text)), KEYS_VARIABLE)]
    data = read_small_file(local_path(text, KEYS_VARIABLE), MAX_KEY_FILE_BYTES, "pin keys")
    keys: list[PinKey] = []
    for block in _PEM_KEY.findall(data):
        try:
            loaded = serialization.load_pem_public_key(block)
        except Exception as error:  # the library raises its own and OpenSSL's, all of one meaning here
            raise SignatureError(f"{text}: a public key cannot be read: {type(error).__name__}") from None
        if not isinstance(loaded, Ed25519PublicKey):
            raise SignatureError(f"{text}: expected Ed25519 public keys, got a {type(loaded).__name__}")
        keys.append(_key(loaded, text))
    if not keys:
        raise SignatureError(f"{text}: has no PEM block 'PUBLIC KEY'")
    return keys


def _key(public: Ed25519PublicKey, origin: str) -> PinKey:
    from cryptography.exceptions import InvalidSignature

    def verifies(signature: bytes, data: bytes) -> bool:
        try:
            public.verify(signature, data)
        except InvalidSignature:
            return False
        return True

    raw = public.public_bytes_raw()
    _refuse_weak_point(raw, origin)
    return PinKey(digest_of(raw)[:16], origin, verifies)


def _refuse_weak_point(raw: bytes, origin: str) -> None:
    """OpenSSL, which verifies, takes any encoding; a signature by a key of small order needs no private key."""
    y = int.from_bytes(raw, "little") & ((1 << 255) - 1)  # the highest bit is the sign of x
    if y >= _FIELD:
        raise SignatureError(f"{origin}: the key {raw.hex()} is no canonical encoding of a point (RFC 8032, 5.1.3)")
    if y in _SMALL_ORDER_Y:
        raise SignatureError(f"{origin}: the key {raw.hex()} is a point of small order, for which anybody can sign")


def read_small_file(file: Path, limit: int, what: str) -> bytes:
    """The bytes of a file of at most ``limit`` bytes; raises ``SignatureError`` if they cannot be read."""
    try:
        return read_regular(file, limit)
    except OSError as error:
        raise SignatureError(f"{file}: {what} cannot be read: {error.strerror}") from None
    except CubinRuntimeError as error:
        raise SignatureError(f"{what} cannot be read: {error}") from None
