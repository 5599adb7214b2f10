"""Make the test data of the trtllm-gen planner from a release's metadata header and a file of recorded cases.

``python tools/derive_trtllm_data.py HEADER CASES.jsonl.gz`` writes ``tests/data/trtllm_gen_kernels.json.xz``, the
header's columns without its digests, and ``tests/data/trtllm_gen_cases.jsonl.xz``, of each record what is compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
from dataclasses import fields
from pathlib import Path

from cubin_runtime.artifacts.tables.metadata import KernelMeta, parse_header

DATA = Path(__file__).parents[1] / "tests" / "data"
LEFT_OUT = ("sha256", "row")
COMPARED = (
    "ok",
    "error_kind",
    "kernel",
    "grid",
    "block",
    "smem",
    "attrs",
    "nonportable_cluster_set_for",
    "tma",
    "params_hex",
    "reduction",
    "lse",
)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("header", type=Path)
    parser.add_argument("cases", type=Path)
    given = parser.parse_args()
    write("trtllm_gen_kernels.json.xz", columns_of(given.header.read_bytes()))
    with gzip.open(given.cases) as opened:
        write("trtllm_gen_cases.jsonl.xz", b"".join(slim(line) for line in opened))


def columns_of(header: bytes) -> bytes:
    """The columns that decide, each as one list, in the order of the header's rows."""
    rows = parse_header(header).rows
    names = [f.name for f in fields(KernelMeta) if f.name not in LEFT_OUT]
    return compact({name: [getattr(row, name) for row in rows] for name in names})


def slim(line: bytes) -> bytes:
    """One record with the case and the compared keys only."""
    record = json.loads(line)
    case = {key: value for key, value in record["case"].items() if key != "desc"}
    return compact({"case": case, **{key: record[key] for key in COMPARED if key in record}}) + b"\n"


def compact(value: object) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def write(name: str, data: bytes) -> None:
    """Compress, write and say how large it is."""
    packed = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    (DATA / name).write_bytes(packed)
    print(f"{DATA / name}: {len(packed)} bytes")


if __name__ == "__main__":
    main()
