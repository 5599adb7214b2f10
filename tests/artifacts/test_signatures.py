from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from children import run_child
from releases import Release, make_release

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins.pin_set import PinSet
from cubin_runtime.artifacts.pins.signatures import SignatureError, load_keys
from cubin_runtime.config import Config
from cubin_runtime.errors import PinError

Signer = Callable[[Ed25519PrivateKey], None]


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def hex_of(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def pem_of(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def signature_file(file: Path) -> Path:
    return file.with_name(file.name + ".sig")


def state_version(file: Path, version: int = 1, more: str = "", name: str | None = None) -> None:
    """Put a ``[signed]`` table at the beginning of a pin file, in place of the one that it has."""
    rest = file.read_text().partition("# pins\n")[2] or file.read_text()
    file.write_text(f'[signed]\nfile = "{name or file.name}"\nversion = {version}\n{more}# pins\n{rest}')


def sign(file: Path, *keys: Ed25519PrivateKey) -> None:
    """One signature as raw bytes, several as lines of base64; of version 1, where the file states none."""
    if b"[signed]" not in file.read_bytes():
        state_version(file)
    made = [key.sign(file.read_bytes()) for key in keys]
    raw = made[0] if len(made) == 1 else b"\n".join(base64.b64encode(one) for one in made)
    signature_file(file).write_bytes(raw)


def names_read(file: Path, *keys: str) -> set[str]:
    return {pin.name for pin in PinSet.from_files(None, file, keys=keys)}


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return new_key()


@pytest.fixture
def signed(release: Release, key: Ed25519PrivateKey) -> Path:
    sign(release.pin_file, key)
    return release.pin_file


def test_a_signed_file_is_read(signed: Path, key: Ed25519PrivateKey) -> None:
    assert "made-1.0" in names_read(signed, hex_of(key))


def test_without_keys_no_signature_is_asked_for(release: Release) -> None:
    assert "made-1.0" in names_read(release.pin_file)


def test_once_a_key_is_set_an_unsigned_file_is_refused(release: Release, key: Ed25519PrivateKey) -> None:
    with pytest.raises(SignatureError, match=r"is not signed \(made-1\.0\.pins\.toml\.sig is missing\)"):
        names_read(release.pin_file, hex_of(key))


def test_the_built_in_pins_need_no_signature(key: Ed25519PrivateKey) -> None:
    assert "trtllm-gen-0.6.13" in {pin.name for pin in PinSet.from_files(None, keys=[hex_of(key)])}


@pytest.mark.parametrize("change", [b"\n", b"#", b"\r\n", b"\0"])
def test_one_byte_more_breaks_the_signature(signed: Path, key: Ed25519PrivateKey, change: bytes) -> None:
    signed.write_bytes(signed.read_bytes() + change)
    with pytest.raises(SignatureError, match="is not a signature of"):
        names_read(signed, hex_of(key))


def test_the_signature_is_checked_before_the_file_is_parsed(signed: Path, key: Ed25519PrivateKey) -> None:
    signed.write_bytes(b"this is = = no TOML")
    with pytest.raises(SignatureError):
        names_read(signed, hex_of(key))


def test_another_key_is_refused_by_name(signed: Path) -> None:
    other = hex_of(new_key())
    with pytest.raises(SignatureError, match=load_keys([other])[0].name):
        names_read(signed, other)


def test_any_of_several_keys_may_have_signed(signed: Path, key: Ed25519PrivateKey) -> None:
    assert "made-1.0" in names_read(signed, hex_of(new_key()), hex_of(key))


def test_any_of_several_signatures_may_fit(release: Release, key: Ed25519PrivateKey) -> None:
    sign(release.pin_file, new_key(), key)
    assert "made-1.0" in names_read(release.pin_file, hex_of(key))


def test_a_rotation_never_leaves_a_host_without_a_fitting_key(release: Release) -> None:
    old, new = new_key(), new_key()
    sign(release.pin_file, old)
    before = names_read(release.pin_file, hex_of(old), hex_of(new))
    sign(release.pin_file, new)
    after = names_read(release.pin_file, hex_of(old), hex_of(new))
    assert before == after == names_read(release.pin_file, hex_of(new))
    with pytest.raises(SignatureError):
        names_read(release.pin_file, hex_of(old))


def test_a_file_may_hold_several_keys(signed: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    keys = tmp_path / "keys.pub"
    keys.write_bytes(b"# a remark\n" + pem_of(new_key()) + pem_of(key))
    assert "made-1.0" in names_read(signed, str(keys))


def test_every_user_file_must_be_signed(signed: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    other = make_release(tmp_path / "other", name="other-1.0", folder="other/fmha")
    with pytest.raises(SignatureError, match=r"other-1\.0"):
        PinSet.from_files(None, signed, other.pin_file, keys=[hex_of(key)])


@pytest.mark.parametrize("content", [b"", b"short", bytes(63), bytes(65), b"?" * 88, b"A" * 88 + b"\n" + b"B" * 40])
def test_what_has_no_form_of_a_signature_is_refused(signed: Path, key: Ed25519PrivateKey, content: bytes) -> None:
    signature_file(signed).write_bytes(content)
    with pytest.raises(SignatureError, match="expected an Ed25519 signature"):
        names_read(signed, hex_of(key))


def test_a_signature_that_cannot_be_read_is_refused(signed: Path, key: Ed25519PrivateKey) -> None:
    signature_file(signed).unlink()
    signature_file(signed).symlink_to("nowhere")
    with pytest.raises(SignatureError, match="signature cannot be read"):
        names_read(signed, hex_of(key))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no PEM block"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "cannot be read"),
        (pem_of(X25519PrivateKey.generate()), "expected Ed25519 public keys"),
        (b"A" * (65 << 10), "at most"),
    ],
)
def test_a_key_file_that_holds_no_key_is_refused(
    release: Release, tmp_path: Path, content: bytes, message: str
) -> None:
    keys = tmp_path / "keys.pub"
    keys.write_bytes(content)
    with pytest.raises(SignatureError, match=message):
        names_read(release.pin_file, str(keys))


def test_a_key_file_that_is_absent_is_refused(release: Release) -> None:
    with pytest.raises(SignatureError, match="pin keys cannot be read"):
        names_read(release.pin_file, "/no/such/keys.pub")


def test_without_the_package_that_checks_signatures_a_key_is_a_clear_error(
    signed: Path, key: Ed25519PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(SignatureError, match=r"pip install 'cubin-runtime\[signing\]'"):
        names_read(signed, hex_of(key))


def test_the_package_is_not_imported_while_no_key_is_set(release: Release) -> None:
    body = """
    import pathlib, sys
    from cubin_runtime.artifacts.pins.pin_set import PinSet
    PinSet.from_files(None, pathlib.Path(sys.argv[1]))
    print("cryptography" in sys.modules)
    """
    assert run_child(body, release.pin_file).stdout.strip() == "False"


def test_a_signature_made_with_openssl_fits(release: Release, tmp_path: Path) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    beside = signature_file(release.pin_file)
    state_version(release.pin_file)
    try:
        openssl("genpkey", "-algorithm", "ed25519", "-out", private)
        openssl("pkey", "-in", private, "-pubout", "-out", public)
        openssl("pkeyutl", "-sign", "-rawin", "-inkey", private, "-in", release.pin_file, "-out", beside)
    except FileNotFoundError:
        pytest.skip("there is no openssl here")
    assert "made-1.0" in names_read(release.pin_file, str(public))


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def test_a_library_takes_the_keys_of_its_configuration(release: Release, key: Ed25519PrivateKey, store: Path) -> None:
    config = Config(store=store, pin_files=(release.pin_file,), pin_keys=(hex_of(key),))
    with pytest.raises(SignatureError):
        Library(config)
    sign(release.pin_file, key)
    assert Library(config).pins.get("made-1.0") == release.pin


def test_pins_that_lie_in_a_store_are_refused(release: Release, store: Path) -> None:
    store.mkdir()
    inside = store / "pins.toml"
    inside.write_bytes(release.pin_file.read_bytes())
    with pytest.raises(PinError, match="never read from a store"):
        Library(Config(store=store, pin_files=(inside,)))


def test_keys_that_lie_in_a_store_are_refused(release: Release, store: Path, key: Ed25519PrivateKey) -> None:
    store.mkdir()
    (store / "keys.pub").write_bytes(pem_of(key))
    with pytest.raises(PinError, match="never read from a store"):
        Library(Config(store=store, pin_keys=(str(store / "keys.pub"),)))


# -- an old file put back, or another one in its place


@pytest.fixture
def publish(release: Release, key: Ed25519PrivateKey) -> Callable[..., None]:
    """Sign the pin file anew, as some version."""

    def sign_version(version: int, more: str = "", name: str | None = None) -> None:
        state_version(release.pin_file, version, more, name)
        sign(release.pin_file, key)

    return sign_version


@pytest.fixture
def read(release: Release, key: Ed25519PrivateKey, tmp_path: Path) -> Callable[[], set[str]]:
    """Read the pin file as a host does that remembers what it saw."""
    state = tmp_path / "state" / "pin_versions.json"

    def names() -> set[str]:
        return {pin.name for pin in PinSet.from_files(None, release.pin_file, keys=[hex_of(key)], state=state)}

    return names


def test_a_signed_file_older_than_the_newest_seen_is_refused(
    publish: Callable[..., None], read: Callable[[], set[str]]
) -> None:
    for version in (7, 7, 8):
        publish(version)
        assert "made-1.0" in read()
    publish(7)
    with pytest.raises(SignatureError, match="is version 7, version 8 was seen before"):
        read()


def test_versions_of_different_files_are_their_own(
    publish: Callable[..., None], read: Callable[[], set[str]], key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    publish(7)
    read()
    other = make_release(tmp_path / "other", name="other-1.0", folder="other/fmha").pin_file
    sign(other, key)
    state = tmp_path / "state" / "pin_versions.json"
    assert "other-1.0" in {pin.name for pin in PinSet.from_files(None, other, keys=[hex_of(key)], state=state)}


def test_a_file_signed_for_another_name_is_refused(publish: Callable[..., None], read: Callable[[], set[str]]) -> None:
    publish(1, name="staging.pins.toml")
    with pytest.raises(SignatureError, match=r"is signed for 'staging\.pins\.toml', expected 'made-1\.0\.pins\.toml'"):
        read()


def test_a_file_that_has_expired_is_refused(publish: Callable[..., None], read: Callable[[], set[str]]) -> None:
    publish(1, "expires = 2999-12-31T00:00:00Z\n")
    assert "made-1.0" in read()
    publish(2, "expires = 2020-01-31T00:00:00+01:00\n")
    with pytest.raises(SignatureError, match=r"expired at 2020-01-31T00:00:00\+01:00"):
        read()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("", r"has no \[signed\] table"),
        ("signed = 7\n", r"has no \[signed\] table"),
        ("[signed]\nversion = 1\n", "file is None"),
        ('[signed]\nfile = "made-1.0.pins.toml"\n', "version is None, expected an integer"),
        ('[signed]\nfile = "made-1.0.pins.toml"\nversion = 0\n', "version is 0"),
        ('[signed]\nfile = "made-1.0.pins.toml"\nversion = true\n', "version is True"),
        ('[signed]\nfile = "made-1.0.pins.toml"\nversion = 1\nexpires = 2999-01-01\n', "with a time zone"),
        ('[signed]\nfile = "made-1.0.pins.toml"\nversion = 1\nexpires = 2999-01-01T00:00:00\n', "with a time zone"),
        ('[signed]\nfile = "made-1.0.pins.toml"\nversion = 1\nexpire = 1\n', "unknown keys expire"),
        ("this is = = no TOML", "invalid TOML"),
    ],
)
def test_a_signed_file_must_say_what_it_is(
    release: Release, key: Ed25519PrivateKey, statement: str, message: str
) -> None:
    data = f"{statement}\n{release.pin_file.read_text()}".encode()
    release.pin_file.write_bytes(data)
    signature_file(release.pin_file).write_bytes(key.sign(data))
    with pytest.raises(SignatureError, match=message):
        names_read(release.pin_file, hex_of(key))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"versions": 1}', '{"versions": {"x": "7"}}', "\0"])
def test_versions_that_do_not_read_are_an_error_and_no_amnesty(
    publish: Callable[..., None], read: Callable[[], set[str]], tmp_path: Path, content: str
) -> None:
    publish(7)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "pin_versions.json").write_text(content)
    with pytest.raises(SignatureError, match="the recorded versions of pin files cannot be read: it is damaged"):
        read()


def test_where_nothing_can_be_remembered_the_file_is_read_all_the_same(
    publish: Callable[..., None], read: Callable[[], set[str]], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file in the way of the folder")
    publish(7)
    with pytest.raises(SignatureError, match="Not a directory"):
        read()
    (tmp_path / "state").unlink()
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o555)
    assert "made-1.0" in read()


def test_without_keys_a_statement_is_not_looked_at(release: Release) -> None:
    state_version(release.pin_file, 1, "expires = 2020-01-31T00:00:00Z\n", "another")
    assert "made-1.0" in names_read(release.pin_file)


def test_versions_that_lie_in_a_store_are_refused(release: Release, store: Path, key: Ed25519PrivateKey) -> None:
    sign(release.pin_file, key)
    config = Config(
        store=store, pin_files=(release.pin_file,), pin_keys=(hex_of(key),), pin_state=store / "pin_versions.json"
    )
    with pytest.raises(PinError, match="never read from a store"):
        Library(config)
