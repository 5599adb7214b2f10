"""Keys and signatures of pin files, on the machine that has the private key; ``signatures`` checks them elsewhere."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import StoreError, UsageError
from ...values import dataclass
from ..atomic_write import changing, replacing, write_all
from ..bounded_read import digest_of
from .bounded_toml import comments_at_end, read_toml
from .pin import parse_pins, quoted
from .signatures import MAX_KEY_FILE_BYTES, SIGNATURE_SUFFIX, read_pin_file, read_small_file
from .signed_statement import MAX_VERSION, STATEMENT, SignatureError, read_statement

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PUBLIC_SUFFIX = ".pub"
_TABLE = re.compile(rf"^[ \t]*\[[ \t]*{STATEMENT}[ \t]*\][^\n]*\n(?:(?![ \t]*\[)[^\n]*\n)*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A new key: its files, its name in messages, and the public key as 64 hex digits."""

    private: Path
    public: Path
    name: str
    public_hex: str


@dataclass(frozen=True, slots=True)
class Signing:
    """The record of a signature: the file, its signature, the version and expiry that it states, and by which keys."""

    file: Path
    signature: Path
    version: int
    expires: str | None
    keys: tuple[str, ...]


def make_key(private: Path) -> KeyPair:
    """Make an Ed25519 key: ``private`` (PEM, readable by its owner alone) and ``private.pub`` beside it.

    Raises:
        UsageError: one of the files exists already.
        StoreError: they cannot be written.
        SignatureError: the package ``cryptography`` is missing.
    """
    _need_cryptography("making a key")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not private.name:
        raise UsageError(f"{private}: is a folder, expected the name of a new file")
    public = private.with_name(private.name.removesuffix(".key") + PUBLIC_SUFFIX)
    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file in (private, public):
        if os.path.lexists(file):
            raise UsageError(f"{file}: exists already, and a key is never overwritten")
    _write_new(private, secret, 0o600)
    try:
        _write_new(public, key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo), 0o644)
    except BaseException:
        with suppress(OSError):
            private.unlink()  # nobody has used it, and it would be in the way of the next attempt
        raise
    raw = key.public_key().public_bytes_raw()
    return KeyPair(private, public, digest_of(raw)[:16], raw.hex())


def sign_pin_file(
    file: Path, keys: Sequence[Path], *, version: int | None = None, expires: datetime | None = None
) -> Signing:
    """State name, version and expiry at the top of a pin file, and sign its bytes into ``file.sig``.

    Args:
        file: the pin file; its ``[signed]`` table is replaced.
        keys: files of private keys (PEM, without a password); each signs.
        version: the version to state; None: one more than the file states, 1 if it states none.
        expires: a time to come, with a time zone; None: as the file states.

    Raises:
        UsageError: there is no key, or the version, the expiry or the file's name is outside its domain.
        PinError: the file is not a pin file.
        SignatureError: a key cannot be read, or the package ``cryptography`` is missing.
        StoreError: a file cannot be written.
    """
    if not keys:
        raise UsageError("sign: expected the file of a private key at least")
    if expires is not None and not _has_zone(expires):
        raise UsageError(f"expires {expires.isoformat()}: expected a time zone, for example 2027-01-31T00:00:00Z")
    private = [_private_key(key) for key in keys]
    try:
        file.name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{file}: expected a name in UTF-8, as the file states its name") from None
    read_pin_file(file, ())  # else a lock would be left beside no file
    try:
        with changing(file):
            return _signed(file, private, version, expires)
    except OSError as error:
        raise StoreError(f"{error.filename or file}: cannot be written: {error.strerror}") from None


def _signed(file: Path, private: Sequence[Ed25519PrivateKey], version: int | None, expires: datetime | None) -> Signing:
    """Sign a file that nobody else changes."""
    data = read_pin_file(file, ())
    pins = parse_pins(data, str(file))
    said = read_statement(data, str(file)) if STATEMENT in read_toml(data, str(file)) else None
    version = version if version is not None else 1 if said is None else said.version + 1
    if not 1 <= version <= MAX_VERSION:
        raise UsageError(f"version {version}: expected 1 to {MAX_VERSION}")
    if said is not None and version < said.version:
        raise UsageError(f"version {version}: {file} states {said.version} already, and hosts refuse an older one")
    until = expires if expires is not None or said is None else said.expires
    if until is not None and until <= datetime.now(timezone.utc):
        raise UsageError(
            f"expires {until.isoformat()}: is past, so that hosts would refuse the file; expected a later time"
        )
    header = [f"[{STATEMENT}]", f"file = {quoted(file.name)}", f"version = {version}"]
    if until is not None:
        header.append(f"expires = {until.isoformat()}")
    rest = _TABLE.sub(lambda table: comments_at_end(table[0]), data.decode() + "\n")
    signed = ("\n".join(header) + "\n\n" + rest.strip("\n") + "\n").encode()
    if parse_pins(signed, str(file)) != pins or read_statement(signed, str(file)).version != version:
        raise SignatureError(f"{file}: its [{STATEMENT}] table cannot be replaced; write it at the top of the file")
    signatures = [key.sign(signed) for key in private]
    beside = file.with_name(file.name + SIGNATURE_SUFFIX)
    if beside.is_dir():
        raise StoreError(f"{beside}: is a folder, expected a file or nothing")
    with replacing(beside) as new_signature, replacing(file) as new_file:  # neither takes its place before both fit
        write_all(new_signature, b"".join(base64.b64encode(one) + b"\n" for one in signatures))
        write_all(new_file, signed)
    names = tuple(digest_of(key.public_key().public_bytes_raw())[:16] for key in private)
    return Signing(file, beside, version, None if until is None else until.isoformat(), names)


def _has_zone(time: datetime) -> bool:
    """Return whether a time has a zone, of whole minutes as TOML has them."""
    offset = time.utcoffset()
    return offset is not None and not offset % timedelta(minutes=1)


def _private_key(file: Path) -> Ed25519PrivateKey:
    _need_cryptography("signing")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    data = read_small_file(file, MAX_KEY_FILE_BYTES, "private key")
    try:
        key = serialization.load_pem_private_key(data, None)
    except Exception:  # the library raises its own and OpenSSL's, all of one meaning here
        raise SignatureError(
            f"{file}: is no private key, or needs a password: expected a PEM file that 'cubin-runtime keygen' makes"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(f"{file}: expected an Ed25519 private key, got a {type(key).__name__}")
    return key


def _need_cryptography(what: str) -> None:
    try:
        import cryptography.exceptions  # noqa: F401
    except ImportError:
        raise SignatureError(f"{what} needs the package 'cryptography': pip install 'cubin-runtime[signing]'") from None


def _write_new(file: Path, data: bytes, mode: int) -> None:
    """Write a file that does not exist, whole or not at all."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            try:
                write_all(handle, data)
            finally:
                os.close(handle)
        except BaseException:
            file.unlink()
            raise
    except OSError as error:
        raise StoreError(f"{file}: cannot be written: {error.strerror}") from None
