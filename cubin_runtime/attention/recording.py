"""Whether calls are recorded, and by whom; ``tracing`` has the recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tracing.recorder import Recorder
    from .tracing.schema import TracedCall


class _Entered:
    """The recorders that are entered, which are the whole process's."""

    recorders: tuple[Recorder, ...] = ()


entered = _Entered()


def recording() -> bool:
    """Whether any recorder is entered."""
    return bool(entered.recorders)


def record(call: TracedCall) -> None:
    """Give ``call`` to every recorder that is entered; errors as ``Recorder.add``."""
    for recorder in entered.recorders:
        recorder.add(call)
