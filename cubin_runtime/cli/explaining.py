"""``explain``: which kernel a call would launch, why, and with which parameters."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import StoreError, UsageError
from . import explaining_own, options, output

if TYPE_CHECKING:
    from ..kernels.trtllm_gen.kernel_finder import KernelFinder
    from ..kernels.trtllm_gen.traits import Policy

RELEASE = "trtllm-gen-0.6.13"
DEFAULT_SM = 100
DEFAULT_MULTIPROCESSORS = 148
DEFAULT_DTYPE = "bf16"
POLICIES = ("best", "reference")


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("explain")(explain)


def explain(
    context: typer.Context,
    case: Annotated[
        str | None, typer.Argument(metavar="[CASE.json]", help="A case or record as JSON, '-' for the standard input.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="hopper (our decode kernels), trtllm-gen, or auto: by --sm.")
    ] = "auto",
    operation: Annotated[str, typer.Option("--op", help="decode, context or ragged.")] = "decode",
    sm: Annotated[
        int | None,
        typer.Option(
            "--sm", help="GPU model: 100 (default) or 103; hopper: 80 to 121, default 90.", show_default=False
        ),
    ] = None,
    multiprocessors: Annotated[
        int | None,
        typer.Option("--sms", help="Multiprocessors of the GPU; default 148, hopper: by --sm.", show_default=False),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="hopper: the GPU's name, which measured costs go by.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences.")] = 1,
    q_len: Annotated[int, typer.Option("--q-len", help="Bound of the query lengths.")] = 1,
    kv_len: Annotated[int, typer.Option("--kv-len", help="Bound of the KV lengths.")] = 1024,
    heads_q: Annotated[int, typer.Option("--heads-q", help="Query heads.")] = 32,
    heads_kv: Annotated[
        int | None,
        typer.Option("--heads-kv", help="KV heads; default 8, of hopper's MLA 1.", show_default=False),
    ] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Head dimension of Q and K; 576 or 320: MLA.")] = 128,
    head_dim_v: Annotated[
        int | None, typer.Option("--head-dim-v", help="Head dimension of V, if another.", show_default=False)
    ] = None,
    dtype_q: Annotated[
        str | None,
        typer.Option("--dtype-q", help="bf16 (default), fp16, e4m3, int8; hopper: by the KV type.", show_default=False),
    ] = None,
    dtype_kv: Annotated[str, typer.Option("--dtype-kv", help="Likewise, or e2m1.")] = "bf16",
    dtype_out: Annotated[str | None, typer.Option("--dtype-out", help="Likewise, or e2m1.", show_default=False)] = None,
    page: Annotated[int, typer.Option("--page", help="Tokens of a KV page.")] = 32,
    window: Annotated[int, typer.Option("--window", help="Visible tokens; 0 for all.")] = 0,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="hopper: bits that no neighbour changes.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", help="hopper: query tokens of all, where lengths differ.", show_default=False),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", help="KV tokens of sparse MLA; 0 is dense.")] = 0,
    causal: Annotated[bool, typer.Option(help="Causal mask (context and ragged).")] = True,
    lse: Annotated[bool, typer.Option("--lse", help="trtllm-gen: with the LSE.")] = False,
    pdl: Annotated[bool, typer.Option("--pdl", help="trtllm-gen: with programmatic dependent launch.")] = False,
    multi_ctas: Annotated[bool, typer.Option(help="Let several CTAs share a sequence's KV.")] = True,
    skip_softmax: Annotated[float, typer.Option("--skip-softmax", help="Threshold scale factor; 0 is off.")] = 0.0,
    workspace: Annotated[int, typer.Option("--workspace", help="Bytes of the workspace.")] = 128 << 20,
    occupancy: Annotated[
        str, typer.Option("--occupancy", help="Clusters held at once: floor, gpc18, const:N.")
    ] = "floor",
    policy: Annotated[str, typer.Option("--policy", help="best or reference.")] = "best",
    cases: Annotated[
        Path | None, typer.Option("--cases", help="Decide every case of a .jsonl[.gz] file.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where --cases writes.", show_default=False)] = None,
    both: Annotated[bool, typer.Option("--both", help="With --cases: our policy too, under 'best'.")] = False,
    release: Annotated[
        str | None,
        typer.Option(
            "--release", help=f"Pinned release; default {RELEASE}, hopper: this version's.", show_default=False
        ),
    ] = None,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Say which kernel a call launches and why; no GPU is needed."""
    if explaining_own.takes(context, backend, sm):
        asked = explaining_own.Asked(
            operation=operation,
            sm=sm,
            multiprocessors=multiprocessors,
            gpu=gpu,
            batch=batch,
            q_len=q_len,
            tokens=tokens,
            kv_len=kv_len,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            page=page,
            dtype_q=dtype_q,
            dtype_kv=dtype_kv,
            dtype_out=dtype_out,
            window=window,
            batch_invariant=batch_invariant,
        )
        explaining_own.explain(options.make_config(store, source, pins, offline), release, asked, json)
        return
    from ..kernels.trtllm_gen.traits import Policy
    from .example_case import Shapes, case_of

    if policy not in POLICIES:
        raise UsageError(f"--policy {policy!r}: expected one of {', '.join(POLICIES)}")
    if cases is None and (out is not None or both):
        raise UsageError("--out and --both go with --cases")
    kernels = _kernels(options.make_config(store, source, pins, offline), release or RELEASE)
    if cases is not None:
        if case is not None or json:
            raise UsageError("--cases goes alone: no CASE.json and no --json")
        _decide_all(cases, out, kernels, both)
        return
    shapes = Shapes(
        operation=operation,
        sm=DEFAULT_SM if sm is None else sm,
        multiprocessors=DEFAULT_MULTIPROCESSORS if multiprocessors is None else multiprocessors,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads_q=heads_q,
        heads_kv=explaining_own.DEFAULT_HEADS_KV if heads_kv is None else heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype_q=dtype_q or DEFAULT_DTYPE,
        dtype_kv=dtype_kv,
        dtype_out=dtype_out or DEFAULT_DTYPE,
        page=page,
        window=window,
        top_k=top_k,
        causal=causal,
        lse=lse,
        pdl=pdl,
        multi_ctas=multi_ctas,
        skip_softmax=skip_softmax,
        workspace=workspace,
        occupancy=occupancy,
    )
    stated = case_of(shapes) if case is None else _read_case(case)
    _explain_one(stated, kernels, Policy(policy), json)


def _kernels(config: Any, release: str) -> KernelFinder:
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


def _explain_one(case: dict[str, Any], kernels: KernelFinder, policy: Policy, json: bool) -> None:
    from ..kernels.trtllm_gen import explanation
    from ..kernels.trtllm_gen.decision import decide
    from .recorded_cases import occupancy_of, problem_of
    from .recorded_decisions import record_of_case

    if json:
        output.emit_json("explain", {"policy": policy.value, **record_of_case(case, kernels, policy)})
        return
    decision = decide(problem_of(case), kernels, occupancy_of(case), policy)
    output.facts(explanation.facts(decision))
    tables = (
        (explanation.PASS_COLUMNS, explanation.pass_rows(decision)),
        (explanation.CANDIDATE_COLUMNS, explanation.candidate_rows(decision)),
        (explanation.TENSOR_MAP_COLUMNS, explanation.tensor_map_rows(decision)),
        (explanation.PARAMETER_COLUMNS, explanation.parameter_rows(decision)),
    )
    for columns, rows in tables:
        if rows:
            output.line()
            output.table(columns, rows)
