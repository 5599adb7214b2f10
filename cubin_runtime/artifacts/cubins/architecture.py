"""The architecture a kernel was compiled for, and which devices may run it."""

from __future__ import annotations

import re
from functools import lru_cache, partial

from ...errors import UsageError
from ...values import dataclass

# Family targets and the devices of each (CUDA programming guide, "family-specific features").
_FAMILY_MEMBERS = {100: (100, 103), 103: (103,), 110: (110,), 120: (120, 121), 121: (121,)}
_TEXT = re.compile(r"(?:sm_)?([1-9][0-9]{1,2})([af]?)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A compile target such as ``sm_90a``.

    ``number`` is ten times the compute capability (``103`` is 10.3). ``suffix`` is ``""`` (portable within
    its major version), ``"a"`` (that device alone), ``"f"`` (its family) or ``None`` where nothing tells.
    ``declared`` marks a suffix that comes from a release's metadata and not from the binary itself.
    """

    number: int
    suffix: str | None
    declared: bool = False

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str, *, declared: bool = False) -> Architecture:
        """Read ``90a`` or ``sm_90a``.

        Raises:
            UsageError: ``text`` is not such a name.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UsageError(f"architecture {text!r}: expected a name such as 90a or sm_100f")
        return Architecture(int(match[1]), match[2], declared)

    def __str__(self) -> str:
        return f"sm_{self.number}{'?' if self.suffix is None else self.suffix}"

    def runs_on(self, number: int) -> bool:
        """Return whether a device of compute capability ``number / 10`` may run it; an unknown suffix never does."""
        if self.suffix == "a":
            return number == self.number
        if self.suffix == "f":
            return number in _FAMILY_MEMBERS.get(self.number, ())
        if self.suffix == "":
            return number // 10 == self.number // 10 and number >= self.number
        return False

    def same_target(self, other: Architecture) -> bool:
        """Return whether both name one target, whatever stated the suffix."""
        return (self.number, self.suffix) == (other.number, other.suffix)


# The architecture that a release's metadata names; it is parsed once for each text.
declared_architecture = partial(Architecture.parse, declared=True)
