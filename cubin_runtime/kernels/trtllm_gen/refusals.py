"""Why a case has no plan: one error class a kind, with the kind's word as the records spell it."""

from __future__ import annotations

from ...errors import UsageError, WorkspaceError
from .traits import KernelKey

ARGUMENT = "launcher_argument_check"
CHECK = "check"
WORKSPACE = "workspace_overflow"
MISSING_FIRST = "missing_kernel_precheck"
MISSING_LATER = "missing_kernel_in_selection"


class PlanRefused(UsageError):
    """No plan exists for these arguments; ``kind`` groups the reasons."""

    kind = CHECK


class ArgumentRefused(PlanRefused):
    """An argument that no kernel is ever looked up for."""

    kind = ARGUMENT


class KernelMissing(PlanRefused):
    """The release has no kernel for what the selection asks; ``key`` is what was asked.

    ``while_probing`` tells a miss while tile sizes were compared, or after the first lookup, from one at it.
    """

    def __init__(self, key: KernelKey, dtypes: str, while_probing: bool) -> None:
        self.key = key
        self.kind = MISSING_LATER if while_probing else MISSING_FIRST
        super().__init__(f"the release has no kernel {dtypes}: {key}")


class WorkspaceRefused(WorkspaceError):
    """The workspace is smaller than its fixed parts; ``needed_bytes`` is what they take."""

    kind = WORKSPACE

    def __init__(self, message: str, needed_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        super().__init__(message)
