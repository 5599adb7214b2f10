"""Plans whose run is one step: tensors, the numbers of the step, a workspace and a stream; and steps bound ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bound_step import BoundStep, bind_step
from .fast_path import note_launch
from .operator_plan import AnyWorkspace, OperatorPlan
from .recording import record, recording

if TYPE_CHECKING:
    from ..protocols import Stream
    from .tracing.schema import TracedCall


class StepPlan(OperatorPlan):
    """A plan of an operator with a ``run`` by ``run_step``."""

    def numbers_of(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """The numbers of a run by its arguments, in the order of the operator's ``numbers``.

        Of arguments that are tensors or numbers, only tensors are left in ``arguments``.
        """
        raise NotImplementedError

    def traced(self, arguments: dict[str, Any]) -> TracedCall | str:
        """The record of a run by its arguments, or the reason why it has none; the dict is this function's own."""
        raise NotImplementedError

    def run_step(self, arguments: dict[str, Any]) -> None:
        """A run by the arguments of ``run``, by name; the dict is this function's own."""
        given = dict(arguments) if recording() else None
        numbers = self.numbers_of(arguments)
        addresses = self.addresses(arguments)
        launched = self.launch(addresses, numbers, arguments["workspace"], self.stream_of(arguments["stream"]))
        note_launch(launched if self.of_torch else launched._replace(memory=None))
        if given is not None:
            record(self.traced(given))

    def bind(
        self,
        *,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
        graphs: int = 0,
        **arguments: Any,
    ) -> BoundStep:
        """Bind some of ``run``'s arguments for one stream: a step then takes the other tensors.

        What is bound is checked here and kept alive until ``close``; it must stay where it is and as it is. A layer of
        a model binds its caches, a loop over fixed buffers everything::

            layer = plan.bind(k_cache=k, v_cache=v, stream=stream)
            layer.step(q, page_table, seq_lens, out)

        Args:
            workspace: as for ``run``; None: memory of its own, cleared on ``stream``.
            stream: as for ``run``; None: the stream that a run without one would take now.
            graphs: number of later captures to reserve memory for, as in ``prepare``.
            arguments: tensors, scales and ``max_seq_len`` by the names of ``run``; numbers that are left out are the
                plan's.

        Raises:
            UsageError: a name is not one of ``run``'s, or a value not what was planned.
            WorkspaceError, DeviceError: as ``run``.
        """
        return bind_step(self, arguments, workspace, stream, graphs)
