from __future__ import annotations

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
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"
