"""Where the commands of the pages run: names and addresses of the text are replaced by those of fixtures."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from tests.artifacts.flashinfer_wheel import artifacts_text, make_tree, make_wheel
from tests.artifacts.kernel_headers import header_of
from tests.artifacts.releases import Release, make_release
from tests.artifacts.serving import FaultyServer, serving
from tests.cli.native_release import explain_arguments
from tests.kernels.context_examples import KERNELS as CONTEXT_KERNELS
from tests.kernels.decode_kernels import HOPPER
from tests.kernels.mla_examples import KERNELS as MLA_KERNELS

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).with_name("stand_ins.sh")
KERNELS = ("fmhaSm100fKernel_A", "fmhaSm100fKernel_B", "fmhaSm103aKernel_C")


class Sandbox:
    """A folder with the command line on its PATH, two pinned releases behind a server, and an unpinned one.

    ``make``, ``pip``, ``python`` and ``tools/gpu_run.sh`` only check that what they are asked for exists.
    """

    def __init__(self, place: Path, server: FaultyServer, pins: list[Release], in_house: Release) -> None:
        self.place, self.server, self.in_house = place, server, in_house
        (place / "work" / "tools").mkdir(parents=True)
        (place / "bin").mkdir()
        # Not as the interpreter of a script: its path may hold spaces.
        run = "from cubin_runtime.cli import main; raise SystemExit(main())"
        self._program("bin/cubin-runtime", f'exec {shlex.quote(sys.executable)} -c {shlex.quote(run)} "$@"')
        for name in ("bin/make", "bin/pip", "bin/python", "work/tools/gpu_run.sh"):
            self._program(
                name, f'ROOT={shlex.quote(str(ROOT))}; . {shlex.quote(str(STAND_INS))}; as_{Path(name).stem} "$@"'
            )
        (place / "work" / "pins.toml").write_text("\n".join(pin.pin_file.read_text() for pin in pins))
        shutil.copy(place / "work" / "pins.toml", place / "pins.toml")
        self.explain = shlex.join(
            ["cubin-runtime", *explain_arguments(place / "native", (*HOPPER, *MLA_KERNELS, *CONTEXT_KERNELS))]
        )
        self.stores = 0

    def _program(self, name: str, text: str) -> None:
        (self.place / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.place / name).chmod(0o755)

    def fitted(self, text: str) -> str:
        for name, found in (
            ("trtllm-gen-0.6.13", "made-1.0"),
            ("trtllm-gen-0.6.18.post1", "made-1.1"),
            ("https://mirror.example/cubins", self.server.url),
            ("/mnt/shared", str(self.place / "shared")),
            ("/srv/www", str(self.place / "www")),
            ("IN_HOUSE_SHA256", self.in_house.pin.manifest_sha256),
            ("cubin-runtime explain", self.explain),
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
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def sandbox_in(place: Path) -> Iterator[Sandbox]:
    """A sandbox, and the server of its releases."""
    cubins = {f"{name}.cubin": name.encode() * 50 for name in KERNELS}
    files = {**cubins, HEADER_PATH: header_of(*KERNELS, mHeadDimQk="128", mHeadDimV="128")}
    served = place / "served"
    old = make_release(served, files, "made-1.0", "made-1.0/fmha")
    new = make_release(served, {**files, "new.cubin": b"new"}, "made-1.1", "made-1.1/fmha")
    in_house = make_release(served, {"own.cubin": b"own"}, "unused-1.0", "in-house/fmha")
    listed = artifacts_text(make_tree(served / "tree"))
    with serving(served / "tree") as server:
        sandbox = Sandbox(place, server, [old, new], in_house)
        make_wheel(place / "work", listed, "0.7.2.post1")
        yield sandbox
