"""The figures of ``docs/results/mla.md``, as Markdown from the JSON, so that they cannot disagree."""

from __future__ import annotations

from .rows import Row
from .tables import (
    NOT_MEASURED,
    RATIO,
    READING,
    TFLOPS,
    Report,
    column,
    failures,
    invariance,
    peers_of,
    place,
    replays,
    section,
    singles,
    table,
)

SCHEMA = 2
SINGLE_CALLS = 1  # the schema of reports whose times are those of single calls
SPARSE_METHOD = """Every query token has a list of 2,048 rows, random ones of a cache of 8 GiB that no other list names.
TB/s count the bytes of these rows. The read-only test reads the same rows, by one bulk copy each; shares of the read
bandwidth are of what it reaches over random rows of that size. FlashMLA computes 64 or 128 heads: where there are
fewer, queries are padded to 64 heads ahead, which is not timed.
Data: [`sparse_mla.json`](../../benchmarks/results/sparse_mla.json)."""
OVER_BF16 = column("over bf16", "over_bf16", "{:.2f}x".format)


def figures(report: Report) -> str:
    """Everything between the markers."""
    if report.get("schema") not in (SCHEMA, SINGLE_CALLS):
        return NOT_MEASURED
    rows = report["rows"]

    def of(name: str) -> list[Row]:
        return [row for row in rows if row["section"] == name]

    parts = [place(report), *_beside_others(of("bf16"))]
    over = (TFLOPS, *READING, OVER_BF16, *singles(of("fp8")))
    parts += section("e4m3 cache, compared with our bf16 kernels (batch x keys)", of("fp8"), over)
    parts += invariance("Batch invariance, bf16 (batch x keys)", of("invariant"))
    parts += replays("Cases under 25 us, timed as CUDA graph replays (rotating page tables)", rows)
    parts += failures(rows)
    return "\n\n".join(parts)


def beside_flashmla(report: Report) -> str:
    """The bf16 rows of a run of its own with FlashMLA."""
    if report.get("schema") != SCHEMA:
        return ""
    rows = [row for row in report["rows"] if row["section"] == "bf16"]
    return "\n\n".join(("## Beside FlashMLA", place(report), *_beside_others(rows)))


def sparse(report: Report) -> tuple[str, ...]:
    """The figures of sparse MLA decode; nothing where none were measured."""
    if report.get("schema") != SCHEMA:
        return ()
    sections = {
        name: [row for row in report["rows"] if row["section"] == name] for name in ("e4m3", "bf16", "invariant")
    }
    scaled, plain = sections["e4m3"], sections["bf16"]
    columns = (TFLOPS, *READING, *peers_of(scaled), RATIO, *singles(scaled))
    return (
        "## Sparse MLA decode beside FlashMLA",
        SPARSE_METHOD,
        place(report),
        *section(f"Rows of 656 bytes{_read_only(scaled)}", scaled, columns),
        *section(f"Rows of bf16{_read_only(plain)}", plain, (TFLOPS, *READING, *singles(plain))),
        *invariance("Batch invariance, rows of 656 bytes", sections["invariant"]),
        *failures(report["rows"]),
    )


def _read_only(rows: list[Row]) -> str:
    rates = {f"{row['read_tb_per_s']:.2f}" for row in rows if "read_tb_per_s" in row}
    return f", read-only {', '.join(sorted(rates))} TB/s" if rates else ""


def _beside_others(rows: list[Row]) -> list[str]:
    columns = (TFLOPS, *READING, *peers_of(rows), RATIO, *singles(rows))
    return section("bf16 queries and cache (batch x keys)", rows, columns)


def sparse_soak(report: Report) -> str:
    """Replays with changing lists: how many, what differed, and the memory."""
    lines = [
        (
            row["label"],
            f"{row['replays']:,}",
            f"{row['plans']}",
            f"{row['comparisons']:,}",
            f"{row['different_elements']}",
            f"{row['largest_difference']:.1e}",
        )
        for row in report["rows"]
    ]
    heads = (
        "tokens x entries of a list",
        "replays",
        "plans",
        "comparisons",
        "elements that differ from a call",
        "largest difference",
    )
    growth = report["growth"]
    return "\n\n".join(
        (
            "### Soak",
            f"{report['environment']['gpu']['name']}; {report['environment']['date'][:10]}. For "
            f"{report['seconds']:.0f} seconds, {len(lines)} streams replay graphs side by side, each replay with other "
            "lists and lengths: without holes, with some, with nothing else, and empty. At each comparison a call must "
            "give the bits of the replay, and four tokens are compared with float64: norm of the difference over that "
            "of the output. From the second to the last third of the time the median of the memory in use changed by "
            f"{growth['device']:,} bytes on the device and {growth['host']:,} in the process. Data: "
            "[`sparse_mla_soak.json`](../../benchmarks/results/sparse_mla_soak.json).",
            table(heads, lines),
        )
    )
