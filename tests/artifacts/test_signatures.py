from __future__ import annotations

import base64
import errno
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.artifacts.children import run_child
from tests.artifacts.releases import Release, make_release

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cubin_runtime.artifacts.atomic_write import changing
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins import signatures, signed_statement
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
        ('[signed]\nfile = "made-1.0.pins.toml"\nversion = 0\n', "version is not between 1 and"),
        (f'[signed]\nfile = "made-1.0.pins.toml"\nversion = 0x{"f" * 100}\n', "version is not between 1 and"),
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


def test_a_state_folder_in_whose_place_a_file_stands_is_an_error(
    publish: Callable[..., None], read: Callable[[], set[str]], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file in the way of the folder")
    publish(7)
    with pytest.raises(SignatureError, match="Not a directory"):
        read()


def test_a_version_that_cannot_be_recorded_is_an_error_until_it_is_no_news(
    publish: Callable[..., None], read: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    publish(7)
    with monkeypatch.context() as patched:
        patched.setattr(signed_statement, "replace_file", refuse)
        with pytest.raises(SignatureError, match=r"version 7 of .* cannot be recorded.*Read-only.*XDG_STATE_HOME"):
            read()
        patched.undo()
        read()
        patched.setattr(signed_statement, "replace_file", refuse)
        assert "made-1.0" in read()


def test_a_lock_that_is_a_link_is_an_error(
    publish: Callable[..., None], read: Callable[[], set[str]], tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ".pin_versions.json.lock").symlink_to("elsewhere")
    publish(7)
    with pytest.raises(SignatureError, match=r"cannot be recorded.*\.pin_versions\.json\.lock"):
        read()


def test_a_lock_that_somebody_holds_is_an_error(
    publish: Callable[..., None], read: Callable[[], set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signed_statement, "changing", functools.partial(changing, seconds=0.05))
    publish(7)
    held, refused = changing(tmp_path / "state" / "pin_versions.json"), pytest.raises(SignatureError)
    with held, refused as raised:
        read()
    assert "cannot be recorded" in str(raised.value)
    assert "another process is changing it" in str(raised.value)
    assert "made-1.0" in read()


def test_a_record_that_only_root_may_write_is_an_error(open_place: Path, key: Ed25519PrivateKey) -> None:
    made = make_release(open_place)
    sign(made.pin_file, key)
    (open_place / "state").mkdir()
    (open_place / "state" / "pin_versions.json").write_text('{"versions": {}}')
    body = """
    import sys
    from pathlib import Path
    from cubin_runtime.artifacts.pins.pin_set import PinSet
    from cubin_runtime.errors import PinError
    try:
        PinSet.from_files(None, Path(sys.argv[1]), keys=[sys.argv[2]], state=Path(sys.argv[3]))
    except PinError as error:
        print("error:", error)
    """
    before = """
import cryptography.exceptions
import filelock
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
made = Ed25519PrivateKey.generate()
Ed25519PublicKey.from_public_bytes(made.public_key().public_bytes_raw()).verify(made.sign(b""), b"")
"""  # which loads what an ordinary user may not read
    state = open_place / "state" / "pin_versions.json"
    done = run_child(body, made.pin_file, hex_of(key), state, as_user=True, before=before)
    assert "cannot be recorded" in done.stdout, done.stderr
    assert "Permission denied" in done.stdout


def test_a_linked_folder_is_no_way_around_the_newest_version(
    publish: Callable[..., None], read: Callable[[], set[str]], release: Release, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    publish(8)
    read()
    publish(7)
    (tmp_path / "linked").symlink_to(release.pin_file.parent)
    linked, state = tmp_path / "linked" / release.pin_file.name, tmp_path / "state" / "pin_versions.json"
    with pytest.raises(SignatureError, match="is version 7, version 8 was seen before"):
        PinSet.from_files(None, linked, keys=[hex_of(key)], state=state)


def test_files_of_one_name_by_different_keys_have_their_own_versions(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    for number, version in ((1, 7), (2, 3)):
        key = new_key()
        file = make_release(tmp_path / str(number), name="made-1.0", folder="made/fmha").pin_file
        state_version(file, version)
        sign(file, key)
        assert "made-1.0" in {pin.name for pin in PinSet.from_files(None, file, keys=[hex_of(key)], state=state)}


def test_a_version_counts_for_every_key_that_signed_it(release: Release, tmp_path: Path) -> None:
    """So that, while a key is changed for another, the last file that the old one signed cannot be put back."""
    old, new, state = new_key(), new_key(), tmp_path / "state.json"

    def read(*keys: Ed25519PrivateKey) -> None:
        PinSet.from_files(None, release.pin_file, keys=[hex_of(old), hex_of(new)], state=state)

    for version, signers in ((7, [old]), (8, [old, new])):
        state_version(release.pin_file, version)
        sign(release.pin_file, *signers)
        read()
    state_version(release.pin_file, 7)
    sign(release.pin_file, old)
    with pytest.raises(SignatureError, match="is version 7, version 8 was seen before"):
        read()


@pytest.mark.timeout(20)
def test_a_record_that_is_a_fifo_is_an_error_and_never_blocks(
    publish: Callable[..., None], read: Callable[[], set[str]], tmp_path: Path
) -> None:
    publish(7)
    (tmp_path / "state").mkdir()
    os.mkfifo(tmp_path / "state" / "pin_versions.json")
    with pytest.raises(SignatureError, match="is a FIFO"):
        read()


# -- keys for which anybody can sign

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


def times_8_is_neutral(y: int) -> bool:
    """Whether a point of edwards25519 with this y has an order that divides 8."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if x * x % P == square else x * pow(2, (P - 1) // 4, P) % P
    assert x * x % P == square  # there is such a point
    point = (x, y)
    for _ in range(3):
        (a, b), t = point, D * (point[0] * point[1]) ** 2 % P
        point = (2 * a * b * pow(1 + t, -1, P) % P, (b * b + a * a) * pow(1 - t, -1, P) % P)
    return point == (0, 1)


@pytest.mark.parametrize("sign_of_x", [0, 1])
@pytest.mark.parametrize("y", sorted(signatures._SMALL_ORDER_Y))
def test_a_point_of_small_order_is_no_key(release: Release, y: int, sign_of_x: int) -> None:
    assert times_8_is_neutral(y)
    with pytest.raises(SignatureError, match="is a point of small order, for which anybody can sign"):
        load_keys([(y | sign_of_x << 255).to_bytes(32, "little").hex()])


@pytest.mark.parametrize("sign_of_x", [0, 1])
@pytest.mark.parametrize("y", range(P, 2**255))
def test_an_encoding_of_a_point_that_is_not_canonical_is_no_key(y: int, sign_of_x: int) -> None:
    with pytest.raises(SignatureError, match="is no canonical encoding of a point"):
        load_keys([(y | sign_of_x << 255).to_bytes(32, "little").hex()])


def test_a_key_file_with_a_point_of_small_order_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_bytes(
        Ed25519PublicKey.from_public_bytes(bytes(32)).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(SignatureError, match=r"key\.pub: the key 0+ is a point of small order"):
        load_keys([str(tmp_path / "key.pub")])


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
