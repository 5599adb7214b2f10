from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from kernels_src.publishing import publish, serve
from kernels_src.release import write_release


def test_a_published_release_is_a_copy_under_its_name(tmp_path: Path) -> None:
    release = write_release(tmp_path / "build", "hopper-0.0.1", {"fmha/a.cubin": b"a"}, [])
    target = publish(release.folder, tmp_path)
    assert target == tmp_path / "hopper-0.0.1"
    assert (target / "fmha/a.cubin").read_bytes() == b"a"


def test_publishing_the_same_release_again_is_no_error(tmp_path: Path) -> None:
    release = write_release(tmp_path / "build", "hopper-0.0.1", {"fmha/a.cubin": b"a"}, [])
    assert publish(release.folder, tmp_path) == publish(release.folder, tmp_path)


def test_another_release_of_the_same_name_is_refused(tmp_path: Path) -> None:
    publish(write_release(tmp_path / "one", "hopper-0.0.1", {"fmha/a.cubin": b"a"}, []).folder, tmp_path)
    other = write_release(tmp_path / "other", "hopper-0.0.1", {"fmha/a.cubin": b"b"}, [])
    with pytest.raises(FileExistsError, match="another release of that name"):
        publish(other.folder, tmp_path)
    assert (tmp_path / "hopper-0.0.1/fmha/a.cubin").read_bytes() == b"a"


def test_a_served_folder_gives_its_files_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served/a.txt").write_text("a")
    (tmp_path / "secret.txt").write_text("s")
    with serve(tmp_path / "served") as url:
        assert url.startswith("http://127.0.0.1:")
        with urlopen(f"{url}/a.txt") as answer:
            assert answer.read() == b"a"
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}/../secret.txt")
