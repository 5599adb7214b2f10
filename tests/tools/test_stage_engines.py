"""What is unpacked of an engine's wheel for the tests of the plug-ins."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tools.stage_engines import unpack


def test_only_compiled_parts_of_a_wheel_are_left_out(tmp_path: Path) -> None:
    kept = {"engine/__init__.py", "engine/jit/csrc/store.cuh", "engine-1.0.dist-info/METADATA"}
    with zipfile.ZipFile(tmp_path / "engine-1.0-py3-none-any.whl", "w") as wheel:
        for name in (*kept, "engine/_C.abi3.so", "engine/lib/libparts.a"):
            wheel.writestr(name, "")
    unpack(tmp_path / "engine-1.0-py3-none-any.whl", tmp_path / "engine-1.0")
    files = [path for path in (tmp_path / "engine-1.0").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "engine-1.0").as_posix() for path in files} == kept
