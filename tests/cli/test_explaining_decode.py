"""``explain`` on a small release of made-up decode kernels of ours, used in place from a directory."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from decode_kernels import HOPPER, PORTABLE

from cubin_runtime import __version__, cli

FOLDER = "ours-1"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """What every call takes: the release in place, its pin, and a store that is not there."""
    folder = tmp_path / "tree" / FOLDER
    folder.mkdir(parents=True)
    kernels = [{**asdict_of(kernel), "traits": dict(kernel.traits)} for kernel in (*PORTABLE, *HOPPER)]
    table = json.dumps({"schema": 1, "release": FOLDER, "kernels": kernels}).encode()
    (folder / "kernels.json").write_bytes(table)
    manifest = f"{hashlib.sha256(table).hexdigest()}  kernels.json\n".encode()
    (folder / "checksums.txt").write_bytes(manifest)
    pins = tmp_path / "pins.toml"
    pins.write_text(
        f'[[pin]]\nname = "ours"\npath = "{FOLDER}"\nmanifest_sha256 = "{hashlib.sha256(manifest).hexdigest()}"\n'
        f'files = 1\nbytes = {len(table)}\nmax_file_bytes = 1048576\nabi = "hopper-{__version__}"\n'
        'licence = "Apache-2.0"\nsources = []\n'
    )
    where = ["--source", str(tmp_path / "tree"), "--pins", str(pins), "--store", str(tmp_path / "store"), "--offline"]
    return ["explain", "--release", "ours", *where]


def asdict_of(kernel: Any) -> dict[str, Any]:
    return {name: getattr(kernel, name) for name in kernel.__dataclass_fields__}
