"""``replay``: recorded calls beside a float64 reference, and run again where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CorruptError, MissingError, StoreError
from . import options, output

if TYPE_CHECKING:
    from ..attention import Runtime
    from ..config import Config
    from ..debug.recorded import RecordedCall, ReplayReport

_WRONG = 9


def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files of a CallRecorder.")],
    device: Annotated[
        int | None,
        typer.Option(
            "--device", metavar="N", help="Run the calls again on this GPU; default the first, if there is one."
        ),
    ] = None,
    reference_only: Annotated[bool, typer.Option("--reference-only", help="Run nothing again.")] = False,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Compare recorded calls with a float64 reference.

    They are run again where there is a GPU; code 9 if an output is wrong.
    """
    from ..debug.recorded import read_call, replay_call

    config = replace(options.make_config(store, source, pins, offline), record=None)
    codes: list[int] = []
    calls: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    why = "--reference-only" if reference_only else "" if device is not None else _without_device()
    for file in files:
        try:
            runtime = None if why else _runtime(config, read_call(file))
            report = replay_call(file, runtime=runtime, device=device or 0)
        except (MissingError, CorruptError, StoreError) as error:  # the others may be in order
            errors.append(output.error_of(error))
            continue
        codes.append(0 if report.ok else _WRONG)
        if json:
            calls.append(_as_json(report))
            continue
        for line in report.lines():
            output.line(line)
        if why:
            output.line(f"  not replayed: {why}")
    if json:
        output.emit_json("replay", {"calls": calls, "not_run": why}, errors)
    for failed in errors:
        output.error_line(failed["message"])
    output.finish([*codes, *(failed["code"] for failed in errors)])


def _without_device() -> str:
    """Return the reason why there is no GPU, or ""."""
    from ..errors import DeviceError
    from ..launch.driver import Driver

    try:
        return "" if Driver().device_count() else "the driver sees no device"
    except DeviceError as error:
        return str(error)


def _runtime(config: Config, call: RecordedCall) -> Runtime:
    """A runtime with the release that the call was recorded with."""
    from ..attention import Runtime
    from ..debug.recorded.described import TRTLLM_GEN

    pin = call.origin.get("pin")
    if pin is None:
        return Runtime(config)
    if call.operator.startswith(TRTLLM_GEN):
        return Runtime(config, trtllm_release=pin)
    return Runtime(config, release=pin)


def _as_json(report: ReplayReport) -> dict[str, Any]:
    call = report.call
    return {
        "file": str(report.file),
        "operator": call.operator,
        "tensors": {
            name: {
                "dtype": tensor.view.dtype,
                "shape": tensor.view.shape,
                "strides": tensor.view.strides,
                "pages_stored": len(call.page_ids) if tensor.paged else None,
            }
            for name, tensor in call.tensors.items()
        },
        "options": call.options,
        "kernels": call.kernels,
        "origin": call.origin,
        "failed": call.error or None,
        "no_reference": report.no_reference or None,
        "notes": report.notes,
        "recorded": [{**one._asdict(), "ok": one.ok} for one in report.recorded],
        "device": report.device or None,
        "replayed": [{**one._asdict(), "ok": one.ok} for one in report.replayed],
        "same_bits": report.same_bits,
        "ok": report.ok,
    }
