from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.pins import bounded_toml
from cubin_runtime.artifacts.pins import pin_set as pin_set_module
from cubin_runtime.artifacts.pins.pin import Pin, format_pin, parse_pins, read_manifest
from cubin_runtime.artifacts.pins.pin_file import add_group, add_pin, make_pin
from cubin_runtime.artifacts.pins.pin_set import PinSet
from cubin_runtime.errors import PinError
from tests.artifacts.releases import make_release, manifest_of

PIN = Pin("one-1.0", ArtifactPath("one/fmha"), "a" * 64, 3, 900, 500, "c" * 64, "abi-1", "MIT", ("package",))


def pin_set(*pins: Pin) -> PinSet:
    return PinSet((pin, f"file {number}") for number, pin in enumerate(pins))


def test_the_published_trtllm_gen_release_is_built_in() -> None:
    pin = PinSet.from_files(None).get("trtllm-gen-0.6.13")
    assert (pin.path.text, pin.files, pin.bytes, pin.max_file_bytes, pin.abi) == (
        "158f6fa11ef139a098cfddcdddce73ca99d164ad/fmha/trtllm-gen",
        13453,
        1651218689,
        8388608,
        "trtllm-gen-0.6.13",
    )
    assert pin.manifest_sha256 == "c2d9399b2537be785882354a4f9902ed6c03136c0ea341e201eac40c3923e1dc"


def test_a_pin_written_is_read_back_equal() -> None:
    odd = replace(PIN, licence='quoted "x" \\ ü', index_sha256=None, abi=None, sources=("https://h/a?b", "/x y"))
    assert parse_pins((format_pin(PIN) + format_pin(odd)).encode(), "text") == (PIN, odd)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('name = "one-1.0"', 'name = "a b"', "name is 'a b'"),
        ('name = "one-1.0"', "", "lacks name"),
        ('path = "one/fmha"', 'path = "../x"', r"'\.\.'"),
        ('path = "one/fmha"', 'path = "x/"', "empty component"),
        ("files = 3", "files = -1", "files is -1"),
        ("files = 3", "files = true", "files is True"),
        ("bytes = 900", 'bytes = "900"', "bytes is '900'"),
        ("max_file_bytes = 500", "max_file_bytes = 99999999999", "at most"),
        ('abi = "abi-1"', 'colour = "red"', "unknown keys colour"),
        ('licence = "MIT"', 'licence = "a\\u001bb"', "printable"),
        ('sources = ["package"]', "sources = [1]", "sources is"),
        ('sources = ["package"]', 'sources = "package"', "sources is"),
        ("aaaaaaaa", "AAAAAAAA", "manifest_sha256"),
        ("[[pin]]", "[pin]", "expected only"),
        ("[[pin]]", "verify = false\n[[pin]]", "verify"),
        ("files = 3", "files = = 3", "invalid TOML"),
    ],
)
def test_a_wrong_pin_is_refused_and_says_what_is_wrong(before: str, after: str, reason: str) -> None:
    with pytest.raises(PinError, match=reason):
        parse_pins(format_pin(PIN).replace(before, after, 1).encode(), "file.toml")


@pytest.mark.parametrize(
    "other",
    [
        replace(PIN, manifest_sha256="b" * 64),
        replace(PIN, manifest_sha256="b" * 64, path=ArtifactPath("two")),
        replace(PIN, manifest_sha256="b" * 64, name="two-1.0"),
        replace(PIN, path=ArtifactPath("two")),
        replace(PIN, name="two-1.0", path=ArtifactPath("one")),
        replace(PIN, name="two-1.0", path=ArtifactPath("one/fmha/deep")),
        replace(PIN, name="one/fmha", path=ArtifactPath("three")),
        replace(PIN, abi="abi-2"),
        replace(PIN, max_file_bytes=10_000),
        replace(PIN, index_sha256=None),
    ],
)
def test_pins_that_disagree_are_an_error_in_any_order(other: Pin) -> None:
    bystander = replace(PIN, name="bystander", path=ArtifactPath("bystander"))
    for order in permutations((PIN, other, bystander)):
        with pytest.raises(PinError, match="two pins disagree"):
            pin_set(*order)


def test_the_same_pin_twice_counts_once_and_joins_the_sources() -> None:
    pins = pin_set(PIN, replace(PIN, sources=("package", "/tree")))
    assert [pin.sources for pin in pins] == [("package", "/tree")]


@pytest.mark.parametrize("word", ["one-1.0", "one/fmha", "one/fmha/", "one/fmha/x.cubin", "one/fmha/sub/y"])
def test_a_pin_is_found_by_name_folder_or_any_path_below(word: str) -> None:
    assert pin_set(PIN).get(word) == PIN


@pytest.mark.parametrize("word", ["two", "one", "one/fmh", "one/fmhax/y", "", "/one/fmha", "../one/fmha"])
def test_what_no_pin_covers_is_an_error_that_names_the_pins(word: str) -> None:
    with pytest.raises(PinError, match=r"one-1\.0"):
        pin_set(PIN).get(word)


def test_a_pin_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PinError, match="cannot be read"):
        PinSet.from_files(None, tmp_path / "none.toml")


def test_a_user_pin_cannot_change_a_built_in_one(tmp_path: Path) -> None:
    built_in = PinSet.from_files(None).get("trtllm-gen-0.6.13")
    file = tmp_path / "pins.toml"
    file.write_text(format_pin(replace(built_in, manifest_sha256="0" * 64)))
    with pytest.raises(PinError, match="disagree on manifest_sha256"):
        PinSet.from_files(None, file)


def test_the_estimate_is_the_share_of_the_files() -> None:
    assert PIN.estimate(2) == 600


def test_a_manifest_with_another_digest_is_a_pin_mismatch(tmp_path: Path) -> None:
    release = make_release(tmp_path)
    with pytest.raises(PinError, match="sha256 is"):
        read_manifest(release.pin, manifest_of(release.files) + b"\n", "origin")


def test_a_manifest_with_another_number_of_files_is_a_pin_mismatch(tmp_path: Path) -> None:
    release = make_release(tmp_path)
    with pytest.raises(PinError, match="lists 3 files"):
        read_manifest(replace(release.pin, files=4), manifest_of(release.files), "origin")


def test_a_new_pin_is_appended_and_then_in_force(tmp_path: Path) -> None:
    file = tmp_path / "conf" / "pins.toml"
    first = make_pin(manifest_of({"x": b"1"}), ArtifactPath("new/x"), "origin")
    second = make_pin(manifest_of({"y": b"2"}), ArtifactPath("new/y"), "origin", name="why", abi="abi-1")
    assert add_pin(file, first, PinSet.from_files(None))
    assert add_pin(file, second, PinSet.from_files(None, file))
    assert [PinSet.from_files(None, file).get(name) for name in ("new-x", "why")] == [first, second]


def test_a_release_that_is_pinned_already_is_not_written_again(tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    pin = make_pin(manifest_of({"x": b"1"}), ArtifactPath("new/x"), "origin")
    add_pin(file, pin, PinSet.from_files(None))
    assert not add_pin(file, replace(pin, name="again"), PinSet.from_files(None, file))


def test_a_pin_that_disagrees_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    pin = make_pin(manifest_of({"x": b"1"}), ArtifactPath("new/x"), "origin")
    add_pin(file, pin, PinSet.from_files(None))
    before = file.read_text()
    with pytest.raises(PinError, match="disagree"):
        add_pin(file, replace(pin, manifest_sha256="d" * 64), PinSet.from_files(None, file))
    assert file.read_text() == before


def many(count: int) -> list[tuple[Pin, str]]:
    return [(replace(PIN, name=f"made-{n}", path=ArtifactPath(f"made-{n}/fmha")), "file") for n in range(count)]


def comparisons(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often pins and their folders are looked at while a set of ``count`` pins is made."""
    looked = Counter[str]()
    below = ArtifactPath.is_below

    def counted(path: ArtifactPath, folder: ArtifactPath) -> bool:
        looked["below"] += 1
        return below(path, folder)

    def joined(same: Sequence[tuple[Pin, str]]) -> tuple[Pin, str]:
        looked["joined"] += len(same)
        return same[0]

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactPath, "is_below", counted)
        patch.setattr(pin_set_module, "_joined", joined)
        assert len(PinSet(many(count))) == count
    return looked.total()


def test_a_set_of_pins_costs_in_proportion_to_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comparisons(200, monkeypatch) <= 400
    assert comparisons(2000, monkeypatch) <= 4000


def test_a_name_that_only_a_group_gave_is_free_in_any_order() -> None:
    stated, member = replace(PIN, name="stated"), replace(PIN, groups=("group",))
    other = replace(PIN, path=ArtifactPath("other/fmha"), manifest_sha256="1" * 64)
    for order in permutations([(stated, "a"), (member, "b"), (other, "c")]):
        assert sorted(pin.name for pin in PinSet(order)) == sorted(["stated", PIN.name])


HOSTILE_TOML = {
    "a key of more than 8 parts": b"a." * 100_000 + b"b = 1",
    "brackets nested more than 8 deep": b"x = " + b"[" * 100_000,
    "a word of more than 128 bytes": b"x = " + b"9" * 5000,
    "more than 262144 keys": b"x = [" + b"1," * 300_000 + b"]",
    "or lines": b"#\n" * 300_000,
    "at most 4194304": b"#" * (5 << 20),
    "invalid TOML": b'x = """' + b'\\"""' * 1000,
}


@pytest.mark.parametrize("reason", HOSTILE_TOML)
def test_toml_that_costs_more_than_any_pin_file_is_refused_unparsed(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason != "invalid TOML":
        monkeypatch.setattr(bounded_toml, "_tomllib", None)
    with pytest.raises(PinError, match=reason):
        parse_pins(HOSTILE_TOML[reason], "pins.toml")


def test_bounds_do_not_count_what_stands_in_strings_and_comments() -> None:
    text = format_pin(PIN).replace('licence = "', 'licence = "' + "[" * 20 + "a." * 20 + "9" * 200)
    assert len(parse_pins(f"# {'[' * 20}\n{text}".encode(), "pins.toml")) == 1


def test_a_file_that_takes_no_table_at_its_end_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    in_one_line = ", ".join(format_pin(PIN).replace("[[pin]]\n", "").splitlines())
    file.write_text(f"pin = [{{{in_one_line}}}]\n")
    before = file.read_text()
    pin_set = PinSet.from_files(None, file)
    pin = make_pin(manifest_of({"x": b"1"}), ArtifactPath("new/x"), "origin")
    with pytest.raises(PinError, match="does not take the table of 'new-x' at its end"):
        add_pin(file, pin, pin_set)
    with pytest.raises(PinError, match="does not take the table of 'new-x' at its end"):
        add_group(file, [pin], pin_set)
    assert file.read_text() == before
