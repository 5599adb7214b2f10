"""The package's driver for tests, by the name that tests know it by."""

from __future__ import annotations

from cubin_runtime.testing.graph_driver import CAPTURE_MODES, PROTOTYPES
from cubin_runtime.testing.graph_driver import GraphDriver as ExtendedDriver

__all__ = ["CAPTURE_MODES", "PROTOTYPES", "ExtendedDriver"]
