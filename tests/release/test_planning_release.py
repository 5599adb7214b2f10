"""The planner on the real release, and an older one with other columns."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime import cli
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins.pin import Pin
from cubin_runtime.artifacts.releases.catalog import open_kernel_index
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH, KernelMeta, KernelTable, parse_header
from cubin_runtime.artifacts.tables.metadata_index import MetadataIndex, build_index
from cubin_runtime.artifacts.tables.trait_table import traits_of
from cubin_runtime.cli.recorded_cases import occupancy_of, problem_of
from cubin_runtime.kernels.trtllm_gen.decision import decide
from cubin_runtime.kernels.trtllm_gen.kernel_finder import KernelFinder

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

DATA = Path(__file__).parents[1] / "data"
OLDER = "flashinfer-cubin==0.6.1"
OLDER_WHEEL = "flashinfer_cubin-0.6.1-py3-none-any.whl"
OLDER_ROWS = 4154
LACKING = (
    "mDataTypeK",
    "mDataTypeV",
    "mNumEltsPerSageAttnBlkQ",
    "mNumEltsPerSageAttnBlkK",
    "mNumEltsPerSageAttnBlkP",
    "mNumEltsPerSageAttnBlkV",
    "mSparseAttn",
)
COMPARED = ("ok", "error_kind", "kernel", "grid", "block", "smem", "attrs", "nonportable_cluster_set_for")
COMPARED += ("tma", "params_hex", "reduction", "lse")


def recorded() -> Iterator[dict[str, Any]]:
    with lzma.open(DATA / "trtllm_gen_cases.jsonl.xz") as opened:
        yield from map(json.loads, opened)


@pytest.fixture(scope="session")
def older_table() -> KernelTable:
    """The kernel table of an older release, from its wheel, downloaded once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cubin-runtime-test"
    kept = cache / OLDER_WHEEL
    if not kept.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder]
            subprocess.run([*command, OLDER], check=True)
            os.replace(Path(folder, OLDER_WHEEL), kept)
    with zipfile.ZipFile(kept) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(f"fmha/trtllm-gen/{HEADER_PATH}"))
        return parse_header(opened.read(name))


def test_the_kernels_of_the_tests_are_those_of_the_release(table: KernelTable) -> None:
    columns = json.loads(lzma.decompress((DATA / "trtllm_gen_kernels.json.xz").read_bytes()))
    names = [f.name for f in fields(KernelMeta) if f.name not in ("sha256", "row")]
    assert columns == {name: [getattr(row, name) for row in table.rows] for name in names}


def test_every_row_is_the_only_one_of_its_traits(table: KernelTable) -> None:
    assert len({traits_of(row) for row in table.rows}) == len(table.rows)


def test_every_row_is_found_by_its_traits(library: Library, pin: Pin, table: KernelTable) -> None:
    index = open_kernel_index(library, pin, fetch=False)
    assert [index.find_by_traits(traits_of(row)) for row in table.rows] == list(table.rows)


def test_the_verb_decides_every_recorded_case_like_the_reference(
    wheel: Path, store: Path, tmp_path: Path, counts: dict[str, object]
) -> None:
    out = tmp_path / "out.jsonl"
    where = ["--source", str(wheel), "--store", str(store), "--offline"]
    cases = str(DATA / "trtllm_gen_cases.jsonl.xz")
    assert cli.main(["explain", *where, "--cases", cases, "--out", str(out)]) == 0
    ours = [json.loads(line) for line in out.read_text().splitlines()]
    differing = [
        record["case"]["id"]
        for record, decision in zip(recorded(), ours, strict=True)
        if any(record.get(key) != decision.get(key) for key in COMPARED)
    ]
    counts["recorded decisions reproduced"] = f"{len(ours) - len(differing)} of {len(ours)}"
    assert differing == []


def test_every_planned_kernel_is_a_file_of_the_manifest(library: Library, pin: Pin) -> None:
    kernels = KernelFinder(open_kernel_index(library, pin, fetch=False))
    listed = library.manifest(pin).digests
    for record in recorded():
        if record["ok"]:
            case = record["case"]
            launch = decide(problem_of(case), kernels, occupancy_of(case)).launch_plan(pin.path)
            assert listed[launch.path] == launch.sha256


def test_an_older_release_reads_by_its_own_columns(older_table: KernelTable) -> None:
    assert len(older_table.rows) == OLDER_ROWS
    assert (older_table.missing_columns, older_table.new_columns) == (LACKING, ())


def test_an_older_release_is_indexed_and_found_like_any_other(older_table: KernelTable) -> None:
    index = MetadataIndex(build_index(older_table))
    assert [index.find_by_traits(traits_of(row)) for row in older_table.rows] == list(older_table.rows)
    assert index.missing_columns == LACKING


def test_types_and_sparsity_of_an_older_release_agree_with_its_names(older_table: KernelTable) -> None:
    assert {row.symbol for row in older_table.rows if row.sparse_attention} == {
        row.symbol for row in older_table.rows if "SparseP1" in row.symbol
    }
    assert all(row.dtype_k == row.dtype_v == row.dtype_kv for row in older_table.rows)
