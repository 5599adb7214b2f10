"""The version of the package, alone so that the build can read it."""

__version__ = "0.1.0"
# Of the native release that is launched by default. It changes when the kernels do, not with every version.
KERNELS_VERSION = "0.1.0"
