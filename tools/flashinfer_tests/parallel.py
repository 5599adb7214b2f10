"""FlashInfer's tests of parallel attention on our names of FlashAttention-3: a process for each GPU, one JSON.

    python tools/flashinfer_tests/parallel.py test_parallel_attention.py --out OUT [--ranks 2] [--seconds 120]

FlashInfer is on PYTHONPATH, its Python files suffice; the test file is that of its tag, written for four processes.
With another number, the groups that the file asks for are replaced by those that this number can form.
``OUT/flashinfer_parallel.json`` has each test's outcome on all ranks, and which kernels ran. The exit status is 1 if a
test failed or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDS = "PARALLEL_RECORDS"
SIZES = re.compile(r'("ulysses_size,ring_size", )\[[^\]]*\]')
WRITTEN_FOR = 4  # processes


def main() -> int:
    """Run the tests and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / given.test.name).write_text(for_ranks(given.test.read_text(), given.ranks))
        (folder / "flash_attn_interface.py").write_text("from cubin_runtime.compat.flash_attn_interface import *\n")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
        asked = ["-m", "pytest", "-q", "-p", "parallel_plugin", "-p", "no:cacheprovider", "-k", "flash-attn3"]
        paths = [str(folder), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        around = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), RECORDS: str(folder)}
        try:
            subprocess.run(
                [*launch, *asked, given.test.name], cwd=folder, env=around, timeout=given.seconds, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"not done after {given.seconds} s")
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    sys.path.append(str(ROOT / "benchmarks"))
    from gpu_environment import gpu_environment

    report = {"environment": gpu_environment(), "ranks": given.ranks, **merged(ranks)}
    report["environment"]["packages"]["flashinfer-python"] = version("flashinfer-python")
    report["seconds"] = round(time.time() - began, 1)
    (given.out / "flashinfer_parallel.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    outcomes = report["outcomes"].values()
    return int(not outcomes or len(ranks) < given.ranks or set(outcomes) != {"passed"})


def for_ranks(test: str, ranks: int) -> str:
    """The test file with groups for so many processes, as pairs of factors."""
    if ranks == WRITTEN_FOR:
        return test
    pairs = [(size, ranks // size) for size in range(1, ranks + 1) if ranks % size == 0]
    return SIZES.sub(rf"\1{pairs}", test)


def merged(ranks: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks say: a test passed if it did on each."""
    outcomes: dict[str, str] = {}
    for name, said in _all_of(ranks, "outcomes"):
        outcomes[name] = said if outcomes.get(name, said) == "passed" else outcomes.get(name, said)
    one = ranks[0] if ranks else {}
    reasons = dict(_all_of(ranks, "reasons"))
    return {"outcomes": outcomes, "reasons": reasons} | {name: one.get(name) for name in ("cubins", "commit")}


def _all_of(ranks: list[Mapping[str, Any]], name: str) -> Iterator[tuple[str, str]]:
    for rank in ranks:
        yield from rank[name].items()


if __name__ == "__main__":
    sys.exit(main())
