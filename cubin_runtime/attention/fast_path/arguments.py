"""What must hold for the arguments of a call that is like an earlier one, as expressions of a function's source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...launch.semaphore_workspace import SemaphoreWorkspace
from ...launch.workspace import Workspace
from .guards import GuardedTensor, guarded
from .notes import Launched
from .options import Form, Signature, is_immutable, is_runtime

if TYPE_CHECKING:
    from ...launch.semaphore_workspace import AnyWorkspace

_SCALE_LIMIT = 2.0**127
_FIXED = (str, int, float)
_WORKSPACES = (Workspace, SemaphoreWorkspace)


class UnlikeError(Exception):
    """The call cannot be told from others that need another launch."""


class ArgumentTests:
    """Collects the tests of the arguments, what they refer to (``scope``), and the tensors among them.

    ``free`` are the numbers that the launch follows, ``workspace`` the name of the argument that is one.
    """

    def __init__(self, signature: Signature, launched: Launched, form: Form) -> None:
        self.signature, self.launched, self.form = signature, launched, form
        self.scope: dict[str, Any] = {}
        self.tests = list(form.tests)
        self.unpacked: list[str] = []
        self.tensors: list[GuardedTensor] = []
        self.free: dict[str, Any] = {}
        self.workspace = ""

    def add(self, name: str, value: Any) -> None:
        """What must hold for an argument, or what varies with it."""
        signature = self.signature
        if name in ("self", "stream"):
            return
        if name in signature.contents and value is not None:
            raise UnlikeError
        if is_workspace(value):
            if self.launched.scratch is None:
                raise UnlikeError
            self.workspace = name
            self.scope["Kind"] = type(value)
            self.tests.append(f"type({name}) is Kind")
            self.add_context(name, value)
        elif name == signature.bound and type(value) is int:
            self.scope |= {"LOW": self.launched.bounds[0], "HIGH": self.launched.bounds[1]}
            self.tests.append(f"type({name}) is int")
            self.free[name] = value
        elif name in signature.scales and type(value) is float and value:
            self.scope |= {"LIMIT": _SCALE_LIMIT, f"k_{name}": value}
            self.tests.append(f"({name} is k_{name} or type({name}) is float and -LIMIT <= {name} <= LIMIT and {name})")
            self.free[name] = value
        elif type(value) in (tuple, list):
            self.scope |= {f"kind_{name}": type(value), f"len_{name}": len(value)}
            self.tests.append(f"type({name}) is kind_{name} and len({name}) == len_{name}")
            parts = [f"{name}_{index}" for index in range(len(value))]
            if parts:
                self.unpacked.append(f"    {', '.join(parts)}, = {name}")
            late = len(self.tests)
            for part, element in zip(parts, value, strict=True):
                self._single(part, element)
            self.unpacked += self.refusal(self.tests[late:])
            del self.tests[late:]
        else:
            self._single(name, value)

    def add_context(self, name: str, workspace: AnyWorkspace) -> None:
        """What must hold for the context of a workspace; one that names none is in that of the call."""
        if workspace.context is None:
            raise UnlikeError
        self.scope["CONTEXT"] = self.launched.context
        self.tests.append(f"{name}.context == CONTEXT")

    def refusal(self, tests: Sequence[str]) -> list[str]:
        """The lines that leave the function unless all tests are true."""
        return [f"    if not ({' and '.join(tests)}):", f"        {self.form.unlike}"] if tests else []

    def _single(self, name: str, value: Any) -> None:
        if value is None or type(value) is bool:
            self.tests.append(f"{name} is {value}")
        elif type(value) in _FIXED:
            self.scope |= {f"k_{name}": value, f"t_{name}": type(value)}
            signed = f" and str({name}) == '{value}'" if type(value) is float and not value else ""
            self.tests.append(f"({name} is k_{name} or type({name}) is t_{name} and {name} == k_{name}{signed})")
        elif is_runtime(value):
            # It is the one that keeps the path, which would be a reference cycle with it.
            self.scope[f"t_{name}"] = type(value)
            self.tests.append(f"type({name}) is t_{name}")
        elif is_immutable(value):
            self.scope[f"k_{name}"] = value
            self.tests.append(f"{name} is k_{name}")
        else:
            self.tensors.append(guarded_or_unlike(name, value))


def is_workspace(value: Any) -> bool:
    """Whether an argument is a workspace."""
    return isinstance(value, _WORKSPACES)


def guarded_or_unlike(name: str, tensor: Any) -> GuardedTensor:
    """A tensor with its view; ``UnlikeError`` where its form cannot be tested."""
    item = guarded(name, tensor)
    if item is None:
        raise UnlikeError
    return item
