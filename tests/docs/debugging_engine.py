"""A program that decodes on the host in a device's place, for docs/debugging.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.testing import StandIn
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.decode_device import DeviceCase, on_device
from tests.gpu.rehearsed_decode import RehearsalRuntime, rehearsal

NAMES = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "out", "lse")


class Engine:
    """One decode, made over and over."""

    def __init__(self, here: DeviceCase) -> None:
        self.here = here
        self.plan = here.plan
        self.tensors = dict(zip(NAMES, here.tensors, strict=True))

    def step(self) -> None:
        self.here.run()

    def names(self) -> dict[str, Any]:
        """What the page's blocks call things."""
        return {"engine": self, "plan": self.plan, "runtime": self.here.runtime, **self.tensors}


@contextmanager
def engine_on(library: Path, store: Path) -> Iterator[Engine]:
    """The program on the stand-in driver at ``library``."""
    with rehearsal(library, store) as runtime:
        yield from _engine(runtime)


def _engine(runtime: RehearsalRuntime) -> Iterator[Engine]:
    case = DecodeCase((65, 1, 200), 256, with_lse=False)
    with on_device(runtime, case, np.random.default_rng(1)) as here:
        yield Engine(here)


def main() -> None:
    """What ``serve.py`` runs: a runtime of the environment's, and a step."""
    library, store = map(Path, sys.argv[1:])
    StandIn(library).reset()
    with engine_on(library, store) as engine:
        Runtime(Config.from_environment(), driver=engine.here.driver)
        engine.step()


if __name__ == "__main__":
    main()
