"""A small release of made-up kernels of ours, used in place from a directory, and what ``explain`` says of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime import cli
from cubin_runtime._version import KERNELS_VERSION
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.cli.json_schema import schema_of
from tests.cli.json_shape import misfits

FOLDER = "ours-1"


def explain_arguments(home: Path, kernels: Iterable[NativeKernel]) -> list[str]:
    """What every call takes: the release in place, its pin, and a store that is not there."""
    folder = home / "tree" / FOLDER
    folder.mkdir(parents=True)
    entries = [entry_of(kernel) for kernel in kernels]
    table = json.dumps({"schema": 1, "release": FOLDER, "kernels": entries}).encode()
    (folder / "kernels.json").write_bytes(table)
    manifest = f"{hashlib.sha256(table).hexdigest()}  kernels.json\n".encode()
    (folder / "checksums.txt").write_bytes(manifest)
    pins = home / "pins.toml"
    pins.write_text(
        f'[[pin]]\nname = "ours"\npath = "{FOLDER}"\nmanifest_sha256 = "{hashlib.sha256(manifest).hexdigest()}"\n'
        f'files = 1\nbytes = {len(table)}\nmax_file_bytes = 1048576\nabi = "hopper-{KERNELS_VERSION}"\n'
        'licence = "Apache-2.0"\nsources = []\n'
    )
    where = ["--source", str(home / "tree"), "--pins", str(pins), "--store", str(home / "store"), "--offline"]
    return ["explain", "--release", "ours", *where]


def entry_of(kernel: NativeKernel) -> dict[str, Any]:
    return {field.name: getattr(kernel, field.name) for field in fields(kernel)} | {"traits": dict(kernel.traits)}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def record(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run(capsys, *arguments, "--json"))
    assert misfits(told, schema_of("explain")) == []
    return told
