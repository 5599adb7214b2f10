from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.artifacts.releases import Release, make_release
from tests.artifacts.serving import FaultyServer, serving
from tests.artifacts.tls import make_tls


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


@pytest.fixture
def tls_server(release: Release, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    context = make_tls(tmp_path, monkeypatch)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server
