"""Examples on the first GPU, or on the stand-in driver where there is none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import CubinRuntimeError, MissingError
from .device import Device, missing_device
from .graph_driver import GraphDriver
from .requirements import stop
from .standin import StandIn, build_standin
from .standin_device import StandInDevice


def on_first_device(main: Callable[[Device], None]) -> None:
    """Run an example on the first GPU, with a default runtime that uses its driver.

    Without a GPU it runs on the stand-in driver, as an H200: everything up to the launches happens, launches are
    checked and recorded, and kernels compute nothing.

    Raises:
        SystemExit: there is neither a GPU nor what the stand-in is built from, or the kernels are not available; the
            error stream has the message and what to do, and the exit code is that of the command line.
    """
    from ..attention import Runtime, set_default_runtime

    driver = GraphDriver()
    try:
        if why := missing_device(driver):
            _on_standin(main, why.removeprefix("needs a CUDA device: "))
            return
        with Device(driver) as device:
            set_default_runtime(Runtime(driver=driver))
            main(device)
    except CubinRuntimeError as error:
        stop(error)


def _on_standin(main: Callable[[Device], None], why: str) -> None:
    from ..attention import Runtime, set_default_runtime

    with tempfile.TemporaryDirectory(prefix="cubin-runtime-") as folder:
        try:
            standin = StandIn(build_standin(Path(folder)))
        except FileNotFoundError as error:
            need = "a C compiler, and the header that pip install 'cubin-runtime[examples]' brings"
            stop(MissingError(f"no GPU: {why}\n  and no stand-in driver, which needs {need}: {error}"))
        standin.reset()
        print("no GPU: launches go to a stand-in driver, which checks and records them and computes nothing")
        with StandInDevice(standin) as device:
            runtime = Runtime(driver=device.driver)
            with suppress(CubinRuntimeError):  # a test that needs kernels says itself that there are none
                for kernel in runtime.native_release().kernels:
                    standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
            set_default_runtime(runtime)
            main(device)
