from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that an ordinary user can reach, which pytest's own are not."""
    place = Path(tempfile.mkdtemp(prefix="cubin-runtime-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)
