"""Recording which calls a program makes, as definitions and workloads that flashinfer-bench reads.

::

    with Recorder(Path("traces")):
        engine.step()

Only what happens inside is recorded; outside nothing is written and a call costs one look at an empty tuple.
"""

from .recorder import Recorder, record, recording
from .schema import Constant, Scalar, Tensor, TracedCall

__all__ = ["Constant", "Recorder", "Scalar", "Tensor", "TracedCall", "record", "recording"]
