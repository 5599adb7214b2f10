"""Running a recorded call on a device: memory laid out as it was, elements written, one launch, outputs read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from ...attention.operators.context_attention import CONTEXT_ATTENTION, ContextAttentionPlan
from ...attention.operators.mla_decode import MLA_DECODE, MlaDecodePlan
from ...attention.operators.paged_decode import PAGED_DECODE, PagedDecodePlan
from ...attention.pipeline import plan_call
from ...attention.runtime import Runtime
from ...errors import CorruptError, UsageError
from ...launch.driver import Driver
from ...tensor import TensorView
from .call import RecordedCall, RecordedTensor
from .described import TRTLLM_GEN
from .snapshot import page_of, read_elements, span_of, write_elements

_OPERATORS: Mapping[str, tuple[Any, Any]] = {
    operator.name: (operator, plan_class)
    for operator, plan_class in (
        (PAGED_DECODE, PagedDecodePlan),
        (MLA_DECODE, MlaDecodePlan),
        (CONTEXT_ATTENTION, ContextAttentionPlan),
    )
}
_LATENT_CACHES = ("kv_cache", "v_cache")
# A scale on the device -> the number that is its factor, which the option of the scale then holds.
_FACTORS = (("softmax_scale", "k_scale"), ("output_scale", "v_scale"))
_ALIGNMENT = 1024  # bytes of alignment that addresses keep
_POISON = 0xFF  # NaN in all float dtypes


def reruns(operator: str) -> bool:
    """Return whether calls of ``operator`` can be run again."""
    return operator in _OPERATORS or operator in _trtllm_gen_kinds()


def run_again(call: RecordedCall, runtime: Runtime, device: int) -> dict[str, RecordedTensor]:
    """The outputs of one more run on ``device``.

    Tensors whose memory overlapped do so again. Pages that were not recorded are zero.

    Raises:
        UsageError: ``reruns`` says no, or the operator refuses the call.
        CorruptError: an argument is missing.
        DeviceError: as the operator, and where the memory does not suffice.
    """
    if not reruns(call.operator):
        operators = ", ".join((*_OPERATORS, *_trtllm_gen_kinds()))
        raise UsageError(f"operator {call.operator!r}: expected one of {operators}")
    run = _run_native if call.operator in _OPERATORS else _run_trtllm_gen
    driver = runtime.driver
    with driver.using(driver.context_on(device)), _memory(call, driver, device) as views:
        try:
            run(call, views, runtime)
        except (KeyError, TypeError) as error:
            raise CorruptError(f"a call of {call.operator} with inconsistent arguments: {error!r}") from error
        driver.synchronize(0)
        outputs = [name for name, tensor in call.tensors.items() if tensor.output]
        return {name: replace(call.tensors[name], data=read_elements(driver, views[name])) for name in outputs}


@contextmanager
def _memory(call: RecordedCall, driver: Driver, device: int) -> Iterator[dict[str, TensorView]]:
    """The call's tensors on the device, filled; freed behind the block."""
    held: list[int] = []
    views: dict[str, TensorView] = {}
    try:
        for begin, end, names in _blocks(call):
            first = begin % _ALIGNMENT
            size = first + end - begin + _ALIGNMENT
            held.append(driver.allocate(size))
            base = held[-1] + -held[-1] % _ALIGNMENT + first
            driver.fill(held[-1], 0, size, 0)
            for name in names:
                view = call.tensors[name].view
                views[name] = replace(view, pointer=base + view.pointer - begin, device=device)
        for name, tensor in call.tensors.items():
            if tensor.output:
                driver.fill(views[name].pointer, _POISON, span_of(views[name]), 0)
        driver.synchronize(0)
        for name, tensor in call.tensors.items():
            if not tensor.output:
                _write(driver, views[name], tensor, call.page_ids)
        yield views
    finally:
        for address in held:
            driver.free(address)


def _blocks(call: RecordedCall) -> list[tuple[int, int, list[str]]]:
    """Ranges of memory that overlap nowhere, and the tensors in each."""
    blocks: list[tuple[int, int, list[str]]] = []
    spans = sorted((tensor.view.pointer, span_of(tensor.view), name) for name, tensor in call.tensors.items())
    for begin, size, name in spans:
        if blocks and begin < blocks[-1][1]:
            first, end, names = blocks.pop()
            blocks.append((first, max(end, begin + size), [*names, name]))
        else:
            blocks.append((begin, begin + size, [name]))
    return blocks


def _write(driver: Driver, view: TensorView, tensor: RecordedTensor, pages: tuple[int, ...]) -> None:
    if not tensor.paged:
        write_elements(driver, view, tensor.data)
        return
    size = len(tensor.data) // max(1, len(pages))
    for number, page in enumerate(pages):
        if page >= view.shape[0]:
            raise UsageError(f"page {page} of a cache of {view.shape[0]} pages")
        write_elements(driver, page_of(view, page), tensor.data[number * size : (number + 1) * size])


def _run_native(call: RecordedCall, views: Mapping[str, TensorView], runtime: Runtime) -> None:
    """Plan for the bound that was planned for, then run with that of the call."""
    operator, plan_class = _OPERATORS[call.operator]
    if operator is MLA_DECODE:
        views = {name: _without_head(view, name) if name in _LATENT_CACHES else view for name, view in views.items()}
    names = [arg.name for arg in operator.tensors]
    options: dict[str, Any] = dict(call.options)
    scales = {name: views.get(name, options[name]) for name in ("softmax_scale", "output_scale")}
    options_asked = {name: options[name] for name in operator.option_kinds if name in options}  # older files lack some
    factors = {of: options[name] for name, of in _FACTORS if name in views and of in operator.scales}
    arguments = {**dict.fromkeys((*names, *operator.scales)), **factors, **views, **scales}
    planned = operator.options(**{**options_asked, "max_seq_len": options["planned_max_seq_len"]})
    plan = plan_call(plan_class, operator, arguments, planned, runtime=runtime, device_facts=None)
    workspace = plan.prepare(0)
    plan.run(**arguments, max_seq_len=options["max_seq_len"], workspace=workspace, stream=0)


def _trtllm_gen_kinds() -> dict[str, type]:
    from ...attention import trtllm_gen

    kinds = (trtllm_gen.DecodeCall, trtllm_gen.ContextCall, trtllm_gen.RaggedCall)
    return {TRTLLM_GEN + kind.__name__: kind for kind in kinds}


def _run_trtllm_gen(call: RecordedCall, views: Mapping[str, TensorView], runtime: Runtime) -> None:
    from ...attention import trtllm_gen
    from ...kernels.trtllm_gen.arguments import OutScales, Sage, Scale

    kind: Any = _trtllm_gen_kinds()[call.operator]
    options: dict[str, Any] = dict(call.options)
    arguments: dict[str, Any] = {}
    for member in fields(kind):
        name = member.name
        if name in ("bmm1", "bmm2"):
            arguments[name] = Scale(options[name], views[name].pointer if name in views else 0)
        elif name == "out_scales":
            parts = (options[f"{name}.{part}"] for part in ("scale", "block", "first_token"))
            arguments[name] = OutScales(views.get(f"{name}.scales"), *parts)
        elif name == "sage":
            scales: Any = tuple(views.get(f"{name}.{part}") for part in "qkpv")
            blocks: Any = tuple(options[f"{name}.block_{part}"] for part in "qkpv")
            arguments[name] = Sage(scales, blocks)
        elif name in views or name in options:
            arguments[name] = views.get(name, options.get(name))
    trtllm_call = kind(**arguments)
    driver, device = runtime.driver, trtllm_call.query.device
    sizes = (
        trtllm_gen.workspace_size(trtllm_call, runtime=runtime),
        trtllm_gen.counter_size(trtllm_call, runtime=runtime),
    )
    held = [driver.allocate(max(16, size)) for size in sizes]
    try:
        for address, size in zip(held, sizes, strict=True):
            driver.fill(address, 0, max(16, size), 0)
        workspace, counters = (
            TensorView.contiguous(address, "uint8", (max(16, size),), device)
            for address, size in zip(held, sizes, strict=True)
        )
        trtllm_gen.run(trtllm_call, workspace, counters=counters, stream=0, runtime=runtime)
        driver.synchronize(0)
    finally:
        for address in held:
            driver.free(address)


def _without_head(cache: TensorView, name: str) -> TensorView:
    """A latent cache of the recorded form, ``[pages, page_size, 1, width]``, as its operator takes it."""
    if len(cache.shape) != 4:
        raise UsageError(f"{name}: shape {cache.shape}, expected [pages, page_size, 1, width]")
    shape, strides = ((*of[:2], of[3]) for of in (cache.shape, cache.strides))
    return replace(cache, shape=shape, strides=strides)
