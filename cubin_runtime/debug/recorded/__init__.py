"""Recording calls with all their tensors, one file each, and replaying them against a float64 reference.

::

    with CallRecorder(Path("calls")) as recorder:
        engine.step()
    print(*(replay_call(file) for file in recorder.files), sep="\\n")

``call_file`` is the file, ``snapshot`` what is read of the device, ``recorder`` writes, ``replay`` reads back, computes
the reference and, where there is a device, runs the call again. ``tracing`` records calls without contents.
"""

from .call import RecordedCall, RecordedTensor
from .call_file import read_call
from .recorder import CallRecorder
from .replay import ReplayReport, replay_call

__all__ = ["CallRecorder", "RecordedCall", "RecordedTensor", "ReplayReport", "read_call", "replay_call"]
