"""Stores and sources as operators lay them: filled by one user and read by another, read-only, without a network."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from cubin_runtime.artifacts.store.store import Store
from tests.artifacts.children import EVERYTHING, needs_mounts, run_child
from tests.artifacts.releases import Release, make_release, visible_files, zip_tree

NAME = "fmha/prefill.cubin"
VERBS = """
import sys
from cubin_runtime.cli import main
store, pins, source, *verbs = sys.argv[1:]
common = ["--store", store, "--pins", pins, "--source", source]
for verb in verbs:
    print(verb, "->", main([*verb.split(), *common]))
"""
# a socket to anywhere but this machine's own processes ends the process, so that nobody can swallow the error
NO_SOCKETS = """
import os, socket, sys
def refuse(event, arguments):
    if event == "socket.__new__" and arguments[1] in (socket.AF_INET, socket.AF_INET6) or event in NAMES:
        os.write(2, f"a socket was opened: {event} {arguments}".encode())
        os._exit(99)
NAMES = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
sys.addaudithook(refuse)
"""


@pytest.fixture
def no_sockets(tmp_path: Path) -> str:
    """Source that sets the hook in a child, and in the processes that the child starts."""
    (tmp_path / "sitecustomize.py").write_text(NO_SOCKETS)
    inherit = f"import os; os.environ['PYTHONPATH'] = '{tmp_path}' + os.pathsep + os.environ['PYTHONPATH']\n"
    return inherit + NO_SOCKETS


@pytest.fixture
def release(open_place: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    for name in ("SOURCES", "OFFLINE", "PINS", "PIN_KEYS", "CACHE"):
        monkeypatch.delenv(f"CUBIN_RUNTIME_{name}", raising=False)
    return make_release(open_place)


@pytest.fixture
def store(open_place: Path) -> Path:
    return open_place / "store"


def fill(release: Release, store: Path, umask: int = 0o022) -> None:
    before = os.umask(umask)
    try:
        release.library(store, release.root).fetch(release.pin)
    finally:
        os.umask(before)


def outcomes(release: Release, store: Path, source: object, *verbs: str, **how: object) -> list[str]:
    """``VERB -> CODE`` for each verb, run in one child."""
    how.setdefault("before", EVERYTHING)
    done = run_child(VERBS, store, release.pin_file, source, *verbs, **how)  # type: ignore[arg-type]
    found = re.findall(r"^.+ -> \d+$", done.stdout, re.MULTILINE)
    assert len(found) == len(verbs), done.stdout + done.stderr
    return found


def test_a_store_filled_by_root_is_read_by_an_ordinary_user(release: Release, store: Path) -> None:
    fill(release, store)
    verbs = ("verify made-1.0 --complete", "fetch made-1.0", f"where {release.path(NAME)}")
    assert outcomes(release, store, "/nowhere", *verbs, as_user=True) == [f"{verb} -> 0" for verb in verbs]


def test_an_ordinary_user_loads_from_a_store_that_root_filled(release: Release, store: Path) -> None:
    fill(release, store)
    body = """
    import os, sys
    from pathlib import Path
    from cubin_runtime.artifacts.library import Library
    from cubin_runtime.config import Config
    library = Library(Config(Path(sys.argv[1]), ("/nowhere",), (Path(sys.argv[2]),)))
    print(os.getuid(), library.load(sys.argv[3], fetch=True).sha256)
    """
    done = run_child(body, store, release.pin_file, release.path(NAME), as_user=True)
    assert done.stdout == f"65534 {release.digest(NAME)}\n", done.stderr


def test_no_umask_of_the_filling_user_hides_an_object(release: Release, store: Path) -> None:
    """Folders follow the umask, as everywhere; the objects themselves are open to all who get that far."""
    fill(release, store, umask=0o077)
    assert stat.S_IMODE(Store(store).object_path(release.digest(NAME)).stat().st_mode) == 0o444


def test_a_store_that_an_ordinary_user_may_not_read_is_passed_over(release: Release, open_place: Path) -> None:
    closed = open_place / "closed"
    closed.mkdir(0o700)
    body = """
    import sys
    from pathlib import Path
    from cubin_runtime.artifacts.library import Library
    from cubin_runtime.config import Config
    store, pins, source, path = sys.argv[1:]
    print(Library(Config(Path(store), (source,), (Path(pins),))).load(path, fetch=False).origin)
    """
    done = run_child(body, closed / "store", release.pin_file, release.root, release.path(NAME), as_user=True)
    assert done.stdout == f"{release.root}\n", done.stderr


def test_a_home_of_another_user_does_no_harm(
    release: Release, store: Path, open_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container whose user has root's HOME."""
    (open_place / "root").mkdir(0o700)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(open_place / "root"))
    fill(release, store)
    verbs = ("verify made-1.0 --complete", "doctor")
    assert outcomes(release, store, "/nowhere", *verbs, as_user=True) == [f"{verb} -> 0" for verb in verbs]


def test_layers_that_are_read_only_and_complete_serve_every_verb(
    release: Release, store: Path, open_place: Path
) -> None:
    needs_mounts()
    fill(release, store)
    archive = zip_tree(release.root, open_place / "made.zip")
    mounts = f"mount --bind {open_place} {open_place}; mount -o remount,bind,ro {open_place}"
    verbs = (
        "fetch made-1.0",
        "verify made-1.0 --complete",
        "verify made-1.0 --complete --repair",
        "list made-1.0",
        f"where {release.path(NAME)}",
        "doctor",
        "gc made-1.0 --dry-run",
        "diff made-1.0 made-1.0",
    )
    assert outcomes(release, store, archive, *verbs, mounts=mounts) == [f"{verb} -> 0" for verb in verbs]


def test_a_read_only_store_that_lacks_a_file_is_code_8_for_fetch_alone(release: Release, store: Path) -> None:
    needs_mounts()
    release.library(store, release.root).fetch(release.pin, [release.path("kernels.bin")])
    mounts = f"mount --bind {store} {store}; mount -o remount,bind,ro {store}"
    verbs = ("fetch made-1.0", f"where {release.path(NAME)}", "verify made-1.0")
    found = outcomes(release, store, release.root, *verbs, mounts=mounts)
    assert found == [f"{verb} -> {code}" for verb, code in zip(verbs, (8, 0, 0), strict=True)]


def test_a_read_only_package_or_tree_is_loaded_from_in_place(release: Release, open_place: Path) -> None:
    needs_mounts()
    mounts = f"mount --bind {open_place} {open_place}; mount -o remount,bind,ro {open_place}"
    body = """
    import sys
    from pathlib import Path
    from cubin_runtime.artifacts.library import Library
    from cubin_runtime.config import Config
    store, pins, source, path = sys.argv[1:]
    print(Library(Config(Path(store), (source,), (Path(pins),))).load(path, fetch=True).sha256)
    """
    arguments = (open_place / "store", release.pin_file, release.root, release.path(NAME))
    assert run_child(body, *arguments, mounts=mounts).stdout == f"{release.digest(NAME)}\n"


def test_offline_no_verb_opens_a_socket(
    release: Release, store: Path, open_place: Path, no_sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "1")
    archive = zip_tree(release.root, open_place / "made.zip")
    verbs = (
        "fetch made-1.0",
        "verify made-1.0 --complete --repair",
        "list made-1.0",
        f"where {release.path(NAME)}",
        "doctor",
        f"export made-1.0 --out {open_place}/out.zip",
        f"mirror made-1.0 --out {open_place}/www",
        "diff made-1.0 made-1.0",
        "gc made-1.0 --temps",
    )
    found = outcomes(release, store, archive, *verbs, before=no_sockets)
    assert found == [f"{verb} -> 0" for verb in verbs]


def test_offline_a_server_is_refused_without_a_socket(
    release: Release, store: Path, no_sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "1")
    verbs = ("fetch made-1.0", "list made-1.0", "diff made-1.0 made-1.0", f"where {release.path(NAME)}")
    found = outcomes(release, store, "http://127.0.0.1:9/", *verbs, before=no_sockets)
    assert found == [f"{verb} -> {code}" for verb, code in zip(verbs, (7, 7, 7, 7), strict=True)]


def test_the_hook_that_refuses_sockets_does_refuse_them(release: Release, store: Path, no_sockets: str) -> None:
    arguments = (store, release.pin_file, "http://127.0.0.1:9/", "fetch made-1.0")
    done = run_child(VERBS, *arguments, before=no_sockets)
    assert (done.returncode, done.stdout) == (99, "")
    assert "a socket was opened: socket.__new__" in done.stderr


def test_a_store_that_may_not_be_searched_is_told_and_never_a_traceback(release: Release, open_place: Path) -> None:
    closed = open_place / "closed"
    store = closed / "store"
    fill(release, store)
    closed.chmod(0o700)
    verbs = ("doctor", "verify made-1.0 --complete", "fetch made-1.0", "gc made-1.0", "gc --temps", "list made-1.0")
    found = outcomes(release, store, release.root, *verbs, as_user=True)
    assert found == [f"{verb} -> {code}" for verb, code in zip(verbs, (0, 8, 8, 8, 8, 0), strict=True)]


def test_gc_keeps_what_a_release_needs_whose_manifest_lies_in_a_folder_of_another_user(
    release: Release, store: Path, open_place: Path
) -> None:
    other = make_release(open_place / "other", {"more.cubin": b"more", **release.files}, "other-1.0", "other/fmha")
    for one in (release, other):
        fill(one, store, umask=0)
    Store(store).object_path(other.pin.manifest_sha256).parent.chmod(0o700)
    before = visible_files(store)
    verb = f"gc made-1.0 --pins {other.pin_file}"
    assert outcomes(release, store, "/nowhere", verb, as_user=True) == [f"{verb} -> 8"]
    assert visible_files(store) == before


def test_folders_of_another_user_are_no_empty_ones(release: Release, store: Path, open_place: Path) -> None:
    """One in a tree may hold what no manifest lists, one that is given to FlashInfer may hold a release."""
    fill(release, store)
    for closed in (release.root / release.pin.path.text / "more", open_place / "served" / "made"):
        closed.mkdir(0o700, parents=True)
    verb = f"verify made-1.0 --tree {release.root}"
    assert outcomes(release, store, "/nowhere", verb, as_user=True) == [f"{verb} -> 7"]
    body = "import sys; from cubin_runtime.cli import main; sys.exit(main(['flashinfer-env', sys.argv[1]]))"
    done = run_child(body, open_place / "served", as_user=True, before=EVERYTHING)
    assert (done.returncode, "made: cannot be read: Permission denied" in done.stderr) == (8, True), done.stderr
