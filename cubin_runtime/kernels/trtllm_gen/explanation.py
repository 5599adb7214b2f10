"""A decision as text: what is launched and why, and tables of passes, candidates, descriptors and parameters."""

from __future__ import annotations

from ...launch.structs import FastModDiv
from ...launch.tensormap import TensorMapSpec
from ..explanation import Facts, Table
from .decision import Decision
from .params import KERNEL_PARAMS
from .problem import Problem
from .traits import MultiCtasMode, word_of

Row = tuple[object, ...]
PASS_COLUMNS = ("pass", "tile q", "CTAs", "multi-CTA", "kernel")
CANDIDATE_COLUMNS = ("pass", "tile q", "modelled cost", "kernel")
TENSOR_MAP_COLUMNS = ("descriptor", "type", "dims", "strides (bytes)", "box", "swizzle", "address")
PARAMETER_COLUMNS = ("offset", "parameter", "type", "value", "meaning")


def choice(decision: Decision) -> Facts:
    """The launch and its problem, as (name, value)."""
    meta, problem, geometry = decision.meta, decision.problem, decision.selection.geometry
    x, y, z = decision.grid
    rows: list[tuple[str, object]] = [
        ("kernel", meta.symbol),
        ("because", _because(problem)),
        ("tile", _tile(decision)),
        ("grid", f"{x} x {y} x {z} = {geometry.ctas} CTAs on {problem.multiprocessors} multiprocessors"),
        (
            "split",
            f"{geometry.ctas_q} along queries, {geometry.ctas_kv} along KV, {geometry.heads_per_cta} heads a CTA",
        ),
    ]
    if decision.reduction is not None:
        rows.append(("then", f"reduction over KV splits, grid {decision.reduction.grid}"))
    if decision.lse is not None:
        rows.append(("then", f"LSE of {decision.lse.values['rows']} rows, grid {decision.lse.grid}"))
    return tuple(rows)


def details(decision: Decision) -> tuple[Facts | Table, ...]:
    """Further facts of the launch, and the tables that have rows."""
    tables = (
        Table(PASS_COLUMNS, pass_rows(decision)),
        Table(CANDIDATE_COLUMNS, candidate_rows(decision)),
        Table(TENSOR_MAP_COLUMNS, tensor_map_rows(decision)),
        Table(PARAMETER_COLUMNS, parameter_rows(decision)),
    )
    return _details(decision), *(table for table in tables if table.rows)


def _details(decision: Decision) -> Facts:
    selection, meta, problem = decision.selection, decision.meta, decision.problem
    rows: list[tuple[str, object]] = [("asked for", f"{problem.dtypes}: {selection.key}")]
    if problem.is_generation and not problem.is_mla:
        rows.append(("tile size", _tile_size(decision)))
    if selection.asked is not None:
        asked = selection.asked
        held = f"{asked.active_clusters} clusters of {asked.cluster_x} at once, the grid has {asked.grid}"
        verdict = "so the parts are merged through global memory" if selection.left_cluster else "so clusters stay"
        rows.append(("occupancy", f"{held}: {verdict}"))
    rows += [
        ("block", f"{meta.threads} threads, {meta.shared_bytes} bytes of dynamic shared memory"),
        ("attributes", decision.attributes),
        ("workspace", f"{decision.workspace_bytes} bytes, {decision.scratch_bytes} of them for partial results"),
    ]
    if decision.counter_bytes:
        rows.append(("counters", f"{decision.counter_bytes} bytes of zeros beside the workspace"))
    return tuple(rows)


def pass_rows(decision: Decision) -> tuple[Row, ...]:
    """The passes of the selection in order; the last one's kernel is launched."""
    return tuple(
        (number, done.key.tile_q, done.ctas, word_of(MultiCtasMode, done.key.multi_ctas), done.kernel)
        for number, done in enumerate(decision.selection.passes, 1)
    )


def candidate_rows(decision: Decision) -> tuple[Row, ...]:
    """The tile sizes compared in each pass."""
    return tuple(
        (number, c.tile_q, "no kernel" if c.cost is None else f"{c.cost:.9g}", c.kernel or "")
        for number, done in enumerate(decision.selection.passes, 1)
        for c in done.candidates
    )


def tensor_map_rows(decision: Decision) -> tuple[Row, ...]:
    """The TMA descriptors that are built."""
    return tuple(
        (name, s.dtype, _by(s.dims), _by(s.strides), _by(s.box), s.swizzle, f"{s.address:#x}")
        for name, s in decision.values.items()
        if isinstance(s, TensorMapSpec)
    )


def parameter_rows(decision: Decision) -> tuple[Row, ...]:
    """The fields of the parameter struct except the descriptors, with their meanings."""
    return tuple(
        (member.offset, member.name, member.type, _text(member.type, decision.values[member.name]), member.meaning)
        for member in KERNEL_PARAMS.fields
        if member.type != "CUtensorMap"
    )


def _because(problem: Problem) -> str:
    group = f"{problem.heads_q} query heads over {problem.heads_kv} KV heads"
    kind = "MLA decoding" if problem.is_mla else "decoding" if problem.is_generation else "context"
    return f"{kind}, {group}, up to {problem.max_q} query and {problem.max_kv} KV tokens, batch {problem.batch}"


def _tile(decision: Decision) -> str:
    problem, key = decision.problem, decision.selection.key
    text = f"{key.tile_q} rows of queries, {key.tile_kv} KV tokens"
    if not problem.is_generation or problem.is_mla:
        return text
    return f"{text}; {problem.group} heads x {problem.max_q} tokens share a KV head"


def _tile_size(decision: Decision) -> str:
    if decision.problem.max_q == 1:
        return "one token is not compared"
    compared = any(done.candidates for done in decision.selection.passes)
    return "the cheapest below" if compared else "the first estimate stands"


def _by(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


def _text(type_name: str, value: object) -> str:
    if type_name == "ptr":
        return f"{value:#x}" if value else "null"
    return f"/ {value.divisor}" if isinstance(value, FastModDiv) else str(value)
