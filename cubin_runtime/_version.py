"""The version of the package, alone so that the build can read it."""

__version__ = "0.2.0"
# Of the native release that is launched by default. It changes when the kernels do, not with every version: its name is
# in the pin, in artifact paths and in recorded launches, and 0.1.0 was never published with other kernels.
KERNELS_VERSION = "0.1.0"
