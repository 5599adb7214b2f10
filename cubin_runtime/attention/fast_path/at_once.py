"""A call sent at once by the accelerator: the tests of its tensors, their addresses and the launches in one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...errors import WorkspaceError
from ...launch.accelerator import Senders
from .guards import GuardedTensor
from .notes import Scratch

_ALIGNED = 15  # bits of an address that count


def at_once(
    senders: Senders | None,
    tensors: Sequence[GuardedTensor],
    values: Sequence[str],
    scope: dict[str, Any],
    *,
    sources: Mapping[int, tuple[str, int]],
    unlike: str,
    done: str,
    keyed: Collection[str] = (),
    masks: Mapping[str, int] | None = None,
    made: tuple[str, Callable[..., Any], Sequence[str]] | None = None,
    stream: tuple[Callable[[Any], int], Any] | None = None,
    scratch: tuple[Any, Callable[[int], Any]] | None = None,
) -> list[str]:
    """The lines that try it, ahead of those that do the same in Python; none where it cannot be done.

    Args:
        senders: those of the other lines; None: there is no accelerator.
        tensors: those of the call, which ``conditions`` has put their tests into ``scope`` for.
        values: expressions of the launch's values.
        sources: for values that are addresses the name of the tensor and an offset; other values are numbers.
        unlike: the statement for a call whose tensors are unlike the known ones.
        done: the statement behind the launches; the tensor made has its name then.
        keyed: names of the tensors whose addresses the senders are kept by.
        masks: bits of the addresses that count, by name; 15 for the others.
        made: the name of a tensor that is made, the function that makes it, and the names of those that it takes.
        stream, scratch: as ``Senders.step`` takes them.
    """
    others = {"TensorView", "grad_enabled"} & scope.keys()
    if senders is None or "check" not in scope or others:
        return []
    numbers = {item.name: number for number, item in enumerate(tensors)}
    known = {source for source, _ in sources.values()}

    def address(item: GuardedTensor) -> tuple[bool, int, int] | None:
        if item.name in keyed:
            return True, 0, 0
        mask = (masks or {}).get(item.name, _ALIGNED)
        return (False, mask, item.view.pointer & mask) if item.name in known else None

    taken = numbers | ({made[0]: len(numbers)} if made else {})
    made_step = senders.step(
        forms=(scope["modes"], scope["levels"], scope["check"]),
        data_ptr=sys.modules["torch"].Tensor.data_ptr,
        addresses=[address(item) for item in tensors],
        sources={value: (taken[name], offset) for value, (name, offset) in sources.items()},
        made=(made[1], tuple(numbers[name] for name in made[2])) if made else None,
        stream=stream,
        scratch=scratch,
    )
    if made_step is None:
        return []
    scope["at_once"], behind = made_step
    sent = made[0] if made else "sent"
    given = ", ".join([*numbers, *(values[value] for value in behind)])
    return [
        f"{sent} = at_once({given})",
        f"if {sent} is None:",
        f"    {unlike}",
        f"if {sent} is not False:",
        f"    {done}",
    ]


def place_finder(scratch: Scratch, context: int) -> Callable[[int], Any]:
    """A function that gives the place of a stream's scratch as ``Workspace.claim`` does; None: the full path finds it,
    or says why not."""
    held, default = scratch.held, scratch.default
    assert held is not None

    def place_of(handle: int) -> Any:
        workspace = held.get(handle or default)
        if workspace is None or workspace.context != context:
            return None
        try:
            return workspace.claim(handle)
        except WorkspaceError:
            return None

    return place_of
