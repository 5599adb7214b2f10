"""``explain``: which kernel a call would launch, why, and with which parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..errors import UsageError
from . import options, output

if TYPE_CHECKING:
    from ..config import Config
    from ..kernels.explanation import Explanation
    from ..launch.driver import DeviceFacts

NATIVE_SM = 90
TRTLLM_GEN_SMS = (100, 103)
BACKENDS = ("auto", "native", "trtllm-gen")
POLICIES = ("best", "reference")
FAMILIES = {"decode": "decode", "prefill": "context"}  # --family -> --op
# Parameters of only one of the backends, besides the fields of its `CallSizes` or `Shapes`.
NATIVE_ONLY = frozenset({"gpu"})
TRTLLM_GEN_ONLY = frozenset({"case", "cases", "out", "both", "policy"})
# Options that native operators have too, but that do not change the launch.
DECIDES_NOTHING = frozenset({"lse"})
SizesT = TypeVar("SizesT")
# The groups of options on the help page.
_OPERATOR, _GPU, _SIZES, _DTYPES, _ATTENTION = "Operator and kernels", "GPU", "Sizes", "Dtypes", "Attention and launch"
_NATIVE, _TRTLLM_GEN = "Native kernels alone", "trtllm-gen alone"


def _size(name: str, kind: Any, default: Any, flag: str | None, text: str, group: str, value: str | None = None) -> Any:
    """An option that is a field of a call's sizes, of the device, or of both."""
    flags = () if flag is None else (flag,)
    option = typer.Option(*flags, help=text, rich_help_panel=group, metavar=value, show_default=default is not None)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


# The options that `CallSizes` (native kernels) and `Shapes` (trtllm-gen) have as fields, and those of the device.
SIZES = (
    _size(
        *("operation", str, "decode", "--op"),
        *("decode, context, ragged; native: mla, append, merge, draft_mask, sparse_mla", _OPERATOR, "NAME"),
    ),
    _size("sm", int | None, None, "--sm", "GPU model: 80 to 121; default 90, of trtllm-gen 100.", _GPU, "SM"),
    _size("multiprocessors", int | None, None, "--sms", "Multiprocessors of the GPU; default by --sm.", _GPU, "N"),
    _size("batch", int, 1, "--batch", "Sequences.", _SIZES, "N"),
    _size("q_len", int, 1, "--q-len", "Upper bound on the query lengths.", _SIZES, "N"),
    _size("kv_len", int, 1024, "--kv-len", "Upper bound on the KV lengths.", _SIZES, "N"),
    _size("heads_q", int, 32, "--heads-q", "Query heads.", _SIZES, "N"),
    _size("heads_kv", int | None, None, "--heads-kv", "KV heads; default 8, of native MLA 1.", _SIZES, "N"),
    _size("head_dim", int, 128, "--head-dim", "Head dimension of Q and K; 576, 320, 288, 160: MLA.", _SIZES, "N"),
    _size("head_dim_v", int | None, None, "--head-dim-v", "Head dimension of V, if another.", _SIZES, "N"),
    _size("page", int, 32, "--page", "Tokens per KV page.", _SIZES, "N"),
    _size("tokens", int | None, None, "--tokens", "Query tokens of all requests, if lengths differ.", _SIZES, "N"),
    _size(
        *("dtype_q", str | None, None, "--dtype-q"),
        *("bf16 (default), fp16, e4m3, int8; native: by the KV type.", _DTYPES, "TYPE"),
    ),
    _size("dtype_kv", str, "bf16", "--dtype-kv", "Likewise, or e2m1.", _DTYPES, "TYPE"),
    _size("dtype_out", str | None, None, "--dtype-out", "Likewise, or e2m1.", _DTYPES, "TYPE"),
    _size("window", int, 0, "--window", "Visible tokens; 0 for all.", _ATTENTION, "N"),
    _size(
        *("batch_invariant", bool, False, "--batch-invariant"),
        *("Output that does not depend on other requests.", _ATTENTION),
    ),
    _size("pdl", bool, False, "--pdl", "With programmatic dependent launch.", _ATTENTION),
    _size("gpu", str | None, None, "--gpu", "The GPU's name, which selects measured costs.", _NATIVE, "NAME"),
    _size("soft_cap", bool, False, "--soft-cap", "A logit soft cap (context).", _NATIVE),
    _size("top_k", int, 0, "--top-k", "KV tokens of sparse MLA; 0 is dense.", _TRTLLM_GEN, "N"),
    _size("top_k_lens", bool, False, "--top-k-lens", "Numbers of sparse tokens differ between queries.", _TRTLLM_GEN),
    _size("shared_index", bool, True, None, "One page table for K and V.", _TRTLLM_GEN),
    _size("causal", bool, True, None, "Causal mask (context and ragged).", _TRTLLM_GEN),
    _size("lse", bool, False, "--lse", "With the LSE.", _TRTLLM_GEN),
    _size("skip_softmax", float, 0.0, "--skip-softmax", "Threshold scale factor; 0 is off.", _TRTLLM_GEN, "X"),
    _size("workspace", int, 128 << 20, "--workspace", "Bytes of the workspace.", _TRTLLM_GEN, "BYTES"),
    _size(
        *("occupancy", str, "floor", "--occupancy"),
        *("Clusters held at once: floor, gpc18, const:N.", _TRTLLM_GEN, "NAME"),
    ),
)


def _takes_sizes(function: Callable[..., None]) -> Callable[..., None]:
    """The function with an option for each of ``SIZES``, ahead of trtllm-gen's own; it reads them from its context."""
    signature = inspect.signature(function, eval_str=True)
    named = [
        parameter for parameter in signature.parameters.values() if parameter.kind != inspect.Parameter.VAR_KEYWORD
    ]
    place = next(number for number, parameter in enumerate(named) if parameter.name == "policy")
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*named[:place], *SIZES, *named[place:]]
    )
    return function


def _option(flag: str, text: str, group: str, value: str | None = None, *, shown: bool = True) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=group, metavar=value, show_default=shown)


@_takes_sizes
def explain(
    context: typer.Context,
    case: Annotated[
        str | None,
        typer.Argument(metavar="CASE.json", help="trtllm-gen: a case or record as JSON, '-' for the standard input."),
    ] = None,
    *,
    backend: Annotated[str, _option("--backend", "native, trtllm-gen, or auto: by --sm.", _OPERATOR, "NAME")] = "auto",
    family: Annotated[
        str | None,
        _option(
            *("--family", "decode or prefill, in place of --op; of prefill whole prompts without --q-len."),
            *(_OPERATOR, "NAME"),
            shown=False,
        ),
    ] = None,
    release: Annotated[
        str | None,
        _option("--release", "Pinned release; default this version's of the backend.", _OPERATOR, "PIN", shown=False),
    ] = None,
    policy: Annotated[str, _option("--policy", "best or reference.", _TRTLLM_GEN, "NAME")] = "best",
    cases: Annotated[
        Path | None,
        _option(
            "--cases",
            "Decide every case of a .jsonl[.gz] file, '-' for the standard input.",
            _TRTLLM_GEN,
            "FILE",
            shown=False,
        ),
    ] = None,
    out: Annotated[Path | None, _option("--out", "Output file of --cases.", _TRTLLM_GEN, "FILE", shown=False)] = None,
    both: Annotated[bool, _option("--both", "With --cases: our policy too, under 'best'.", _TRTLLM_GEN)] = False,
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
    **sizes: Any,
) -> None:
    """Explain which kernel a call launches, and why. Needs no GPU."""
    config = options.make_config(store, source, pins, offline)
    if family is not None:
        _take_family(context, family)
    with _named_by_flags(context):
        if _is_native(context):
            explanation = _explain_native(context, config, release)
            if json:
                output.emit_json("explain", explanation.record)
            else:
                output.explanation(explanation.choice, explanation.details if candidates else ())
            return
    if policy not in POLICIES:
        raise UsageError(f"--policy {policy!r}: expected one of {', '.join(POLICIES)}")
    if cases is None and (out is not None or both):
        raise UsageError("--out and --both: expected only with --cases")
    if cases is not None and (case is not None or json):
        raise UsageError("--cases: expected without CASE.json and --json")
    from ..kernels.trtllm_gen.traits import Policy
    from . import explain_trtllm_gen
    from .example_call import Shapes

    kernels = explain_trtllm_gen.kernels_of(config, release or explain_trtllm_gen.RELEASE)
    if cases is not None:
        explain_trtllm_gen.decide_all(cases, out, kernels, both=both)
        return
    with _named_by_flags(context):
        if case is None:
            shapes = _stated(context, Shapes)
            explain_trtllm_gen.explain_call(shapes, kernels, Policy(policy), json=json, candidates=candidates)
        else:
            explain_trtllm_gen.explain_case(case, kernels, Policy(policy), json=json, candidates=candidates)


def _take_family(context: typer.Context, family: str) -> None:
    if family not in FAMILIES:
        raise UsageError(f"--family {family!r}: expected {' or '.join(FAMILIES)}")
    if _is_named(context, "operation"):
        raise UsageError(f"--family {family} and --op {context.params['operation']}: expected one of them")
    context.params["operation"] = FAMILIES[family]
    if family == "prefill" and not _is_named(context, "q_len"):
        context.params["q_len"] = context.params["kv_len"]


def _is_native(context: typer.Context) -> bool:
    """Return whether a native operator is explained: by the backend's name, or because ``auto`` takes it.

    Raises:
        UsageError: the backend is unknown, or an option was given that decides nothing or is the other backend's.
        BackendError: ``auto`` takes no backend on this GPU.
    """
    from ..attention.backends import AUTO, FORMER_NATIVE, NATIVE, resolve_backend
    from ..attention.call_sizes import CallSizes
    from ..attention.explain import explained_operator
    from .example_call import Shapes

    if context.params["backend"] == FORMER_NATIVE:
        output.note_line(
            f"--backend {FORMER_NATIVE} is now called {NATIVE}; the next minor version refuses the old name"
        )
        context.params["backend"] = NATIVE
    backend, sm = context.params["backend"], context.params["sm"]
    if backend not in BACKENDS:
        raise UsageError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    named = {name for name in context.params if _is_named(context, name)}
    native: bool = backend == NATIVE
    if backend == AUTO and sm not in TRTLLM_GEN_SMS and not named & {"case", "cases"}:
        operator = explained_operator(_stated(context, CallSizes)).operator
        native = resolve_backend(operator, AUTO, _device(context, by_sm_alone=True)) == NATIVE
    sizes, shapes = ({field.name for field in fields(kind)} for kind in (CallSizes, Shapes))
    others = TRTLLM_GEN_ONLY | shapes - sizes - DECIDES_NOTHING if native else NATIVE_ONLY | sizes - shapes
    for name in sorted(named & (others - {"sm", "multiprocessors"})):
        words, other = (NATIVE, "trtllm-gen") if native else ("trtllm-gen", NATIVE)
        raise UsageError(f"`{name}`: not an option of --backend {words}, only of {other}")
    for name in sorted(named & DECIDES_NOTHING if native else ()):
        raise UsageError(f"`{name}`: has no effect with --backend {NATIVE}")
    return native


def _device(context: typer.Context, *, by_sm_alone: bool = False) -> DeviceFacts:
    from ..kernels.native.device_models import describe_device

    stated = context.params
    sm = NATIVE_SM if stated["sm"] is None else stated["sm"]
    return describe_device(sm) if by_sm_alone else describe_device(sm, stated["multiprocessors"], stated["gpu"])


def _explain_native(context: typer.Context, config: Config, release: str | None) -> Explanation:
    from ..attention import explain
    from ..attention.call_sizes import CallSizes
    from ..attention.runtime import NATIVE_RELEASE, Runtime

    sizes = _stated(context, CallSizes)
    explain.explained_operator(sizes)
    device = _device(context)
    kernels = Runtime(config, release=release or NATIVE_RELEASE).native_release().kernels
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


def _is_named(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
