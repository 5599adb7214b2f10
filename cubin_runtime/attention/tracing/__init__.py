"""Recording which calls a program makes, as definitions and workloads that flashinfer-bench reads.

::

    with Recorder(Path("traces")):
        engine.step()

Only what happens inside is recorded: calls of ``paged_decode``, and of the operators under other names that stand on
it. Plans that a program runs itself are not seen. Outside nothing is written.
Another operator joins by giving ``record`` a ``TracedCall`` of its own where ``recording()``.
"""

from ..recording import record, recording
from .recorder import Recorder
from .schema import (
    Constant,
    Scalar,
    Tensor,
    TracedCall,
)

__all__ = ["Constant", "Recorder", "Scalar", "Tensor", "TracedCall", "record", "recording"]
