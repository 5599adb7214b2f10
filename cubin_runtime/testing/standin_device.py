"""A device of the stand-in driver, which takes any cubin and has the compute capability that was set."""

from __future__ import annotations

from typing import Any

from ..launch.driver import DeviceFacts
from .cubin_under_test import CubinUnderTest
from .device import Device
from .graph_driver import GraphDriver
from .standin import StandIn


class _PosingDriver(GraphDriver):
    """A driver that queries a device's facts each time, since tests may change the stand-in between calls."""

    def device(self, ordinal: int = 0) -> DeviceFacts:
        self._devices.clear()
        return super().device(ordinal)


class StandInDevice(Device):
    """Arrays in the memory of the host; launches are gated and recorded, and kernels do nothing."""

    def __init__(self, standin: StandIn) -> None:
        super().__init__(_PosingDriver(standin.path), computes=False)
        self.standin = standin
        self._kernels: set[tuple[str, str]] = set()

    def launch(self, cubin: CubinUnderTest, **how: Any) -> None:
        """As ``Device.launch``; adds the cubin's kernel to the stand-in first."""
        if (cubin.cubin.sha256, cubin.symbol) not in self._kernels:
            self._kernels.add((cubin.cubin.sha256, cubin.symbol))
            self.standin.add_cubin(cubin)
        super().launch(cubin, **how)

    def launched(self, cubin: CubinUnderTest) -> dict[str, Any]:
        """The fields of the parameter struct that the only launch so far sent; addresses are numbers."""
        sent = self.standin.call("cuLaunchKernelEx")["parameter0"]
        return cubin.struct.unpack(bytes.fromhex(sent))
