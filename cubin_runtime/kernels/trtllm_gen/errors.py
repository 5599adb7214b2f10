"""Errors of the planner, one class per ``error_kind`` of the recorded decisions."""

from __future__ import annotations

from ...errors import UsageError, WorkspaceError
from .traits import KernelKey

ARGUMENT = "launcher_argument_check"
CHECK = "check"
WORKSPACE = "workspace_overflow"
MISSING_FIRST = "missing_kernel_precheck"
MISSING_LATER = "missing_kernel_in_selection"


class PlanRefused(UsageError):
    """No kernel serves the call; ``kind`` is the recorded ``error_kind``."""

    kind = CHECK


class ArgumentRefused(PlanRefused):
    """An argument is refused before any kernel is looked up."""

    kind = ARGUMENT


class KernelMissing(PlanRefused):
    """The release has no kernel for ``key``.

    ``while_probing`` is false for the first lookup of a selection, true for lookups while tile sizes are compared and
    in later passes.
    """

    def __init__(self, key: KernelKey, dtypes: str, while_probing: bool) -> None:
        self.key = key
        self.kind = MISSING_LATER if while_probing else MISSING_FIRST
        super().__init__(f"the release has no kernel {dtypes}: {key}")


class WorkspaceRefused(WorkspaceError):
    """The workspace is smaller than its fixed parts, which take ``needed_bytes``."""

    kind = WORKSPACE

    def __init__(self, message: str, needed_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        super().__init__(message)
