"""The real release, whole: every file, every row, every fact that can be compared with another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins.pin import Pin
from cubin_runtime.artifacts.releases.catalog import open_catalog, open_kernel_index
from cubin_runtime.artifacts.tables.kernel_filter import KernelFilter
from cubin_runtime.artifacts.tables.metadata import KernelTable
from cubin_runtime.artifacts.tables.metadata_index import build_index
from tests.docs.pages import ROOT, blocks_of

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

FILES = 13453
ROWS = 13452
INDEX_SHA256 = "964dc0966d0dc846992fbc04622d8d6bb061b47f99ab5a1a9322da4a2c77aca5"


def test_every_file_has_the_digest_of_the_pinned_manifest(
    library: Library, pin: Pin, wheel: Path, counts: dict[str, object]
) -> None:
    report = library.verify(pin, complete=True, tree=str(wheel), jobs=2)
    counts["files verified"] = report.ok
    counts["bytes verified"] = report.bytes
    assert (report.ok, report.bytes) == (FILES, pin.bytes)
    assert (report.missing, report.corrupt, report.extra) == ((), (), ())


def test_the_header_gives_every_row_and_no_unknown_column(table: KernelTable, counts: dict[str, object]) -> None:
    counts["metadata rows"] = len(table.rows)
    assert (len(table.rows), table.new_columns) == (ROWS, ())


def test_the_index_is_the_one_that_its_digest_was_taken_of(table: KernelTable, counts: dict[str, object]) -> None:
    data = build_index(table)
    counts["index"] = f"{len(data)} bytes, sha256 {sha256(data).hexdigest()}"
    assert sha256(data).hexdigest() == INDEX_SHA256


def test_the_pin_names_that_digest(pin: Pin) -> None:
    assert pin.index_sha256 == INDEX_SHA256


def test_the_index_gives_back_every_row(library: Library, pin: Pin, table: KernelTable) -> None:
    index = open_kernel_index(library, pin, fetch=False)
    assert [index.find(row.symbol) for row in table.rows] == list(table.rows)


def test_every_row_has_its_file_in_the_manifest(library: Library, pin: Pin, table: KernelTable) -> None:
    listed = library.manifest(pin).digests
    assert [row.file for row in table.rows if pin.path.child(row.file) not in listed] == []


def test_the_last_column_of_every_row_is_the_digest_in_the_manifest(
    library: Library, pin: Pin, table: KernelTable
) -> None:
    listed = library.manifest(pin).digests
    assert [row.file for row in table.rows if listed[pin.path.child(row.file)] != row.sha256] == []


def test_every_file_but_the_header_has_a_row(library: Library, pin: Pin, table: KernelTable) -> None:
    files = {row.file for row in table.rows}
    others = {path.relative_to(pin.path) for path in library.manifest(pin).digests} - files
    assert others == {"include/flashInferMetaInfo.h"}


def test_metadata_and_file_name_agree_on_every_target(table: KernelTable, counts: dict[str, object]) -> None:
    targets = Counter(str(row.architecture) for row in table.rows)
    counts["targets by metadata"] = dict(targets)
    assert targets == {"sm_100f": 11248, "sm_103a": 1892, "sm_100a": 312}


def test_every_cubin_agrees_with_its_row_on_every_fact(rows_report, counts: dict[str, object]) -> None:
    counts["cubins held against their rows"] = rows_report.cubins
    counts["disagreements"] = len(rows_report.disagreements)
    assert rows_report.disagreements == []
    assert rows_report.cubins == ROWS


def test_only_the_known_cubins_leave_their_suffix_to_the_metadata(rows_report, counts: dict[str, object]) -> None:
    counts["targets by the cubins"] = dict(rows_report.architectures)
    unknown = {name: n for name, n in rows_report.architectures.items() if name.endswith("?")}
    assert sum(unknown.values()) == 528


@pytest.mark.parametrize(("sm", "kept"), [(90, 0), (100, 11560), (103, 13140), (120, 0)])
def test_filters_count_what_runs_on_a_device(library: Library, pin: Pin, sm: int, kept: int) -> None:
    assert len(open_catalog(library, pin, fetch=False).kept_by(KernelFilter(sm=sm))) == kept


def test_the_python_of_the_page_on_artifacts_runs(wheel: Path, tmp_path: Path) -> None:
    built = ROOT / "build" / "artifacts"
    if not (built / "hopper-0.1.0" / "checksums.txt").is_file():
        pytest.skip("our kernels are not built (make artifacts)")
    environment = {
        **os.environ,
        "CUBIN_RUNTIME_CACHE": str(tmp_path),
        "CUBIN_RUNTIME_OFFLINE": "1",
        "CUBIN_RUNTIME_SOURCES": f"{built} {wheel}",
    }
    text = "\n".join(block.text for block in blocks_of("docs/reference/artifacts.md") if block.kind == "python")
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^[1-9][0-9]* files are right$", done.stdout, re.MULTILINE)
