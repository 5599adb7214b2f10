"""Mirrors and collections that are killed at any moment: nothing wrong stands under its name, and a rerun completes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.releases.export import mirror
from cubin_runtime.artifacts.releases.gc import collect
from cubin_runtime.config import Config
from tests.artifacts.children import PACKAGE_ROOT
from tests.artifacts.releases import Release, make_release, sha256

KILLS = 4
PREPARE = """
import sys
from pathlib import Path
from cubin_runtime.artifacts.releases.gc import collect
from cubin_runtime.artifacts.releases.export import export_zip, mirror
from cubin_runtime.artifacts.library import Library
from cubin_runtime.config import Config
place = Path(sys.argv[1])
library = Library(Config(place / "store", ("/nowhere",), tuple(map(Path, sys.argv[2:]))))
old, new = library.pins.get("old-1.0"), library.pins.get("new-1.0")
chosen = [(pin, tuple(library.manifest(pin).digests)) for pin in (old, new)]
print("ready", flush=True)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Release, Release]:
    """Two releases of 300 files, half of which they share."""
    place = tmp_path_factory.mktemp("two")
    chance = random.Random(7)
    data = [chance.randbytes(20_000) for _ in range(450)]
    old = {f"{number}.cubin": data[number] for number in range(300)}
    new = {f"{number}.cubin": data[number] for number in range(150, 450)}
    return (
        make_release(place / "old", old, "old-1.0", "old/fmha"),
        make_release(place / "new", new, "new-1.0", "new/fmha"),
    )


def library_of(place: Path, two: tuple[Release, Release], *, sources: bool) -> Library:
    roots = tuple(str(one.root) for one in two) if sources else ("/nowhere",)
    return Library(Config(place / "store", roots, tuple(one.pin_file for one in two)))


def fill(place: Path, two: tuple[Release, Release]) -> None:
    for one in two:
        library_of(place, two, sources=True).fetch(one.pin)


def kill_during(action: str, place: Path, two: tuple[Release, Release], after: float) -> None:
    command = [sys.executable, "-c", PREPARE + action, str(place), *(str(one.pin_file) for one in two)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    time.sleep(after)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()


def moments(longest: float) -> list[float]:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    return [chance.uniform(0, longest) for _ in range(KILLS)]


def wrong_files(tree: Path, two: tuple[Release, Release]) -> list[str]:
    """Files under a name of theirs whose bytes are not those of the release."""
    right = {one.path(name).text: digest for one in two for name, digest in digests(one).items()}
    found = [file for file in tree.rglob("*") if file.is_file() and not file.name.startswith(".tmp-")]
    names = {file.relative_to(tree).as_posix(): sha256(file.read_bytes()) for file in found}
    return [name for name, digest in names.items() if right[name] != digest]


def digests(release: Release) -> dict[str, str]:
    return {**{name: release.digest(name) for name in release.files}, "checksums.txt": release.pin.manifest_sha256}


def test_a_mirror_killed_at_any_moment_holds_nothing_wrong_and_goes_on(
    two: tuple[Release, Release], tmp_path: Path
) -> None:
    fill(tmp_path, two)
    for after in moments(0.15):
        kill_during("mirror(library, chosen, place / 'www')", tmp_path, two, after)
        assert wrong_files(tmp_path / "www", two) == []
    library = library_of(tmp_path, two, sources=False)
    mirror(library, [(one.pin, tuple(library.manifest(one.pin).digests)) for one in two], tmp_path / "www")
    for one in two:
        assert library.verify(one.pin, tree=str(tmp_path / "www"), complete=True).missing == ()


def test_an_export_killed_at_any_moment_shows_a_whole_archive_or_none(
    two: tuple[Release, Release], tmp_path: Path
) -> None:
    fill(tmp_path, two)
    library = library_of(tmp_path, two, sources=False)
    for after in moments(0.05):
        kill_during("export_zip(library, chosen, place / 'x.zip')", tmp_path, two, after)
        archives = [str(file) for file in tmp_path.glob("*.zip")]
        reports = [library.verify(one.pin, tree=archive, complete=True) for one in two for archive in archives]
        assert [report.codes for report in reports if report.codes] == []


def test_a_collection_killed_at_any_moment_leaves_the_other_release_whole_and_goes_on(
    two: tuple[Release, Release], tmp_path: Path
) -> None:
    old, new = two
    for after in moments(0.1):
        fill(tmp_path, two)
        kill_during("collect(library, [old])", tmp_path, two, after)
        assert library_of(tmp_path, two, sources=False).verify(new.pin, complete=True).codes == ()
    library = library_of(tmp_path, two, sources=False)
    collect(library, [old.pin])
    assert library.store.present(digests(old).values()) <= set(digests(new).values())
    assert library.verify(new.pin, complete=True).codes == ()
