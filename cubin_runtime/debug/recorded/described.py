"""The recorded description of a call, besides contents: its tensors' forms, options, kernels, and where it ran."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ... import _version
from ...artifacts.pins.pin import Pin
from ...attention.operator_plan import OperatorPlan
from ...launch.driver import DeviceFacts
from ...launch.plan import LaunchPlan
from ...tensor import TensorView
from ...values import dataclass
from .call import Option

if TYPE_CHECKING:
    from ...attention.hook import Run
    from ...kernels.trtllm_gen.call import Call

TRTLLM_GEN = "trtllm_gen."
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages that a call reads: tensors by their names, and what an entry of the table counts.

    ``keys_per_entry`` is the page size; entries that are keys are divided by ``keys_per_page``.
    """

    table: str
    lengths: str
    pages: int
    keys_per_entry: int
    keys_per_page: int = 1


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call without contents; ``paged`` tensors are read page by page, ``outputs`` behind the launch."""

    operator: str
    device: int
    views: Mapping[str, TensorView]
    outputs: frozenset[str]
    paged: frozenset[str]
    pages: PageTable | None
    options: Mapping[str, Option]
    kernels: tuple[Mapping[str, str], ...]
    origin: Mapping[str, str]


def form_of(run: Run) -> CallForm:
    """The call that a run of a plan makes, without contents."""
    return _native_form(run) if isinstance(run.plan, OperatorPlan) else _trtllm_gen_form(run)


def _native_form(run: Run) -> CallForm:
    plan: OperatorPlan = run.plan
    views, outputs, resident = {}, set(), set()
    for arg, spec, address in zip(plan.operator.tensors, plan.specs, run.call, strict=True):
        if spec is None:
            continue
        views[arg.name] = TensorView(address, *spec)
        if arg.resident:
            resident.add(arg.name)
        elif arg.written:
            outputs.add(arg.name)
    run_options = plan.operator.options_of_run(plan.options, run.numbers)
    option_values = {member.name: getattr(run_options, member.name) for member in fields(run_options)}
    options = {name: value for name, value in option_values.items() if value is None or isinstance(value, _SCALARS)}
    if "max_seq_len" in options:
        options["planned_max_seq_len"] = plan.options.max_seq_len
    if "kv_layout" in options:
        options["kv_layout"] = "NHD"  # of the views
    pages = None
    if resident and {"page_table", "seq_lens"} <= views.keys():
        cache = views[min(resident)]
        pages = PageTable("page_table", "seq_lens", cache.shape[0], cache.shape[1])
    return CallForm(
        operator=plan.operator.name,
        device=plan.device,
        views=views,
        outputs=frozenset(outputs),
        paged=frozenset(resident if pages else ()),
        pages=pages,
        options=options,
        kernels=_kernels(plan.launch_plans()),
        origin=_origin(plan.runtime.native_release().pin, plan.driver.device(plan.device)),
    )


def _trtllm_gen_form(run: Run) -> CallForm:
    """Tensors go by the names of the call's fields."""
    from ...kernels.trtllm_gen.arguments import OutScales, Sage, Scale
    from ...kernels.trtllm_gen.calls import PagedCall

    call: Call = run.call
    plan, runtime = run.plan, run.plan.runtime
    views: dict[str, TensorView] = {}
    options: dict[str, Option] = {}
    for member in fields(call):
        name, value = member.name, getattr(call, member.name)
        if isinstance(value, TensorView):
            views[name] = value
        elif isinstance(value, Scale):
            options[name] = value.value
            if value.pointer:
                views[name] = TensorView.contiguous(value.pointer, "float32", (1,), call.query.device)
        elif isinstance(value, OutScales):
            options |= {f"{name}.{of}": getattr(value, of) for of in ("scale", "block", "first_token")}
            views |= {} if value.scales is None else {f"{name}.scales": value.scales}
        elif isinstance(value, Sage):
            parts = zip("qkpv", value.scales, value.blocks, strict=True)
            for part, scales, block in parts:
                options[f"{name}.block_{part}"] = block
                views |= {} if scales is None else {f"{name}.{part}": scales}
        elif value is not None:
            options[name] = value
    pages = None
    if isinstance(call, PagedCall):
        tokens = call.key.shape[2]
        sparse = bool(getattr(call, "top_k", 0))
        pages = PageTable(
            "block_tables", "seq_lens", call.key.shape[0], 1 if sparse else tokens, tokens if sparse else 1
        )
    paged = {"key", "value", "key_scales", "value_scales"} & views.keys()
    return CallForm(
        operator=TRTLLM_GEN + type(call).__name__,
        device=call.query.device,
        views=views,
        outputs=frozenset({"out", "lse", "out_scales.scales"} & views.keys()),
        paged=frozenset(paged if pages else ()),
        pages=pages,
        options=options,
        kernels=_kernels(plan.launch_plans()),
        origin=_origin(runtime.trtllm_gen_release().pin, runtime.driver.device(call.query.device)),
    )


def _kernels(plans: Iterable[LaunchPlan]) -> tuple[dict[str, str], ...]:
    return tuple(
        {
            "kernel": plan.kernel,
            "symbol": plan.symbol,
            "sha256": plan.sha256,
            "grid": str(plan.grid),
            "block": str(plan.block),
            "shared_bytes": str(plan.shared_bytes),
            "attributes": str(plan.attributes),
            "reason": plan.reason,
        }
        for plan in plans
    )


def _origin(pin: Pin, device: DeviceFacts) -> dict[str, str]:
    torch: Any = sys.modules.get("torch")
    origin = {
        "pin": pin.name,
        "manifest_sha256": pin.manifest_sha256,
        "device": device.name,
        "compute_capability": f"{device.capability[0]}.{device.capability[1]}",
        "multiprocessors": str(device.multiprocessors),
        "cuda_driver": str(device.driver_version),
        "cubin_runtime": _version.__version__,
        "python": platform.python_version(),
        "recorded": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return origin if torch is None else {**origin, "torch": str(torch.__version__)}
