from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.releases.catalog import chosen_paths, open_catalog, open_kernel_index
from cubin_runtime.artifacts.tables.kernel_filter import KernelFilter
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.artifacts.tables.metadata_index import index_of_header
from cubin_runtime.errors import CorruptError, MissingError, UsageError

FOLDER = ArtifactPath("made-up/fmha")
NAMES = ("fmhaSm100fKernel_A", "fmhaSm103aKernel_B")
COLUMNS = [
    *(f"mDataType{x}" for x in ("Q", "Kv", "K", "V", "O")),
    *("mTileSizeQ", "mTileSizeKv", "mStepQ", "mStepKv", "mHeadDimPerCtaV", "mHeadDimQk", "mHeadDimV", "mSM"),
    *("mFuncName", "mSharedMemBytes", "mThreadsPerCTA", "mQkvLayout", "mNumTokensPerPage", "mMaskType"),
    *("mKernelType", "mTileScheduler", "mMultiCtasKvMode"),
    *(f"mNumEltsPerSageAttnBlk{x}" for x in ("Q", "K", "P", "V")),
    *("mGroupsHeadsQ", "mGroupsTokensHeadsQ", "mReuseSmemKForV", "m2CtaMma", "mSparseAttn"),
    *("mSkipsSoftmaxWhenPossible", "sha256"),
]


def cell(column: str, symbol: str) -> str:
    """A value that the column takes; the SM follows the symbol."""
    special = {
        "mFuncName": f'"{symbol}"',
        "sha256": '"' + hashlib.sha256(symbol.encode()).hexdigest() + '"',
        "mSM": "kSM_100f" if "100f" in symbol else "kSM_103",
    }
    default = "DATA_TYPE_BF16" if column.startswith("mDataType") else "64"
    truth = column in {"mGroupsHeadsQ", "mGroupsTokensHeadsQ", "mReuseSmemKForV", "m2CtaMma"}
    return special.get(column, "false" if truth or column.startswith("mSkips") else default)


def header_bytes() -> bytes:
    declared = "".join(f"int {column};\n" for column in COLUMNS)
    rows = "".join("{ " + ", ".join(cell(c, name) for c in COLUMNS) + "},\n" for name in NAMES)
    return f"struct Info\n{{\n{declared}}};\nstatic const Info sInfos[] = {{\n{rows}}};\n".encode()


HEADER = header_bytes()
INDEX = index_of_header(HEADER)
INDEX_DIGEST = hashlib.sha256(INDEX).hexdigest()


class Release:
    """A release in a directory, its pin, and a library that uses both."""

    def __init__(self, root: Path, files: dict[str, bytes], index_sha256: str | None = None) -> None:
        self.tree = root / "tree"
        for name, data in files.items():
            file = self.tree / FOLDER.text / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
        (self.tree / FOLDER.text / "checksums.txt").write_text(lines)
        digest = hashlib.sha256(lines.encode()).hexdigest()

        pins = root / "pins.toml"
        pins.write_text(
            f'[[pin]]\nname = "made"\npath = "{FOLDER}"\nmanifest_sha256 = "{digest}"\nfiles = {len(files)}\n'
            'bytes = 0\nmax_file_bytes = 1048576\nlicence = "none"\n'
            + (f'index_sha256 = "{index_sha256}"\n' if index_sha256 else "")
        )
        sources = (str(self.tree),)
        self.library = Library(Config(store=root / "store", sources=sources, pin_files=(pins,), offline=True))
        self.pin = self.library.pins.get("made")

    def kept(self, wanted: KernelFilter) -> list[str]:
        return [e.path.name for e in open_catalog(self.library, self.pin, fetch=False).kept_by(wanted)]


CUBINS = {f"{name}.cubin": name.encode() for name in NAMES}


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path, {**CUBINS, HEADER_PATH: HEADER}, INDEX_DIGEST)


@pytest.fixture
def bare(tmp_path: Path) -> Release:
    return Release(tmp_path, CUBINS)


def test_every_file_is_an_entry_in_the_manifests_order(release: Release) -> None:
    entries = list(open_catalog(release.library, release.pin, fetch=False))
    assert [e.path.relative_to(FOLDER) for e in entries] == [*CUBINS, HEADER_PATH]


def test_kernels_have_rows_and_other_files_have_none(release: Release) -> None:
    entries = list(open_catalog(release.library, release.pin, fetch=False))
    assert [e.row.symbol if e.row else None for e in entries] == [*NAMES, None]


def test_a_filter_keeps_kernels_alone(release: Release) -> None:
    assert release.kept(KernelFilter(sm=103)) == [f"{name}.cubin" for name in NAMES]
    assert release.kept(KernelFilter(sm=100)) == [f"{NAMES[0]}.cubin"]


def test_chosen_paths_bring_the_metadata_along(release: Release) -> None:
    chosen = chosen_paths(release.library, release.pin, KernelFilter(sm=100), fetch=False)
    assert chosen == (FOLDER.child(f"{NAMES[0]}.cubin"), FOLDER.child(HEADER_PATH))


def test_without_filters_the_choice_is_all(release: Release) -> None:
    assert chosen_paths(release.library, release.pin, KernelFilter(), fetch=False) is None


def test_a_filter_that_keeps_nothing_is_an_error(release: Release) -> None:
    with pytest.raises(UsageError, match="no kernel runs on sm 90, expected a device for one of sm_100f"):
        chosen_paths(release.library, release.pin, KernelFilter(sm=90), fetch=False)


def test_a_release_without_metadata_can_be_filtered_by_name(bare: Release) -> None:
    assert bare.kept(KernelFilter(globs=("*103a*",))) == [f"{NAMES[1]}.cubin"]


def test_a_release_without_metadata_cannot_be_filtered_by_facts(bare: Release) -> None:
    with pytest.raises(UsageError, match="no kernel metadata"):
        bare.kept(KernelFilter(dtypes=("bf16",)))


def test_a_release_without_metadata_is_filtered_by_the_targets_in_its_names(bare: Release) -> None:
    assert f"{NAMES[1]}.cubin" not in bare.kept(KernelFilter(sm=100))
    assert f"{NAMES[0]}.cubin" in bare.kept(KernelFilter(sm=100))


def test_the_index_is_rebuilt_from_the_header(release: Release) -> None:
    assert len(open_kernel_index(release.library, release.pin, fetch=False)) == 2


def test_a_store_that_exists_keeps_the_rebuilt_index(release: Release) -> None:
    release.library.store.root.mkdir(parents=True)
    open_kernel_index(release.library, release.pin, fetch=False)
    assert release.library.store.read(INDEX_DIGEST, 1 << 20) == INDEX


def test_looking_never_makes_a_store(release: Release) -> None:
    open_kernel_index(release.library, release.pin, fetch=False)
    assert not release.library.store.root.exists()


def test_a_stored_index_serves_without_the_header(release: Release) -> None:
    release.library.store.put(INDEX_DIGEST, INDEX)
    (release.tree / FOLDER.text / HEADER_PATH).unlink()
    assert NAMES[0] in open_kernel_index(release.library, release.pin, fetch=False)


def test_a_damaged_index_in_the_store_is_replaced_from_the_header(release: Release) -> None:
    release.library.store.put(INDEX_DIGEST, INDEX)
    stored = release.library.store.object_path(INDEX_DIGEST)
    stored.chmod(0o644)
    stored.write_bytes(INDEX[:-1] + b"\xff")
    assert len(open_kernel_index(release.library, release.pin, fetch=False)) == 2


def test_an_index_of_another_digest_is_never_kept(tmp_path: Path) -> None:
    release = Release(tmp_path, {**CUBINS, HEADER_PATH: HEADER}, "0" * 64)
    release.library.store.root.mkdir(parents=True)
    assert len(open_kernel_index(release.library, release.pin, fetch=False)) == 2
    assert not release.library.store.has("0" * 64)


def test_neither_index_nor_header_is_missing(release: Release) -> None:
    (release.tree / FOLDER.text / HEADER_PATH).unlink()
    with pytest.raises(MissingError):
        open_kernel_index(release.library, release.pin, fetch=False)


def test_a_header_of_another_digest_is_refused(release: Release) -> None:
    (release.tree / FOLDER.text / HEADER_PATH).write_bytes(HEADER + b"\n")
    with pytest.raises(CorruptError):
        open_kernel_index(release.library, release.pin, fetch=False)


def test_our_own_releases_are_read_from_their_list(tmp_path: Path) -> None:
    listed = json.dumps({"schema": 1, "kernels": []}).encode()
    release = Release(tmp_path, {"kernels.json": listed, "fmha/k.cubin": b"k"})
    assert release.kept(KernelFilter(sm=90)) == []
    assert release.kept(KernelFilter(globs=("*.cubin",))) == ["k.cubin"]
