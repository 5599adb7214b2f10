from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from releases import Release, make_release
from serving import FaultyServer, serving


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return make_release(tmp_path)


@pytest.fixture
def server(release: Release, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    with serving(release.root) as running:
        yield running


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that an ordinary user can reach, which pytest's own are not."""
    place = Path(tempfile.mkdtemp(prefix="cubin-runtime-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"
