"""A device of the stand-in driver, which takes any cubin and is whatever the stand-in poses as."""

from __future__ import annotations

from typing import Any

from ..launch.driver import DeviceFacts
from .cubin_under_test import CubinUnderTest
from .device import Device
from .graph_driver import GraphDriver
from .standin import StandIn


class _PosingDriver(GraphDriver):
    """The driver, which asks for a device's facts each time: the stand-in may pose as another one between two calls."""

    def device(self, ordinal: int = 0) -> DeviceFacts:
        self._devices.clear()
        return super().device(ordinal)


class StandInDevice(Device):
    """Arrays in the memory of the host; launches are gated and recorded, and kernels do nothing."""

    def __init__(self, standin: StandIn) -> None:
        super().__init__(_PosingDriver(standin.path), computes=False)
        self.standin = standin
        self._known: set[tuple[str, str]] = set()

    def launch(self, cubin: CubinUnderTest, **how: Any) -> None:
        """As ``Device.launch``; the stand-in is told of the cubin's kernel first."""
        if (cubin.cubin.sha256, cubin.symbol) not in self._known:
            self._known.add((cubin.cubin.sha256, cubin.symbol))
            self.standin.add_cubin(cubin)
        super().launch(cubin, **how)

    def launched(self, cubin: CubinUnderTest) -> dict[str, Any]:
        """The fields of the parameter struct that the only launch so far sent; addresses are numbers."""
        sent = self.standin.call("cuLaunchKernelEx")["parameter0"]
        return cubin.struct.unpack(bytes.fromhex(sent))
