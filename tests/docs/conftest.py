from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.sandbox import Sandbox, sandbox_in


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox_in(tmp_path) as made:
        yield made
