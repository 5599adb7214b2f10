"""The exceptions of the package. Each has an ``exit_code``, which the command line returns."""

from __future__ import annotations

_NO_VALUE = object()


class CubinRuntimeError(Exception):
    """Base class of all exceptions of the package. Messages state what was given and what was expected.

    ``argument`` is the name of the argument that the message begins with; it is empty if the error is of none.
    """

    exit_code = 1
    argument = ""


class UsageError(CubinRuntimeError, ValueError):
    """An argument is invalid; raised before anything is launched or written."""

    exit_code = 2

    def __init__(self, message: str, *, argument: str = "", value: object = _NO_VALUE) -> None:
        """Put the name of the argument, and its value if there is one, before the message."""
        self.argument = argument
        name = argument if value is _NO_VALUE else f"{argument}={value}"
        super().__init__(f"{name}: {message}" if name else message)


class PinError(CubinRuntimeError):
    """A name or path is not pinned, two pins conflict, or a manifest does not match its pin."""

    exit_code = 3


class MissingError(CubinRuntimeError):
    """A file that a manifest lists is missing."""

    exit_code = 4


class CorruptError(CubinRuntimeError):
    """Bytes do not match their digest, or their format is invalid."""

    exit_code = 5


class ExtraError(CubinRuntimeError):
    """A tree contains files that its manifest does not list."""

    exit_code = 6


class SourceError(CubinRuntimeError):
    """No source could deliver a file; the message lists the reason for each source."""

    exit_code = 7


class StoreError(CubinRuntimeError):
    """The store is not readable, not writable or full, or an entry is not a regular file."""

    exit_code = 8


class DeviceError(CubinRuntimeError):
    """Base class of errors of the driver, the device and the ABI gate."""

    exit_code = 9


class DriverError(DeviceError):
    """A CUDA driver call failed."""


class AbiError(DeviceError):
    """The parameters, block size or architecture of a kernel do not match the launch."""


class FrozenError(DeviceError):
    """A kernel would have been fetched or loaded after ``freeze()`` or during a stream capture."""


class WorkspaceError(DeviceError, ValueError):
    """A workspace is too small, misaligned, or on another device; the message states the required bytes."""
