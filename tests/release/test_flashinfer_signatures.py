"""The table of FlashInfer's signatures is what its wheels say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.derive_flashinfer_signatures import TABLE, signatures_of

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]


@pytest.mark.parametrize("version", ["0.6.13", "0.7.4"])
def test_the_table_agrees_with_the_wheel(version: str, flashinfer_wheel: Callable[[str], Path]) -> None:
    assert json.loads(TABLE.read_text())[version] == signatures_of(flashinfer_wheel(version))
