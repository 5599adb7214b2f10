"""Record the golden launches anew: ``.venv/bin/python -m tests.golden.record``, then look at what it says has changed.

Run ``make artifacts`` first: the kernels' threads and shared memory come from what it built.

The cases stay those of the file, and so do the names of fields that lie where they lay; ``--draw`` draws new cases
first, after options changed (a minute). ``--add`` keeps the file as it is, and draws cases for families that have none.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cubin_runtime.testing import StandIn, build_standin
from kernels_src.release import RELEASE
from tests.golden import cases
from tests.golden import copying_cases as copying
from tests.golden import flashinfer_cases as flashinfer
from tests.golden import list_cases as lists
from tests.golden import prefill_cases as prefill
from tests.golden.adapter import Session, layouts_now
from tests.golden.launches import FILE, Layout, differences, read, write

BUILT = Path(__file__).parents[2] / "build" / "artifacts" / RELEASE
MOST_REFUSALS = 8
SHOWN = 20


@dataclass(frozen=True)
class Family:
    """So many cases of one kind; ``settle`` makes the values of a draw fit together."""

    count: int
    options: Mapping[str, Sequence[Any]]
    build: Callable[[cases.Draw], dict[str, Any]]
    settle: Callable[[dict[str, Any]], cases.Draw] = dict


FAMILIES = {
    "decode": Family(800, cases.DECODE_OPTIONS, cases.decode),
    "decode elsewhere": Family(200, cases.OTHER_DECODE_OPTIONS, cases.decode),
    "decode of many rows": Family(130, cases.WIDE_DECODE_OPTIONS, cases.decode),
    "mla": Family(400, cases.MLA_OPTIONS, cases.mla),
    "xqa": Family(250, flashinfer.XQA_OPTIONS, flashinfer.xqa),
    "xqa mla": Family(130, flashinfer.XQA_MLA_OPTIONS, flashinfer.xqa_mla),
    "published decode": Family(
        400, flashinfer.PUBLISHED_DECODE_OPTIONS, flashinfer.published_decode, flashinfer.settle
    ),
    "published mla": Family(200, flashinfer.PUBLISHED_MLA_OPTIONS, flashinfer.published_mla, flashinfer.settle),
    "reduced mla": Family(120, flashinfer.REDUCED_MLA_OPTIONS, flashinfer.published_mla, flashinfer.settle),
    "context": Family(150, flashinfer.CONTEXT_OPTIONS, flashinfer.context, flashinfer.settle),
    "ragged": Family(150, flashinfer.RAGGED_OPTIONS, flashinfer.ragged, flashinfer.settle),
    "append": Family(150, copying.APPEND_OPTIONS, copying.append),
    "merge": Family(80, copying.MERGE_OPTIONS, copying.merge),
    "context attention": Family(200, prefill.CONTEXT_OPTIONS, prefill.context_attention),
    "invariant context attention": Family(80, prefill.INVARIANT_OPTIONS, prefill.context_attention),
    "mla elsewhere": Family(150, cases.OTHER_MLA_OPTIONS, cases.mla),
    "xqa mla elsewhere": Family(60, flashinfer.OTHER_XQA_MLA_OPTIONS, flashinfer.xqa_mla),
    "sparse mla": Family(120, lists.OPTIONS, lists.sparse_mla),
    "e4m3 context attention": Family(160, prefill.E4M3_OPTIONS, prefill.context_attention),
    "mla columns": Family(160, cases.MLA_COLUMN_OPTIONS, cases.mla),
    "mla columns elsewhere": Family(60, cases.OTHER_MLA_COLUMN_OPTIONS, cases.mla),
    "mla of separate values": Family(80, cases.SEPARATE_MLA_OPTIONS, cases.mla),
    "split context attention": Family(120, prefill.SPLIT_OPTIONS, prefill.context_attention),
    "mla of separate rope": Family(120, cases.ROPE_MLA_OPTIONS, cases.mla),
}


def drawn(session: Session, kept: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """New cases of all families but those ``kept``, with what came of them; of those refused in one way, a few."""
    for seed, (name, family) in enumerate(FAMILIES.items()):
        if name in kept:
            continue
        crossing = cases.Crossing(family.options, seed, family.settle)
        refusals: Counter[str] = Counter()
        count = 0
        while count < family.count:
            draw = crossing.draw()
            case = {"family": name, "number": count, **family.build(draw)}
            result = session.run(case)
            if "sent" in result:
                crossing.take(draw)
            refusals[result.get("refused", "")] += 1
            if "sent" in result or refusals[result["refused"]] <= MOST_REFUSALS:
                yield {**case, "result": result}
                count += 1
        print(f"{name}: {len(crossing.missing)} pairs of values never met")


def sizes_now() -> dict[str, tuple[int, int]]:
    """Threads and dynamic shared memory of each kernel, from the release that ``make artifacts`` built."""
    kernels = json.loads((BUILT / "kernels.json").read_text())["kernels"]
    return {kernel["name"]: (kernel["threads"], kernel["dynamic_shared_bytes"]) for kernel in kernels}


def _same_places(kept: Layout, now: Layout | None) -> bool:
    """Whether two layouts of a struct differ in the names of its fields alone."""
    return now is not None and kept[0] == now[0] and [f[1:] for f in kept[1]] == [list(f[1:]) for f in now[1]]


def main() -> None:
    """Write the file and say what it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw new cases")
    parser.add_argument("--add", action="store_true", help="draw cases for new families alone")
    given = parser.parse_args()
    import_module("cubin_runtime.attention.fast_path.operator_function").FULL_RUNS = 1  # as in tests/conftest.py
    shared, *before = [{"layouts": {}, "sizes": {}}] if given.draw else list(read())
    layouts, sizes = layouts_now(), sizes_now()
    layouts.update((name, kept) for name, kept in shared["layouts"].items() if _same_places(kept, layouts.get(name)))
    if given.add:
        layouts, sizes = {**layouts, **shared["layouts"]}, {**sizes, **shared["sizes"]}
    with tempfile.TemporaryDirectory() as folder:
        session = Session(StandIn(build_standin(Path(folder))), Path(folder), layouts, sizes)
        found = before if given.add else [{**case, "result": session.run(case)} for case in before]
        if given.add or given.draw:
            found = [*found, *drawn(session, {case["family"] for case in before})]
    write([{"layouts": layouts, "sizes": sizes}, *found])
    _tell(found, before, set(sizes))


def _tell(found: list[dict[str, Any]], before: list[dict[str, Any]], native: set[str]) -> None:
    launches = [launch for case in found for sent in case["result"].get("sent", ()) for launch in sent]
    kernels = {launch["kernel"] for launch in launches}
    refused = Counter(case["result"].get("refused") for case in found)
    print(f"{len(found)} cases, {len(launches)} launches, {FILE.stat().st_size} bytes")
    print(f"{len(kernels & native)} of {len(native)} kernels of ours, {len(kernels - native)} published ones")
    print("never launched:", ", ".join(sorted(native - kernels)))
    print("refused:", {kind: count for kind, count in refused.items() if kind})
    print("not as planned:", sum("unplanned" in case["result"] for case in found))
    changed = [(new, old) for new, old in zip(found, before, strict=False) if new != old]
    if before:
        print(f"changed: {len(changed)}")
    for new, old in changed[:SHOWN]:
        print(f"  {new['family']} {new['number']}: {next(differences(new['result'], old['result']))}")


if __name__ == "__main__":
    main()
