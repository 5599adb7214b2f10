"""Pins from FlashInfer's list of artifacts, read as text and never run."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.pins import flashinfer
from cubin_runtime.artifacts.pins.flashinfer import flashinfer_pins, parse_artifacts
from cubin_runtime.artifacts.pins.pin import parse_pins
from cubin_runtime.artifacts.pins.pin_file import add_group, add_pin, make_pin, remove_group
from cubin_runtime.artifacts.pins.pin_set import PinSet
from cubin_runtime.errors import PinError
from tests.artifacts.flashinfer_wheel import CPUS, FAMILIES, TARGETS, artifacts_text, make_tree, make_wheel

GROUP = "flashinfer-9.1.0"


@pytest.fixture
def digests(tmp_path: Path) -> dict[str, str]:
    return make_tree(tmp_path / "tree")


@pytest.fixture
def wheel(tmp_path: Path, digests: dict[str, str]) -> Path:
    return make_wheel(tmp_path, artifacts_text(digests))


def test_every_family_with_a_digest_is_pinned_and_the_others_are_named(wheel: Path, digests: dict[str, str]) -> None:
    found = flashinfer_pins(str(wheel))
    assert {f"{pin.path}/": pin.manifest_sha256 for pin in found.pins} == digests
    words = ["fmha", "batched-gemm", "gemm", "deep-gemm"]
    words += [f"cute-dsl-{cpu}-{sm}" for cpu in CPUS for sm in TARGETS]
    assert [pin.name for pin in found.pins] == [f"{GROUP}-{word}" for word in words]
    assert {(pin.groups, pin.abi, pin.files) for pin in found.pins} == {((GROUP,), None, 0)}
    assert found.unpinnable == ("aaa6/fmha/cudnn",)


def test_a_family_of_a_later_version_is_pinned_by_its_own_name(digests: dict[str, str]) -> None:
    text = artifacts_text(digests)
    text = text.replace("DEEPGEMM", "NEW_KIND")
    assert f"{GROUP}-new-kind" in [pin.name for pin in parse_artifacts(text.encode(), "9.1.0", "x").pins]


@pytest.mark.timeout(20)
def test_a_wheel_that_is_a_fifo_is_told_and_not_waited_for(tmp_path: Path) -> None:
    wheel = tmp_path / "flashinfer_python-9.1.0-py3-none-any.whl"
    os.mkfifo(wheel)
    with pytest.raises(PinError, match="is a FIFO, expected a regular file"):
        flashinfer_pins(str(wheel))


@pytest.mark.timeout(20)
def test_an_installed_list_that_is_a_fifo_is_told_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "flashinfer_python-9.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 9.1.0\n")
    (tmp_path / "flashinfer").mkdir()
    os.mkfifo(tmp_path / "flashinfer" / "artifacts.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PinError, match="is a FIFO, expected a regular file"):
        flashinfer_pins("installed")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class ArtifactPath", "cannot be parsed as Python"),
        ("\0", "cannot be parsed as Python"),
        ("(" * 100_000, "cannot be parsed as Python"),
        ("x = 1\n", "not list artifacts in a known way"),
        ("class ArtifactPath:\n    A = 'a/b'\n", "not list artifacts in a known way"),
        ("class ArtifactPath:\n    A = '../b'\nclass CheckSumHash:\n    A = '" + "0" * 64 + "'\n", r"\.\."),
        ("class ArtifactPath:\n    A = 'a/b'\nclass CheckSumHash:\n    A = 'x'\n", "manifest_sha256"),
    ],
)
def test_a_list_that_does_not_read_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PinError, match=reason):
        parse_artifacts(text.encode(), "9.1.0", "x")


def test_a_wheel_that_is_none_is_refused(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PinError, match="expected a wheel named"):
        flashinfer_pins(str(tmp_path / "other.whl"))
    with pytest.raises(PinError, match="No such file"):
        flashinfer_pins(str(tmp_path / "flashinfer_python-1.0-py3-none-any.whl"))
    empty = tmp_path / "flashinfer_python-2.0-py3-none-any.whl"
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(PinError, match="has no flashinfer/artifacts"):
        flashinfer_pins(str(empty))
    monkeypatch.setattr(flashinfer, "MAX_TEXT_BYTES", 10)
    with pytest.raises(PinError, match="at most 10 are allowed"):
        flashinfer_pins(str(wheel))


def test_the_installed_package_is_found_by_its_metadata_and_not_imported(
    tmp_path: Path, digests: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "flashinfer").mkdir(parents=True)
    (site / "flashinfer" / "artifacts.py").write_text(artifacts_text(digests))
    (site / "flashinfer_python-9.2.0.dist-info").mkdir()
    (site / "flashinfer_python-9.2.0.dist-info" / "METADATA").write_text("Name: flashinfer-python\nVersion: 9.2.0\n")
    with pytest.raises(PinError, match="not installed"):
        flashinfer_pins("installed")
    monkeypatch.syspath_prepend(site)
    assert flashinfer_pins("installed").group == "flashinfer-9.2.0"


# -- groups in the pin file


def test_a_group_is_written_once(tmp_path: Path, wheel: Path) -> None:
    file, pins = tmp_path / "pins.toml", flashinfer_pins(str(wheel)).pins
    assert add_group(file, pins, PinSet.from_files(None)) == pins
    known = PinSet.from_files(None, file)
    assert {pin.name for pin in known.group(GROUP)} == {pin.name for pin in pins}
    assert add_group(file, pins, known) == ()


@pytest.mark.parametrize("first", ["stated", "group"])
def test_a_release_that_is_pinned_by_itself_keeps_its_name_and_facts_and_joins(
    tmp_path: Path, wheel: Path, first: str
) -> None:
    manifest = (tmp_path / "tree" / FAMILIES["DEEPGEMM"] / "checksums.txt").read_bytes()
    mine = make_pin(manifest, ArtifactPath("aaa4/deep-gemm"), "x", name="mine", licence="MIT")
    pins = flashinfer_pins(str(wheel)).pins
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    add_pin(one, mine, PinSet.from_files(None))
    add_group(two, pins, PinSet.from_files(None))
    files = (one, two) if first == "stated" else (two, one)
    known = PinSet.from_files(None, *files)
    joined = known.get("aaa4/deep-gemm")
    assert (joined.name, joined.licence, joined.files, joined.groups) == ("mine", "MIT", 1, (GROUP,))
    assert joined in known.group(GROUP)
    assert len(known.group(GROUP)) == len(pins)


def test_another_digest_of_a_folder_is_refused_whatever_the_group(tmp_path: Path, digests: dict[str, str]) -> None:
    file = tmp_path / "pins.toml"
    good = parse_artifacts(artifacts_text(digests).encode(), "9.1.0", "x").pins
    add_group(file, good, PinSet.from_files(None))
    before = file.read_bytes()
    bad = parse_artifacts(artifacts_text({**digests, "aaa4/deep-gemm/": "0" * 64}).encode(), "9.2.0", "x").pins
    with pytest.raises(PinError, match="manifest_sha256 of the folder 'aaa4/deep-gemm'"):
        add_group(file, bad, PinSet.from_files(None, file))
    assert file.read_bytes() == before


def test_two_groups_share_releases_and_one_is_taken_out(tmp_path: Path, digests: dict[str, str]) -> None:
    file = tmp_path / "pins.toml"
    text = artifacts_text(digests).encode()
    for version in ("9.1.0", "9.2.0"):
        add_group(file, parse_artifacts(text, version, "x").pins, PinSet.from_files(None, *([file] * file.exists())))
    assert len(PinSet.from_files(None, file).group("flashinfer-9.2.0")) == len(digests)
    assert len(remove_group(file, "flashinfer-9.1.0")) == len(digests)
    left = PinSet.from_files(None, file)
    assert (len(left.group("flashinfer-9.1.0")), len(left.group("flashinfer-9.2.0"))) == (0, len(digests))
    with pytest.raises(PinError, match="has no pin of the group"):
        remove_group(file, "flashinfer-9.1.0")


def test_the_release_of_later_versions_is_built_in_and_never_launched() -> None:
    pin = PinSet.from_files(None).get("trtllm-gen-0.6.18.post1")
    assert (pin.path.text, pin.abi) == ("2d6a5a029eefcc388ec0ceb87efb55d8bcce5c3c/fmha/trtllm-gen", None)
    assert pin.manifest_sha256 == "d79b5c51fc8597fac57dae0da4afa114fb2014575e4ec3df099ad856d97cabc3"


def test_a_pin_in_a_group_is_read_back_equal(wheel: Path, tmp_path: Path) -> None:
    pins = flashinfer_pins(str(wheel)).pins
    add_group(tmp_path / "p.toml", pins, PinSet.from_files(None))
    assert parse_pins((tmp_path / "p.toml").read_bytes(), "x") == pins
