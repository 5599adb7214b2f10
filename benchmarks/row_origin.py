"""What a row of a result was measured with: the digests of the cubins that it launched, and the commit. No torch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "BENCHMARKED_COMMIT"


def origin_of(*plans: Any) -> dict[str, Any]:
    """``cubins``, kernel -> sha256 of its cubin for all launches of operators' plans, and ``commit``."""
    cubins = {launch.kernel: launch.sha256 for plan in plans for launch in plan.launch_plans()}
    return {"cubins": cubins, "commit": commit()}


def origin_of_launches(driver: Any) -> dict[str, Any]:
    """``cubins`` and ``commit`` of the driver's last launches, where an engine holds no plan to ask."""
    return {"cubins": {launch.kernel: launch.sha256 for launch in driver.last_launches()}, "commit": commit()}


def origin_of_calls(driver: Any, *calls: Callable[[], object]) -> dict[str, Any]:
    """``cubins`` and ``commit`` of what the calls launch in this process, each at most as much as the driver keeps."""
    cubins: dict[str, str] = {}
    for call in calls:
        before = driver.launches
        call()
        if count := driver.launches - before:
            cubins |= {launch.kernel: launch.sha256 for launch in driver.last_launches()[-count:]}
    return {"cubins": cubins, "commit": commit()}


@cache
def commit() -> str:
    """The commit of the sources: what ``BENCHMARKED_COMMIT`` says, where they are no clone, else git's answer."""
    if stated := os.environ.get(COMMIT_VARIABLE):
        return stated
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def keep(result: Mapping[str, Any], path: Path) -> None:
    """Write what was measured until now, so that whatever ends the run costs no row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
