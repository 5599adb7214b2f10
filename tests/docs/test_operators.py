"""The commands of docs/operators.md, run: names, addresses and places of the text are put in for those of a sandbox."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flashinfer_wheel import artifacts_text, make_tree, make_wheel
from kernel_headers import header_of
from releases import Release, make_release, visible_files
from serving import FaultyServer, serving

from cubin_runtime.artifacts.tables.metadata import HEADER_PATH

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operators.md").read_text()
KERNELS = ("fmhaSm100fKernel_A", "fmhaSm100fKernel_B", "fmhaSm103aKernel_C")


def sections() -> dict[str, str]:
    parts = re.split(r"^#{2,3} (.+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


WITH_COMMANDS = [name for name, text in sections().items() if blocks(text, "sh")]


class Sandbox:
    """A folder with the command line on its PATH, two pinned releases behind a server, and an unpinned one."""

    def __init__(self, place: Path, server: FaultyServer, pins: list[Release], in_house: Release) -> None:
        self.place, self.server, self.in_house = place, server, in_house
        (place / "work").mkdir()
        (place / "bin").mkdir()
        script = place / "bin" / "cubin-runtime"
        # Not as the interpreter of a script: its path may hold spaces.
        run = "from cubin_runtime.cli import main; raise SystemExit(main())"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(run)} "$@"\n')
        script.chmod(0o755)
        (place / "work" / "pins.toml").write_text("\n".join(pin.pin_file.read_text() for pin in pins))
        shutil.copy(place / "work" / "pins.toml", place / "pins.toml")
        self.stores = 0

    def fitted(self, text: str) -> str:
        for name, found in (
            ("trtllm-gen-0.6.13", "made-1.0"),
            ("trtllm-gen-0.6.14", "made-1.1"),
            ("https://mirror.example/cubins", self.server.url),
            ("/mnt/shared", str(self.place / "shared")),
            ("/srv/www", str(self.place / "www")),
            ("IN_HOUSE_SHA256", self.in_house.pin.manifest_sha256),
        ):
            text = text.replace(name, found)
        return text

    def new_store(self) -> Path:
        self.stores += 1
        return self.place / f"store-{self.stores}"

    def run(self, script: str, store: Path, **variables: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUBIN_RUNTIME_")}
        home = str(self.place / "home")
        environment = {
            **kept,
            "PATH": f"{self.place / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            **dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"), home),
            "CUBIN_RUNTIME_CACHE": str(store),
            "CUBIN_RUNTIME_PINS": str(self.place / "pins.toml"),
            "CUBIN_RUNTIME_SOURCES": self.server.url,
            **variables,
        }
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", self.fitted(script)],
            cwd=self.place / "work",
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    cubins = {f"{name}.cubin": name.encode() * 50 for name in KERNELS}
    header = header_of(*KERNELS, mHeadDimQk="128", mHeadDimV="128")
    files = {**cubins, HEADER_PATH: header}
    served = tmp_path / "served"
    old = make_release(served, files, "made-1.0", "made-1.0/fmha")
    new = make_release(served, {**files, "new.cubin": b"new"}, "made-1.1", "made-1.1/fmha")
    in_house = make_release(served, {"own.cubin": b"own"}, "unused-1.0", "in-house/fmha")
    listed = artifacts_text(make_tree(served / "tree"))
    with serving(served / "tree") as server:
        sandbox = Sandbox(tmp_path, server, [old, new], in_house)
        make_wheel(tmp_path / "work", listed, "0.7.2.post1")
        yield sandbox


@pytest.mark.parametrize("section", WITH_COMMANDS)
def test_the_commands_of_a_section_succeed_in_their_order(sandbox: Sandbox, section: str) -> None:
    found = blocks(sections()[section], "sh")
    if any(block.startswith("openssl") for block in found):
        pytest.importorskip("cryptography")
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl here")
    for block in found:
        sandbox.run(block, sandbox.new_store())


def test_the_image_is_built_and_serves_without_a_network(sandbox: Sandbox) -> None:
    (dockerfile,) = blocks(TEXT, "dockerfile")
    commands = re.findall(r"^RUN (cubin-runtime .+)$", dockerfile, re.MULTILINE)
    assert len(commands) == 2
    store = sandbox.new_store()
    sandbox.run("\n".join(commands), store)
    sandbox.run(commands[-1], store, CUBIN_RUNTIME_OFFLINE="1", CUBIN_RUNTIME_SOURCES="/nowhere")


def test_the_init_container_fills_an_empty_dir_that_serves_without_a_network(sandbox: Sandbox) -> None:
    (manifest,) = blocks(TEXT, "yaml")
    (command,) = re.findall(r"command: (\[.+\])", manifest)
    words = json.loads(command)
    store = sandbox.new_store()
    store.mkdir()
    store.chmod(0o777)
    sandbox.run(" ".join(words), store)
    sandbox.run(" ".join(words), store)
    words[1] = "verify"
    offline = {"CUBIN_RUNTIME_OFFLINE": "1", "CUBIN_RUNTIME_SOURCES": "/nowhere"}
    shown = sandbox.run(" ".join([*words, "--complete"]), store, **offline)
    assert "3 files verified" in shown


def test_an_import_across_the_gap_brings_every_file(sandbox: Sandbox) -> None:
    first, second = blocks(sections()["Across an air gap"], "sh")
    sandbox.run(first, sandbox.new_store())
    before = len(sandbox.server.targets)
    store = sandbox.new_store()
    sandbox.run(second, store)
    assert (len(visible_files(store)), len(sandbox.server.targets)) == (5, before)


def test_every_verb_that_the_page_names_exists(sandbox: Sandbox) -> None:
    named = set(re.findall(r"^cubin-runtime ([a-z]+)", "\n".join(blocks(TEXT, "sh")), re.MULTILINE))
    shown = sandbox.run("cubin-runtime --help", sandbox.new_store())
    assert {verb for verb in named if not re.search(rf"\b{verb}\b", shown)} == set()


def test_every_command_in_a_block_of_another_kind_is_known_here() -> None:
    kinds = set(re.findall(r"^```([a-z]+)$", TEXT, re.MULTILINE))
    assert kinds == {"sh", "dockerfile", "yaml", "nginx"}
