"""Recording which calls a program makes, as definitions and workloads that flashinfer-bench reads.

::

    with Recorder(Path("traces")):
        engine.step()

Only what happens inside is recorded: calls of the operators, also under other libraries' names, runs of plans and
bound steps. Calls that cannot be traced are counted in ``Recorder.untraced``. Outside nothing is written.
Another operator joins by giving ``record`` a ``TracedCall`` of its own where ``recording()``.
"""

from .recorder import Recorder, record, recording
from .schema import Constant, Scalar, Tensor, TracedCall

__all__ = ["Constant", "Recorder", "Scalar", "Tensor", "TracedCall", "record", "recording"]
