"""Which recorders are active; ``tracing`` and ``recorded`` have the recorders."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recorded.recorder import CallRecorder
    from .tracing.recorder import Recorder
    from .tracing.schema import TracedCall


class _Entered:
    """The recorders that are entered, which are the whole process's: of forms, and of calls with contents."""

    recorders: tuple[Recorder, ...] = ()
    call_recorders: tuple[CallRecorder, ...] = ()


entered = _Entered()


def recording() -> bool:
    """Whether any recorder of forms is entered."""
    return bool(entered.recorders)


def record(call: TracedCall | str) -> None:
    """Give ``call`` to every recorder that is entered; a str is the reason why a call has no traced form.

    Raises:
        as ``Recorder.add``.
    """
    for recorder in entered.recorders:
        if isinstance(call, str):
            recorder.leave_out(call)
        else:
            recorder.add(call)


def call_recorder() -> CallRecorder | None:
    """The recorder of calls with contents that was entered last."""
    return entered.call_recorders[-1] if entered.call_recorders else None
