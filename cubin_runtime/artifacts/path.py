"""The name of an artifact: ``RELEASE/FAMILY/.../FILE``, a relative POSIX path without ``..``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UsageError

MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")
# the common case at one glance: plain characters, parts that start with no dot, nothing near a limit
_PLAIN = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,199}(?:/[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,199})*")


class PathError(UsageError):
    """A text is not an artifact path."""


@dataclass(frozen=True, slots=True, order=True)
class ArtifactPath:
    r"""A validated artifact path, or a folder of them (no trailing slash).

    Parts are separated by ``/``; none is empty, ``.`` or ``..``; no backslash, NUL or other control
    character; at most 1024 bytes in all and 255 in a part.

    Raises:
        PathError: on construction, naming the text and the rule it breaks.

    >>> ArtifactPath("release/fmha/kernel.cubin").release
    'release'
    """

    text: str

    def __post_init__(self) -> None:
        text = self.text
        if type(text) is str and len(text) <= MAX_PATH_BYTES and _PLAIN.fullmatch(text):
            return
        reason = _fault(self.text)
        if reason:
            raise PathError(f"artifact path {self.text!r}: {reason}")

    def __str__(self) -> str:
        return self.text

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts between the slashes."""
        return tuple(self.text.split("/"))

    @property
    def release(self) -> str:
        """The first part."""
        return self.text.partition("/")[0]

    @property
    def name(self) -> str:
        """The last part."""
        return self.text.rpartition("/")[2]

    def child(self, relative: str) -> ArtifactPath:
        """The path ``relative`` below this folder.

        Raises:
            PathError: ``relative`` is absolute, climbs, or breaks another rule.
        """
        return ArtifactPath(f"{self.text}/{relative}")

    def is_below(self, folder: ArtifactPath) -> bool:
        """Return whether this path lies inside ``folder`` (a folder is not below itself)."""
        return self.text.startswith(folder.text + "/")

    def relative_to(self, folder: ArtifactPath) -> str:
        """The text below ``folder``.

        Raises:
            PathError: this path is not below ``folder``.
        """
        if not self.is_below(folder):
            raise PathError(f"artifact path {self.text!r}: not below {folder.text!r}")
        return self.text[len(folder.text) + 1 :]


def _fault(text: object) -> str | None:  # noqa: C901
    """The rule that ``text`` breaks, or None."""
    if not isinstance(text, str):
        return f"expected text, got {type(text).__name__}"
    if not text:
        return "is empty"
    if _FORBIDDEN.search(text):
        return "has a backslash, NUL or other control character"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if size > MAX_PATH_BYTES:
        return f"is {size} bytes, at most {MAX_PATH_BYTES} are allowed"
    if text.startswith("/"):
        return "is absolute, expected a relative path"
    for part in text.split("/"):
        if part == "":
            return "has an empty component"
        if part == "." or part == "..":
            return f"has the component {part!r}"
        if len(part) > MAX_PART_BYTES // 4 and len(part.encode()) > MAX_PART_BYTES:
            return f"has a component over {MAX_PART_BYTES} bytes"
    return None
