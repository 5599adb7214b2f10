"""Why a plan is as it is: facts and rows that a person reads."""

from __future__ import annotations

from ...launch.fastmoddiv import FastModDiv
from ...launch.tensormap import TensorMapSpec
from .params import KERNEL_PARAMS
from .plan import Planned
from .problem import Problem
from .traits import MultiCtasMode, word_of

Row = tuple[object, ...]
PASS_COLUMNS = ("pass", "tile q", "CTAs", "multi-CTA", "kernel")
CANDIDATE_COLUMNS = ("pass", "tile q", "modelled cost", "kernel")
TENSOR_MAP_COLUMNS = ("descriptor", "type", "dims", "strides (bytes)", "box", "swizzle", "address")
PARAMETER_COLUMNS = ("offset", "parameter", "type", "value", "meaning")


def facts(planned: Planned) -> tuple[tuple[str, object], ...]:
    """What is launched and why, as (name, value)."""
    selection, meta, problem = planned.selection, planned.meta, planned.problem
    rows: list[tuple[str, object]] = [
        ("kernel", meta.symbol),
        ("asked for", f"{problem.dtypes}: {selection.state}"),
        ("because", _because(problem)),
        ("tile", _tile(planned)),
    ]
    if selection.asked is not None:
        asked = selection.asked
        held = f"{asked.active_clusters} clusters of {asked.cluster_x} at once, the grid has {asked.grid}"
        verdict = "so the parts are merged through global memory" if selection.left_cluster else "so clusters stay"
        rows.append(("occupancy", f"{held}: {verdict}"))
    x, y, z = planned.grid
    geometry = selection.geometry
    rows += [
        ("grid", f"{x} x {y} x {z} = {geometry.ctas} CTAs on {problem.multiprocessors} multiprocessors"),
        (
            "split",
            f"{geometry.ctas_q} along queries, {geometry.ctas_kv} along KV, {geometry.heads_per_cta} heads a CTA",
        ),
        ("block", f"{meta.threads} threads, {meta.shared_bytes} bytes of dynamic shared memory"),
        ("attributes", planned.attributes),
        ("workspace", f"{planned.workspace_bytes} bytes, {planned.scratch_bytes} of them for partial results"),
    ]
    if planned.reduction is not None:
        rows.append(("then", f"reduction over KV splits, grid {planned.reduction.grid}"))
    if planned.lse is not None:
        rows.append(("then", f"LSE of {planned.lse.values['rows']} rows, grid {planned.lse.grid}"))
    return tuple(rows)


def pass_rows(planned: Planned) -> tuple[Row, ...]:
    """The kernels in the order in which they were looked at; the last one is launched."""
    return tuple(
        (number, done.state.tile_q, done.ctas, word_of(MultiCtasMode, done.state.multi_ctas), done.kernel)
        for number, done in enumerate(planned.selection.passes, 1)
    )


def candidate_rows(planned: Planned) -> tuple[Row, ...]:
    """The tile sizes that were compared before each pass; none where the first estimate stood."""
    return tuple(
        (number, c.tile_q, "no kernel" if c.cost is None else f"{c.cost:.9g}", c.kernel or "")
        for number, done in enumerate(planned.selection.passes, 1)
        for c in done.candidates
    )


def tensor_map_rows(planned: Planned) -> tuple[Row, ...]:
    """Each descriptor that is built."""
    return tuple(
        (name, s.dtype, _by(s.dims), _by(s.strides), _by(s.box), s.swizzle, f"{s.address:#x}")
        for name, s in planned.values.items()
        if isinstance(s, TensorMapSpec)
    )


def parameter_rows(planned: Planned) -> tuple[Row, ...]:
    """Each field of the parameter struct but the descriptors, with its meaning."""
    return tuple(
        (member.offset, member.name, member.type, _text(member.type, planned.values[member.name]), member.meaning)
        for member in KERNEL_PARAMS.fields
        if member.type != "CUtensorMap"
    )


def _because(problem: Problem) -> str:
    group = f"{problem.heads_q} query heads over {problem.heads_kv} KV heads"
    kind = "MLA decoding" if problem.is_mla else "decoding" if problem.is_generation else "context"
    return f"{kind}, {group}, up to {problem.max_q} query and {problem.max_kv} KV tokens, batch {problem.batch}"


def _tile(planned: Planned) -> str:
    problem, state = planned.problem, planned.selection.state
    text = f"{state.tile_q} rows of queries, {state.tile_kv} KV tokens"
    if not problem.is_generation or problem.is_mla:
        return text
    rows = f"{text}; {problem.group} heads x {problem.max_q} tokens share a KV head"
    if problem.max_q == 1:
        return f"{rows}, one token is not compared"
    compared = any(done.candidates for done in planned.selection.passes)
    return f"{rows}, {'the cheapest below' if compared else 'the first estimate stands'}"


def _by(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


def _text(type_name: str, value: object) -> str:
    if type_name == "ptr":
        return f"{value:#x}" if value else "null"
    return f"/ {value.divisor}" if isinstance(value, FastModDiv) else str(value)
