"""Notes of the full path about a call, so that a call like it can be launched without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...provenance import calls, traced

if TYPE_CHECKING:
    from ...kernels.native.launches import NativeLaunch
    from ...launch.prepared import PreparedLaunches
    from ..memory import TensorMemory


FastPaths = dict[int, Any]  # the ``Paths`` of each operator, by its number
Resized = tuple[Sequence[Any], int]  # the launches of a call, and the greatest bound on the lengths that they take


class Scratch(NamedTuple):
    """The workspaces of a plan, and where its regions lie in them.

    ``held`` has the workspace of each stream and, under ``default``, that of the legacy default stream; None: the
    caller gave one. ``regions_at`` gives the addresses of the regions called ``names`` from a workspace and what
    ``Workspace.claim`` gave.
    """

    held: Mapping[Hashable, Any] | None
    default: Hashable
    regions_at: Callable[[Any, Hashable], tuple[int, ...]]
    names: tuple[str, ...]

    def workspace_on(self, stream: int) -> Any:
        """The plan's own workspace of a stream, or None."""
        assert self.held is not None
        return self.held.get(stream or self.default)


class Family(Protocol):
    """Calls that differ from one in sizes alone: first dimensions of tensors, by name, and an integer option."""

    @property
    def key(self) -> Hashable:
        """The key of all that its calls have in common."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the call that this was noted for."""
        ...

    def plan_of(self, sizes: Mapping[str, int], launches: Sequence[NativeLaunch[Any]] | None) -> Any:
        """The plan of calls of other sizes, with these ``launches`` if there are any; its ``bounds`` are as in
        ``Launched``.

        Raises:
            CubinRuntimeError: there are no such calls.
        """
        ...

    def resizer(self) -> Callable[[Mapping[str, int]], Resized]:
        """A function that gives the launches of a call of other sizes, and the greatest bound on the lengths that they
        take; it raises as ``plan_of``."""
        ...

    def unsent(self, plan: Any, workspace: Any, stream: int) -> Launched | None:
        """The result of ``launch`` without values, before anything is launched; None: only a launch can say."""
        ...

    def launch(self, plan: Any, *values: Any) -> Launched:
        """Launch a call by its plan: the values are addresses, numbers, the workspace, a tensor and the stream."""
        ...


class Launched(NamedTuple):
    """The launches of one call, ``prepared.run(stream, *values)``.

    Values are addresses, but for those called ``numbers``; both say where they are from, as in ``provenance``, and
    those of the regions of ``scratch`` follow from the workspace. ``bounds`` are the least and the greatest bound on
    the lengths with which a call takes the same plan. ``memory`` gives the stream of a call without one; None: that is
    the legacy default stream. ``family`` are the calls of other sizes.
    """

    prepared: PreparedLaunches
    values: tuple[Any, ...]
    numbers: tuple[str, ...]
    context: int
    device: int
    memory: TensorMemory | None
    bounds: tuple[int, int]
    scratch: Scratch | None = None
    family: Family | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values."""
        return self.prepared.names


class Made(NamedTuple):
    """A tensor that the full path made: ``make(*sources)`` makes another."""

    tensor: Any
    make: Callable[..., Any]
    sources: tuple[Any, ...]


class Notes:
    """The notes of one call, which are taken of what a thread does ``with`` them: but for what a call does that
    interrupts it and takes its own. ``call`` is its number in ``provenance``."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.new_tensors: list[Made] = []
        self.compared: list[tuple[int, int]] = []
        self.repeatable = True

    def __enter__(self) -> Notes:
        self._interrupted = _active.notes, traced.call
        self.call = traced.call = next(calls)
        _active.notes = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.notes, traced.call = self._interrupted

    @property
    def single(self) -> Launched | None:
        """The launch of a call that may be sent again; None: there were several or none, or it may not."""
        return self.launched[0] if self.repeatable and len(self.launched) == 1 else None


class _Active(threading.local):
    notes: Notes | None = None


_active = _Active()


def note_launch(launched: Launched) -> None:
    """Note a launch."""
    if _active.notes is not None:
        _active.notes.launched.append(launched)


def note_bounds(low: int, high: int) -> None:
    """Note that the launches so far are those of all calls whose bound on the lengths is in this range."""
    if _active.notes is not None:
        _active.notes.launched[:] = [launched._replace(bounds=(low, high)) for launched in _active.notes.launched]


def note_made(tensor: Any, make: Callable[..., Any], sources: Sequence[Any] = ()) -> Any:
    """Note a tensor that was made from arguments of the call or from nothing; the tensor."""
    if _active.notes is not None:
        _active.notes.new_tensors.append(Made(tensor, make, tuple(sources)))
    return tensor


def note_compared(one: int, other: int) -> None:
    """Note that the call depends on whether two addresses of its arguments are equal."""
    if _active.notes is not None:
        _active.notes.compared.append((one, other))


def note_unrepeatable() -> None:
    """Note that the call depends on the contents of a tensor, so that another call must take the full path."""
    if _active.notes is not None:
        _active.notes.repeatable = False
