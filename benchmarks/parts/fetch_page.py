"""The figures of ``docs/results/fetching.md`` on fetching, as Markdown from ``fetch.json``."""

from __future__ import annotations

from decode.tables import Report, table


def figures(report: Report) -> str:
    """What both clients took, where, and how threads compare with processes."""
    versions, machine, medians = report["versions"], report["machine"], report["medians"]
    model, together, pools = report["one_model"], report["processes_at_once"], report["pools"]
    loads = [load for one in report["rounds"] for load in (one["load_before"], one["load_after"])]
    lines = [
        ("cold fetch of everything", _seconds(medians["peer_cold_s"]), _faster(medians, "cold")),
        ("again, when everything is there", _seconds(medians["peer_again_s"]), _faster(medians, "again")),
        (
            "files besides the artifacts",
            f"{medians['peer_files_besides']:,.0f}",
            f"{medians['ours_files_besides']:,.0f}",
        ),
        (
            f"{_WORDS[together['processes']]} processes at once, cold: bytes sent",
            "not measured",
            f"{together['copies']:.4f} copies",
        ),
        (
            f"one model (`{model['filters']}`)",
            "not possible",
            f"{model['files']} files, {model['bytes_sent'] / 1e6:.1f} MB, {model['seconds']:.1f} s",
        ),
        (
            "peak memory",
            "not measured",
            f"{medians['ours_cold_parent_peak_bytes'] / 1e6:.0f} MB, each worker "
            f"{medians['ours_cold_largest_worker_peak_bytes'] / 1e6:.0f} MB",
        ),
    ]
    threads, processes = pools["threads_s"], pools["processes_s"]
    return "\n\n".join(
        (
            f"{machine['cores']} cores ({machine['cpu']}), one-minute load before each round {min(loads):.1f} to "
            f"{max(loads):.1f}; {report['date'][:10]}. Medians of {len(report['rounds'])} rounds, both clients "
            f"fetched {versions['files']:,} files, {versions['bytes'] / 1e9:.2f} GB.{_said(report)}",
            table(("", versions["peer"].replace("==", " "), "cubin-runtime"), lines),
            f"Threads in one process take {pools['threads_over_processes']:.2f} times as long as worker processes "
            f"({min(threads):.1f} to {max(threads):.1f} s against {min(processes):.1f} to {max(processes):.1f} s, "
            f"{len(threads)} interleaved rounds): an object takes about twenty system calls, and each of them releases "
            "and acquires the interpreter lock.",
        )
    )


_WORDS = {2: "two", 4: "four", 8: "eight"}


def _seconds(time: float) -> str:
    return f"{time:.1f} s" if time >= 2 else f"{time:.2f} s"


def _faster(medians: Report, run: str) -> str:
    ours, other = medians[f"ours_{run}_s"], medians[f"peer_{run}_s"]
    return f"{_seconds(ours)} ({other / ours:.2f} times faster)"


def _said(report: Report) -> str:
    """At which priority it was measured, and what at another time than the rounds."""
    parts = report.get("measured_apart", {})
    said = "; ".join(f"{part.replace('_', ' ')}: {one['date'][:10]}" for part, one in parts.items())
    apart = f" Measured at other times: {said}." if said else ""
    return (f" {report['priority'][0].upper()}{report['priority'][1:]}." if "priority" in report else "") + apart
