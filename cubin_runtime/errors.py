"""The exceptions of the package. Each has an ``exit_code``, which the command line returns."""

from __future__ import annotations


class CubinRuntimeError(Exception):
    """Base of all errors raised on purpose; a message names what came and what was expected."""

    exit_code = 1


class UsageError(CubinRuntimeError, ValueError):
    """An argument is outside its domain; raised before anything is launched or written."""

    exit_code = 2


class PinError(CubinRuntimeError):
    """A name or path has no pin, two pins disagree, or a manifest is not the pinned one."""

    exit_code = 3


class MissingError(CubinRuntimeError):
    """Bytes that a manifest names are not present where they were looked for."""

    exit_code = 4


class CorruptError(CubinRuntimeError):
    """Bytes are not what their digest or their format says."""

    exit_code = 5


class ExtraError(CubinRuntimeError):
    """A tree holds files that its manifest does not name."""

    exit_code = 6


class SourceError(CubinRuntimeError):
    """No source delivered the bytes; the message lists each source with its reason."""

    exit_code = 7


class StoreError(CubinRuntimeError):
    """The store cannot be written, is full, or holds something that is no regular file."""

    exit_code = 8


class DeviceError(CubinRuntimeError):
    """The driver, the device or the ABI refuses; base of the errors of the launch layer."""

    exit_code = 9


class DriverError(DeviceError):
    """A CUDA driver call failed."""


class AbiError(DeviceError):
    """A kernel's parameters, block size or architecture do not fit what would be launched."""


class FrozenError(DeviceError):
    """A load was asked for after ``freeze()`` or while a stream was capturing."""


class WorkspaceError(DeviceError, ValueError):
    """A workspace is too small, misaligned, or on another device; the message names the bytes needed."""
