from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kernels_src.build import BuildError, build
from kernels_src.release import Release
from kernels_src.toolchain import Toolchain
from tests.kernels_src.stub_kernels import LAYOUT, stub, write_source


def test_each_command_compiles_its_source_to_the_cubin_of_the_release(
    tmp_path: Path, toolchain: Toolchain, stub_release: Release
) -> None:
    commands = json.loads((stub_release.folder.parent / "compile_commands.json").read_text())
    assert len(commands) == 2
    for number, command in enumerate(commands):
        assert Path(command["file"]).is_file()
        cubin = tmp_path / f"{number}.cubin"
        arguments = [str(cubin) if word == command["output"] else word for word in command["arguments"]]
        environment = toolchain.environment()
        subprocess.run(arguments, cwd=command["directory"], env=environment, check=True, capture_output=True)
        assert cubin.read_bytes() == Path(command["output"]).read_bytes()


def test_commands_and_headers_outlive_a_failed_build(tmp_path: Path, toolchain: Toolchain) -> None:
    write_source(tmp_path / "sources", "nonsense")
    with pytest.raises(BuildError):
        build(tmp_path / "out", (stub(),), {LAYOUT.name: LAYOUT}, toolchain, sources=tmp_path / "sources")
    [command] = json.loads((tmp_path / "out" / "compile_commands.json").read_text())
    include = Path(command["arguments"][command["arguments"].index("-I") + 1])
    assert (include / "ScaleParams.h").read_text() == LAYOUT.c_declaration()
