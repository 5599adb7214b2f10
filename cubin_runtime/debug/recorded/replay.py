"""Replaying a recorded call: its outputs beside a float64 reference, and on a device the call once more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CorruptError
from ...launch.devices import device_ordinal
from ...values import dataclass
from .call import RecordedCall, RecordedTensor
from .call_file import read_call
from .comparison import Comparison, compare
from .references import NoReferenceError, Reference, reference_of
from .snapshot import numpy_for

if TYPE_CHECKING:
    from ...attention.runtime import Runtime
    from ...protocols import Device


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        file: the recorded call's file.
        call: what it holds.
        no_reference: why there is no reference, or "".
        notes: what is wrong with the inputs: lengths over their bound, pages outside the pool.
        recorded: the outputs that were recorded, beside the reference; empty if the call failed.
        device: the device that it ran on again, "" if it did not.
        replayed: the outputs of that run, beside the reference.
        same_bits: whether that run gave the recorded bits; None if there is nothing to compare.
    """

    file: Path
    call: RecordedCall
    no_reference: str
    notes: tuple[str, ...]
    recorded: tuple[Comparison, ...]
    device: str = ""
    replayed: tuple[Comparison, ...] = ()
    same_bits: bool | None = None

    @property
    def ok(self) -> bool:
        """Return whether every output that was compared is within tolerance; the last run counts, if there is one."""
        return all(one.ok for one in (self.replayed if self.device else self.recorded))

    def lines(self) -> list[str]:
        """The report as text."""
        call, origin = self.call, self.call.origin
        text = [f"{self.file.name}: {call.operator} on {origin.get('device', 'an unknown device')}"]
        for name, tensor in call.tensors.items():
            stored = f", {len(call.page_ids)} pages stored" if tensor.paged else ""
            view = tensor.view
            text.append(f"  {name}: {view.dtype} {list(view.shape)}, strides {list(view.strides)}{stored}")
        text.append(f"  options: {', '.join(f'{name}={value}' for name, value in call.options.items())}")
        for kernel in call.kernels:
            text.append(
                f"  kernel: {kernel.get('kernel')} sha256 {kernel.get('sha256', '')[:12]} grid {kernel.get('grid')}"
            )
        text.append(f"  origin: {', '.join(f'{name} {value}' for name, value in origin.items())}")
        text += [f"  input: {note}" for note in self.notes]
        if call.error:
            text.append(f"  the call failed: {call.error}")
        if self.no_reference:
            text.append(f"  reference: none, {self.no_reference}")
        text += [f"  recorded {one}{'' if one.ok else ': WRONG'}" for one in self.recorded]
        text += [f"  replayed {one}{'' if one.ok else ': WRONG'}" for one in self.replayed]
        if self.device:
            same = {None: "", True: ", bit-identical to the recording", False: ", not bit-identical to the recording"}[
                self.same_bits
            ]
            text.append(f"  replayed on {self.device}{same}")
        return text

    def __str__(self) -> str:
        return "\n".join(self.lines())


def replay_call(file: Path | str, *, runtime: Runtime | None = None, device: Device = 0) -> ReplayReport:
    """Compare a recorded call with the float64 reference; with a ``runtime`` also run it again on ``device``.

    ``device`` is an ordinal, or a device of torch, cuda.core or cuda.bindings.
    A call of an operator that has no reference here is not run again either.

    Raises:
        MissingError, StoreError, CorruptError: the file is not available, or not a recorded call.
        UsageError: numpy is missing, or the device does not take the call as it was recorded.
        DeviceError: the call cannot be launched there, or its kernels fault.
    """
    numpy_for("replaying calls")
    call = read_call(file)
    reference, reason = None, ""
    try:
        reference = reference_of(call)
    except NoReferenceError as error:
        reason = str(error)
    recorded = {name: tensor for name, tensor in call.tensors.items() if tensor.output and tensor.data}
    report = ReplayReport(
        file=Path(file),
        call=call,
        no_reference=reason,
        notes=() if reference is None else reference.notes,
        recorded=_compared(recorded, reference),
    )
    from .rerun import reruns, run_again

    if runtime is None or not reruns(call.operator):
        return report
    ordinal = device_ordinal(device)
    again = run_again(call, runtime, ordinal)
    return ReplayReport(
        file=report.file,
        call=call,
        no_reference=reason,
        notes=report.notes,
        recorded=report.recorded,
        device=runtime.driver.device(ordinal).name,
        replayed=_compared(again, reference),
        same_bits=all(again[name].data == recorded[name].data for name in recorded) if recorded else None,
    )


def _compared(outputs: dict[str, RecordedTensor], reference: Reference | None) -> tuple[Comparison, ...]:
    if reference is None:
        return ()
    try:
        return tuple(compare(name, tensor, reference) for name, tensor in outputs.items() if name in ("out", "lse"))
    except (LookupError, ValueError) as error:
        raise CorruptError(f"an output that does not fit its call: {error!r}") from error
