"""What a recorder of forms wrote below a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def definitions(folder: Path) -> list[dict[str, Any]]:
    """All definitions, by the names of their files."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("definitions/*/*.json"))]


def workloads(folder: Path) -> list[dict[str, Any]]:
    """All workloads, by the names of their files and in their order."""
    paths = sorted(folder.glob("workloads/*/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
