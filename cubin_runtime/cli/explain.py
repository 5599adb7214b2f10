"""``explain``: which kernel a call would launch, why, and with which parameters."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..errors import StoreError, UsageError
from . import options, output

if TYPE_CHECKING:
    from ..config import Config
    from ..kernels.explanation import Explanation, Facts, Table
    from ..kernels.trtllm_gen.kernel_finder import KernelFinder
    from ..kernels.trtllm_gen.traits import Policy

RELEASE = "trtllm-gen-0.6.13"
NATIVE_SM = 90
TRTLLM_GEN_SMS = (100, 103)
# The groups of options on the help page.
_OPERATOR, _GPU, _SIZES, _DTYPES, _ATTENTION, _LAUNCH, _MANY = (
    "Operator and kernels",
    "GPU",
    "Sizes",
    "Dtypes",
    "Attention",
    "Launch",
    "Many cases (trtllm-gen)",
)
BACKENDS = ("auto", "native", "trtllm-gen")
POLICIES = ("best", "reference")
FAMILIES = {"decode": "decode", "prefill": "context"}  # --family -> --op
# What only one of the backends has, besides the fields of its `CallSizes` or `Shapes`, by the parameters' names.
NATIVE_ONLY = frozenset({"gpu"})
TRTLLM_GEN_ONLY = frozenset({"case", "cases", "out", "both", "policy"})
# Options that native operators have too, but that do not change the launch.
DECIDES_NOTHING = frozenset({"lse"})
SizesT = TypeVar("SizesT")


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("explain")(explain)


def _option(flag: str, text: str, group: str, name: str | None = None) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=group, metavar=name)


def _optional(flag: str, text: str, group: str, name: str | None = None) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=group, metavar=name, show_default=False)


def explain(
    context: typer.Context,
    case: Annotated[
        str | None, typer.Argument(metavar="CASE.json", help="A case or record as JSON, '-' for the standard input.")
    ] = None,
    backend: Annotated[str, _option("--backend", "native, trtllm-gen, or auto: by --sm.", _OPERATOR, "NAME")] = "auto",
    operation: Annotated[
        str,
        _option("--op", "decode, context, ragged; native: append, merge, draft_mask, sparse_mla", _OPERATOR, "NAME"),
    ] = "decode",
    family: Annotated[
        str | None,
        _optional(
            "--family",
            "decode or prefill, in place of --op; of prefill whole prompts without --q-len.",
            _OPERATOR,
            "NAME",
        ),
    ] = None,
    sm: Annotated[
        int | None, _optional("--sm", "GPU model: 80 to 121; default 90, of trtllm-gen 100.", _GPU, "SM")
    ] = None,
    multiprocessors: Annotated[
        int | None, _optional("--sms", "Multiprocessors of the GPU; default by --sm.", _GPU, "N")
    ] = None,
    gpu: Annotated[
        str | None, _optional("--gpu", "native: the GPU's name, which selects measured costs.", _GPU, "NAME")
    ] = None,
    batch: Annotated[int, _option("--batch", "Sequences.", _SIZES, "N")] = 1,
    q_len: Annotated[int, _option("--q-len", "Upper bound on the query lengths.", _SIZES, "N")] = 1,
    kv_len: Annotated[int, _option("--kv-len", "Upper bound on the KV lengths.", _SIZES, "N")] = 1024,
    heads_q: Annotated[int, _option("--heads-q", "Query heads.", _SIZES, "N")] = 32,
    heads_kv: Annotated[
        int | None, _optional("--heads-kv", "KV heads; default 8, of native MLA 1.", _SIZES, "N")
    ] = None,
    head_dim: Annotated[int, _option("--head-dim", "Head dimension of Q and K; 576 or 320: MLA.", _SIZES, "N")] = 128,
    head_dim_v: Annotated[
        int | None, _optional("--head-dim-v", "Head dimension of V, if another.", _SIZES, "N")
    ] = None,
    dtype_q: Annotated[
        str | None, _optional("--dtype-q", "bf16 (default), fp16, e4m3, int8; native: by the KV type.", _DTYPES, "TYPE")
    ] = None,
    dtype_kv: Annotated[str, _option("--dtype-kv", "Likewise, or e2m1.", _DTYPES, "TYPE")] = "bf16",
    dtype_out: Annotated[str | None, _optional("--dtype-out", "Likewise, or e2m1.", _DTYPES, "TYPE")] = None,
    page: Annotated[int, _option("--page", "Tokens per KV page.", _SIZES, "N")] = 32,
    window: Annotated[int, _option("--window", "Visible tokens; 0 for all.", _ATTENTION, "N")] = 0,
    batch_invariant: Annotated[
        bool, _option("--batch-invariant", "Output that does not depend on other requests.", _ATTENTION)
    ] = False,
    tokens: Annotated[
        int | None, _optional("--tokens", "Query tokens of all requests, if their lengths differ.", _SIZES, "N")
    ] = None,
    soft_cap: Annotated[bool, _option("--soft-cap", "native: a logit soft cap (context).", _ATTENTION)] = False,
    top_k: Annotated[int, _option("--top-k", "KV tokens of sparse MLA; 0 is dense.", _ATTENTION, "N")] = 0,
    top_k_lens: Annotated[
        bool, _option("--top-k-lens", "Numbers of sparse tokens differ between queries.", _ATTENTION)
    ] = False,
    shared_index: Annotated[bool, typer.Option(rich_help_panel=_ATTENTION, help="One page table for K and V.")] = True,
    causal: Annotated[bool, typer.Option(rich_help_panel=_ATTENTION, help="Causal mask (context and ragged).")] = True,
    lse: Annotated[bool, _option("--lse", "trtllm-gen: with the LSE.", _ATTENTION)] = False,
    pdl: Annotated[bool, _option("--pdl", "With programmatic dependent launch.", _LAUNCH)] = False,
    skip_softmax: Annotated[
        float, _option("--skip-softmax", "Threshold scale factor; 0 is off.", _ATTENTION, "X")
    ] = 0.0,
    workspace: Annotated[int, _option("--workspace", "Bytes of the workspace.", _LAUNCH, "BYTES")] = 128 << 20,
    occupancy: Annotated[
        str, _option("--occupancy", "Clusters held at once: floor, gpc18, const:N.", _LAUNCH, "NAME")
    ] = "floor",
    policy: Annotated[str, _option("--policy", "best or reference.", _LAUNCH, "NAME")] = "best",
    cases: Annotated[
        Path | None, _optional("--cases", "Decide every case of a .jsonl[.gz] file.", _MANY, "FILE")
    ] = None,
    out: Annotated[Path | None, _optional("--out", "Output file of --cases.", _MANY, "FILE")] = None,
    both: Annotated[bool, _option("--both", "With --cases: our policy too, under 'best'.", _MANY)] = False,
    release: Annotated[
        str | None,
        _optional("--release", f"Pinned release; default this version's, of trtllm-gen {RELEASE}.", _OPERATOR, "PIN"),
    ] = None,
    candidates: Annotated[
        bool,
        typer.Option(
            "--candidates", help="Also details and the candidates; trtllm-gen: descriptors and parameters, too."
        ),
    ] = False,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Explain which kernel a call launches, and why. Needs no GPU."""
    config = options.make_config(store, source, pins, offline)
    if family is not None:
        _take_family(context, family)
    with _named_by_flags(context):
        explanation = _explain_native(context, config) if _is_native(context) else None
    if explanation is not None:
        if json:
            output.emit_json("explain", explanation.record)
        else:
            _show(explanation.choice, explanation.details if candidates else ())
        return
    from ..kernels.trtllm_gen.traits import Policy
    from .example_case import Shapes, case_of

    if policy not in POLICIES:
        raise UsageError(f"--policy {policy!r}: expected one of {', '.join(POLICIES)}")
    if cases is None and (out is not None or both):
        raise UsageError("--out and --both: expected only with --cases")
    kernels = _kernels(config, release or RELEASE)
    if cases is None:
        with _named_by_flags(context):
            stated = case_of(_stated(context, Shapes)) if case is None else _read_case(case)
        _explain_case(stated, kernels, Policy(policy), json, candidates)
    elif case is not None or json:
        raise UsageError("--cases: expected without CASE.json and --json")
    else:
        _decide_all(cases, out, kernels, both)


def _take_family(context: typer.Context, family: str) -> None:
    if family not in FAMILIES:
        raise UsageError(f"--family {family!r}: expected {' or '.join(FAMILIES)}")
    if _is_given(context, "operation"):
        raise UsageError(f"--family {family} and --op {context.params['operation']}: expected one of them")
    context.params["operation"] = FAMILIES[family]
    if family == "prefill" and not _is_given(context, "q_len"):
        context.params["q_len"] = context.params["kv_len"]


def _is_native(context: typer.Context) -> bool:
    """Return whether a native operator is explained: by the backend's name, or because ``auto`` takes it.

    Raises:
        UsageError: the backend is unknown, or an option was given that decides nothing or is the other backend's.
        BackendError: ``auto`` takes no backend on this GPU.
    """
    from ..attention.backends import AUTO, FORMER_NATIVE, NATIVE, resolve_backend
    from ..attention.explain import CallSizes, explained_operator
    from ..kernels.native.device_models import describe_device
    from .example_case import Shapes

    if context.params["backend"] == FORMER_NATIVE:
        output.note_line(
            f"--backend {FORMER_NATIVE} is now called {NATIVE}; the next minor version refuses the old name"
        )
        context.params["backend"] = NATIVE
    backend, sm = context.params["backend"], context.params["sm"]
    if backend not in BACKENDS:
        raise UsageError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    given = {name for name in context.params if _is_given(context, name)}
    native: bool = backend == NATIVE
    if backend == AUTO and sm not in TRTLLM_GEN_SMS and not given & {"case", "cases"}:
        operator = explained_operator(_stated(context, CallSizes)).operator
        native = resolve_backend(operator, AUTO, describe_device(NATIVE_SM if sm is None else sm)) == NATIVE
    sizes, shapes = ({field.name for field in fields(kind)} for kind in (CallSizes, Shapes))
    others = TRTLLM_GEN_ONLY | shapes - sizes - DECIDES_NOTHING if native else NATIVE_ONLY | sizes - shapes
    for name in sorted(given & (others - {"sm", "multiprocessors"})):
        words, other = (NATIVE, "trtllm-gen") if native else ("trtllm-gen", NATIVE)
        raise UsageError(f"`{name}`: not an option of --backend {words}, only of {other}")
    for name in sorted(given & DECIDES_NOTHING if native else ()):
        raise UsageError(f"`{name}`: has no effect with --backend {NATIVE}")
    return native


def _explain_native(context: typer.Context, config: Config) -> Explanation:
    from ..attention import explain
    from ..attention.runtime import NATIVE_RELEASE, Runtime
    from ..kernels.native.device_models import describe_device

    given = context.params
    sizes = _stated(context, explain.CallSizes)
    explain.explained_operator(sizes)
    device = describe_device(NATIVE_SM if given["sm"] is None else given["sm"], given["multiprocessors"], given["gpu"])
    kernels = Runtime(config, release=given["release"] or NATIVE_RELEASE).native_release().kernels
    return explain.explain(sizes, kernels, device)


def _stated(context: typer.Context, kind: type[SizesT]) -> SizesT:
    """The dataclass ``kind`` of the options that are its fields; those without a value keep its default."""
    named = {field.name: context.params[field.name] for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in named.items() if value is not None})


@contextmanager
def _named_by_flags(context: typer.Context) -> Iterator[None]:
    """Errors say ``--q-len 17`` where they would say ``q_len=17``, and ``--q-len`` for ``q_len`` in backticks."""
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    flags["case"] = "CASE.json"
    try:
        yield
    except UsageError as error:
        if type(error) is not UsageError:
            raise
        names = "|".join(map(str, flags))
        text = re.sub(rf"`({names})`", lambda match: flags[match[1]], str(error))
        raise UsageError(re.sub(rf"\b({names})=", lambda match: f"{flags[match[1]]} ", text)) from error


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _show(choice: Facts, details: Sequence[Facts | Table]) -> None:
    """Print the choice, and after it the details that were asked for."""
    from ..kernels.explanation import Table

    output.facts(choice)
    for section in details:
        output.line()
        if isinstance(section, Table):
            output.table(section.columns, section.rows)
        else:
            output.facts(section)
    if not details:
        output.note_line("--candidates lists what was compared, and details")


def _kernels(config: Config, release: str) -> KernelFinder:
    from ..artifacts.library import Library
    from ..artifacts.releases.catalog import open_kernel_index
    from ..kernels.abi import abi_layouts
    from ..kernels.trtllm_gen.kernel_finder import KernelFinder

    library = Library(config)
    pin = library.pins.get(release)
    layouts = abi_layouts(pin.abi)
    if "KernelParams" not in layouts:
        raise UsageError(f"{pin.name}: its kernels take {', '.join(layouts)}, expected a trtllm-gen release")
    index = open_kernel_index(library, pin, fetch=not config.offline)
    for what, columns in (("new", index.new_columns), ("missing", index.missing_columns)):
        if columns:
            output.note_line(f"{pin.name}: {what} columns in the metadata: {', '.join(columns)}")
    return KernelFinder(index)


def _read_case(case: str) -> dict[str, Any]:
    from .recorded_cases import case_in, read_lines

    if case == "-":
        return case_in(sys.stdin.read(), "standard input")
    return case_in(b"".join(read_lines(Path(case))), case)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Millions of small values and no cycles among them: looking for cycles would take a tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collecting()
def _decide_all(cases: Path, out: Path | None, kernels: KernelFinder, both: bool) -> None:
    from .recorded_cases import read_lines
    from .recorded_decisions import decide_lines

    decisions = decide_lines(read_lines(cases), kernels, both=both, where=str(cases))
    if out is None:
        for decision in decisions:
            output.line(decision)
        return
    count = 0
    try:
        with out.open("w", encoding="ascii") as opened:
            for decision in decisions:
                opened.write(decision + "\n")
                count += 1
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror}") from error
    output.note_line(f"{count} cases decided, written to {out}")


def _explain_case(case: dict[str, Any], kernels: KernelFinder, policy: Policy, json: bool, candidates: bool) -> None:
    from ..kernels.trtllm_gen import explanation
    from .recorded_decisions import decision_of_case, decision_record

    decision = decision_of_case(case, kernels, policy)
    if json:
        record = decision_record(decision, case.get("stream"))
        outcome = ("ok", "error", "error_kind")  # of files of cases; here errors are in `errors`
        shown = {name: value for name, value in record.items() if name not in outcome}
        output.emit_json("explain", {"backend": "trtllm-gen", "policy": policy.value, **shown})
    else:
        _show(explanation.choice(decision), explanation.details(decision) if candidates else ())
