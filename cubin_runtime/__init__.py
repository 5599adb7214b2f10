"""Fetch, verify and launch prebuilt attention kernels; nothing here needs a GPU, torch or libcuda at import."""

from ._version import __version__
from .config import Config
from .errors import CubinRuntimeError

__all__ = ["Config", "CubinRuntimeError", "__version__"]
