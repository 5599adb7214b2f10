"""``cubin_runtime.fetch``, ``load``, ``verify`` and ``open_library``: one call from a name to verified bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cubin_runtime
from cubin_runtime import (
    Config,
    CorruptError,
    ExtraError,
    Library,
    MissingError,
    PinError,
    SourceError,
    StoreError,
    UsageError,
)
from tests.artifacts.children import run_child
from tests.artifacts.releases import Release, make_release, visible_files

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAME = "fmha/decode.cubin"


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return make_release(tmp_path)


@pytest.fixture
def library(release: Release, tmp_path: Path) -> Library:
    sources = (str(release.root),)
    return cubin_runtime.open_library(Config(tmp_path / "store", sources=sources, pin_files=(release.pin_file,)))


def test_a_release_is_fetched_by_its_name_with_progress(library: Library) -> None:
    seen: list[tuple[int, int]] = []
    report = cubin_runtime.fetch("made-1.0", progress=lambda done, total: seen.append((done, total)), library=library)
    assert (report.fetched, report.present, seen[0], seen[-1]) == (3, 0, (0, 3), (3, 3))


def test_a_second_fetch_finds_all_in_the_store(library: Library) -> None:
    cubin_runtime.fetch("made-1.0", library=library)
    report = cubin_runtime.fetch("made-1.0", library=library)
    assert (report.fetched, report.present, report.by_source) == (0, 3, {})


@pytest.mark.parametrize("target", ["made/fmha/fmha", "made/fmha/fmha/"])
def test_a_folder_of_a_release_is_fetched_alone(library: Library, target: str) -> None:
    assert cubin_runtime.fetch(target, library=library).fetched == 2


def test_a_glob_chooses_files(library: Library) -> None:
    assert cubin_runtime.fetch("made-1.0", match="*/prefill*", library=library).chosen == 1
    assert cubin_runtime.fetch("made-1.0", match=["*/prefill*", "*/decode*"], library=library).chosen == 2


def test_a_dry_run_fetches_nothing(library: Library) -> None:
    report = cubin_runtime.fetch("made-1.0", dry_run=True, library=library)
    assert (report.missing, report.fetched, library.store.root.exists()) == (3, 0, False)


def test_without_a_library_the_environment_decides(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("CUBIN_RUNTIME_SOURCES", str(release.root))
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(release.pin_file))
    assert cubin_runtime.fetch("made-1.0").fetched == 3
    assert cubin_runtime.verify("made-1.0", complete=True).where == str(tmp_path / "other")
    assert cubin_runtime.load(str(release.path(NAME))).origin == str(tmp_path / "other")


@pytest.mark.parametrize("path", ["made/fmha/fmha/decode.cubin", "fmha/decode.cubin", "decode"])
def test_bytes_are_loaded_by_path_or_name(release: Release, library: Library, path: str) -> None:
    artifact = cubin_runtime.load(path, library=library)
    assert (artifact.data, artifact.sha256) == (release.files[NAME], release.digest(NAME))
    assert (artifact.path, artifact.origin) == (release.path(NAME), str(release.root))


def test_a_cubin_comes_with_the_facts_of_its_kernels(tmp_path: Path) -> None:
    release = make_release(tmp_path, {"facts.cubin": (FIXTURES / "facts_sm_90a.cubin").read_bytes()})
    config = Config(tmp_path / "store", sources=(str(release.root),), pin_files=(release.pin_file,))
    cubin = cubin_runtime.load("facts", library=cubin_runtime.open_library(config)).cubin
    assert str(cubin.architecture) == "sm_90a"
    assert [len(kernel.parameters) for kernel in cubin.kernels.values() if kernel.registers]


def test_the_facts_of_bytes_that_are_no_cubin_are_an_error(library: Library) -> None:
    artifact = cubin_runtime.load("kernels.bin", library=library)
    with pytest.raises(cubin_runtime.CubinFormatError):
        _ = artifact.cubin


@pytest.mark.parametrize("path", ["made-1.0", "made/fmha", "made/fmha/fmha"])
def test_a_release_or_folder_is_not_loaded(library: Library, path: str) -> None:
    with pytest.raises(UsageError, match="is a release or a folder, expected the path of one file"):
        cubin_runtime.load(path, library=library)


@pytest.mark.parametrize("path", ["made/fmha/none.cubin", "nowhere/file.cubin", "none"])
def test_what_no_manifest_lists_is_not_pinned(library: Library, path: str) -> None:
    with pytest.raises(PinError):
        cubin_runtime.load(path, library=library)


def test_without_fetching_a_file_that_is_not_here_is_missing(release: Release, tmp_path: Path) -> None:
    config = Config(tmp_path / "store", sources=(str(release.root),), pin_files=(release.pin_file,))
    release.file(NAME).unlink()
    library = cubin_runtime.open_library(config)
    with pytest.raises(MissingError):
        cubin_runtime.load(release.path(NAME), fetch=False, library=library)
    with pytest.raises(SourceError):
        cubin_runtime.load(release.path(NAME), fetch=True, library=library)


def test_offline_nothing_is_fetched_by_default(release: Release, tmp_path: Path) -> None:
    release.file(NAME).unlink()
    config = Config(tmp_path / "store", (str(release.root),), (release.pin_file,), offline=True)
    with pytest.raises(MissingError):
        cubin_runtime.load(release.path(NAME), library=cubin_runtime.open_library(config))


def test_a_changed_file_in_a_source_is_corrupt(release: Release, library: Library) -> None:
    release.file(NAME).write_bytes(b"changed")
    with pytest.raises(CorruptError, match=r"fmha/decode\.cubin"):
        cubin_runtime.fetch("made-1.0", library=library)


def test_verify_returns_what_is_right(library: Library) -> None:
    cubin_runtime.fetch("made-1.0", library=library)
    report = cubin_runtime.verify("made-1.0", complete=True, library=library)
    assert (report.ok, report.missing, report.corrupt) == (3, (), ())


def test_verify_raises_for_a_damaged_object(release: Release, library: Library) -> None:
    cubin_runtime.fetch("made-1.0", library=library)
    damaged = library.store.object_path(release.digest(NAME))
    damaged.chmod(0o644)
    damaged.write_bytes(b"changed")
    with pytest.raises(CorruptError, match=r"made-1\.0 in .*: 1 corrupt: made/fmha/fmha/decode\.cubin"):
        cubin_runtime.verify("made-1.0", library=library)


def test_verify_raises_for_missing_files_only_if_all_are_expected(library: Library) -> None:
    cubin_runtime.fetch("made/fmha/fmha", library=library)
    assert len(cubin_runtime.verify("made-1.0", library=library).missing) == 1
    with pytest.raises(MissingError, match=r"1 missing: made/fmha/kernels\.bin"):
        cubin_runtime.verify("made-1.0", complete=True, library=library)


def test_verify_of_a_part_counts_that_part(library: Library) -> None:
    cubin_runtime.fetch("made-1.0", library=library)
    assert cubin_runtime.verify("made-1.0", match="*decode*", complete=True, library=library).ok == 1


@pytest.mark.parametrize("name", ["made/fmha/evil.cubin", "junk.txt", "other-release/evil.cubin", "made/evil"])
def test_verify_of_a_tree_finds_files_inside_and_beside_the_release(
    release: Release, library: Library, name: str
) -> None:
    assert cubin_runtime.verify("made-1.0", tree=release.root, complete=True, library=library).ok == 3
    file = release.root / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"junk")
    with pytest.raises(ExtraError, match=f"1 that no manifest lists: {name.removeprefix('made/fmha/')}"):
        cubin_runtime.verify("made-1.0", tree=release.root, complete=True, library=library)


def test_a_pinned_release_beside_another_is_not_foreign(release: Release, tmp_path: Path) -> None:
    other = make_release(tmp_path, {"more.cubin": b"more"}, "other-1.0", "other/fmha")
    pins = (release.pin_file, other.pin_file)
    library = cubin_runtime.open_library(Config(tmp_path / "store", pin_files=pins))
    assert cubin_runtime.verify("made-1.0", tree=release.root, library=library).extra == ()
    (release.root / "other" / "fmha" / "checksums.txt").unlink()
    with pytest.raises(ExtraError, match="other/fmha/more"):
        cubin_runtime.verify("made-1.0", tree=release.root, library=library)


def test_a_group_is_not_one_release(tmp_path: Path) -> None:
    release = make_release(tmp_path)
    release.pin_file.write_text(release.pin_file.read_text() + 'groups = ["all"]\n')
    library = cubin_runtime.open_library(Config(tmp_path / "store", pin_files=(release.pin_file,)))
    with pytest.raises(UsageError, match=r"'all': is a group of 1 releases, expected one: made-1\.0"):
        cubin_runtime.fetch("all", library=library)


def lines_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def audited(release: Release, tmp_path: Path) -> Library:
    config = Config(tmp_path / "store", (str(release.root),), (release.pin_file,), audit=tmp_path / "audit.jsonl")
    return cubin_runtime.open_library(config)


def test_the_audit_log_states_each_fetched_file_with_its_source(
    release: Release, audited: Library, tmp_path: Path
) -> None:
    cubin_runtime.fetch("made-1.0", library=audited)
    lines = lines_of(tmp_path / "audit.jsonl")
    assert {line["event"] for line in lines} == {"fetch"}
    assert {line["path"]: (line["sha256"], line["bytes"], line["source"]) for line in lines} == {
        str(release.path(name)): (release.digest(name), len(data), str(release.root))
        for name, data in release.files.items()
    }
    assert all(line["time"].endswith("+00:00") and line["release"] == "made-1.0" for line in lines)  # type: ignore[attr-defined]


def test_the_audit_log_has_refused_files_loads_and_verifications(
    release: Release, audited: Library, tmp_path: Path
) -> None:
    cubin_runtime.load("decode", library=audited)
    release.file(NAME).write_bytes(b"changed")
    with pytest.raises(CorruptError):
        cubin_runtime.fetch("made-1.0", library=audited)
    cubin_runtime.verify("made-1.0", library=audited)
    lines = lines_of(tmp_path / "audit.jsonl")
    assert [line["event"] for line in lines] == ["load", "fetch", "fetch", "fetch", "verify"]
    (refused,) = (line for line in lines if "error" in line)
    assert (refused["path"], "expected" in str(refused["error"])) == (str(release.path(NAME)), True)
    assert (lines[-1]["ok"], lines[-1]["missing"]) == (2, 1)


def test_what_cannot_be_recorded_is_an_error(audited: Library, tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    with pytest.raises(cubin_runtime.StoreError, match="the audit log cannot be written: Is a directory"):
        cubin_runtime.load("decode", library=audited)


FULL_DISK = """
import resource, sys
from pathlib import Path
from cubin_runtime.artifacts.audit_log import AuditLog
from cubin_runtime.errors import StoreError
log, room = AuditLog(Path(sys.argv[1])), int(sys.argv[2])
log.write("load", path="first")
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size + room, unlimited[1]))
try:
    log.write("load", path="torn")
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
log.write("load", path="last")
"""


@pytest.mark.parametrize("room", [0, 10])
def test_a_line_that_does_not_fit_on_the_disk_leaves_no_part_in_the_audit_log(tmp_path: Path, room: int) -> None:
    done = run_child(FULL_DISK, tmp_path / "audit.jsonl", room)
    assert "the audit log cannot be written: File too large" in done.stdout, done.stderr
    assert [line["path"] for line in lines_of(tmp_path / "audit.jsonl")] == ["first", "last"]


@pytest.mark.parametrize("in_store", [True, False])
def test_progress_of_a_verification_ends_with_the_number_of_files(
    release: Release, library: Library, tmp_path: Path, in_store: bool
) -> None:
    """Though two files were never fetched, and the pin does not state how many there are."""
    release.pin_file.write_text(release.pin_file.read_text().replace("files = 3", "files = 0"))
    cubin_runtime.fetch("made-1.0", match="*/decode*", library=library)
    tree = None if in_store else release.root
    sources = (str(release.root),) if in_store else ()
    config = Config(tmp_path / "store", sources=sources, pin_files=(release.pin_file,), offline=True)
    seen: list[tuple[int, int]] = []
    cubin_runtime.verify(
        "made-1.0",
        tree=tree,
        progress=lambda done, total: seen.append((done, total)),
        library=cubin_runtime.open_library(config),
    )
    assert seen[-1] == (3, 3)


def test_nothing_is_fetched_that_cannot_be_recorded(release: Release, tmp_path: Path) -> None:
    audit = tmp_path / "missing" / "audit.jsonl"
    config = Config(tmp_path / "store", (str(release.root),), (release.pin_file,), audit=audit)
    with pytest.raises(StoreError, match="the audit log cannot be written"):
        cubin_runtime.fetch("made-1.0", library=cubin_runtime.open_library(config))
    assert visible_files(tmp_path / "store") == [release.pin.manifest_sha256]
