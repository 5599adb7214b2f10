"""``make dist`` builds the same bytes twice, and an sdist from which everything can be built again."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from cubin_runtime._version import KERNELS_VERSION, __version__
from kernels_src.provenance import bill_of_materials, provenance, write_statements

ROOT = Path(__file__).parents[2]
URL = "https://host.example/owner/name"
SMALL = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "docs/index.md", "cubin_runtime/*.*")


@pytest.fixture(scope="module")
def dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dist_tool", ROOT / "tools" / "dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sdist(dist: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dist.build_sdist(tmp_path_factory.mktemp("dist"), isolated=False, url=URL)


def test_the_sdist_has_every_tracked_file(sdist: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone")
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert [name for name in listed.stdout.splitlines() if name not in names and (ROOT / name).exists()] == []


def test_members_state_one_time_and_no_user(dist: ModuleType, sdist: Path) -> None:
    with tarfile.open(sdist) as opened:
        members = opened.getmembers()
    assert {(one.mtime, one.uid, one.gid, one.uname) for one in members} == {(dist.epoch(), 0, 0, "")}


def small_copy(folder: Path, umask: int, time: int) -> Path:
    """The project with few of its modules, whose files have permissions and times of their own."""
    before = os.umask(umask)
    try:
        for name in SMALL:
            for file in sorted(ROOT.glob(name), reverse=umask != 0):
                target = folder / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
                os.utime(target, (time, time))
    finally:
        os.umask(before)
    return folder


@pytest.fixture(scope="module")
def twice(dist: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two builds of one project: of folders, permissions and times of their own, under other umasks."""
    built = []
    for umask, time in ((0, 1_000_000_000), (0o077, 1_700_000_000)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "ROOT", small_copy(tmp_path_factory.mktemp("project"), umask, time))
            patch.setenv("SOURCE_DATE_EPOCH", "1600000000")
            before = os.umask(umask)
            built.append(tmp_path_factory.mktemp("built"))
            dist.build_package(built[-1], isolated=False, url=URL)
            os.umask(before)
    return built[0], built[1]


def test_two_builds_have_the_same_bytes(dist: ModuleType, twice: tuple[Path, Path]) -> None:
    first, second = map(dist.digests, twice)
    assert first == second
    assert [name.rpartition(".")[2] for name in first] == ["whl", "gz"]


def test_the_metadata_has_the_project_s_addresses(twice: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(twice[0] / f"cubin_runtime-{__version__}-py3-none-any.whl") as opened:
        metadata = opened.read(f"cubin_runtime-{__version__}.dist-info/METADATA").decode()
    assert "Project-URL: Homepage, https://host.example/owner/name\n" in metadata
    assert f"](https://host.example/owner/name/blob/v{__version__}/CHANGELOG.md)" in metadata
    assert "](docs/" not in metadata
    assert "Classifier: Programming Language :: Python :: 3.12\n" in metadata


@pytest.mark.parametrize(
    ("text", "absolute"),
    [
        ("[a](docs/a.md#b)", "[a](https://h.example/o/blob/{tag}/docs/a.md#b)"),
        ("![a](docs/a.png)", "![a](https://h.example/o/raw/{tag}/docs/a.png)"),
        ("[a](https://b.example)", "[a](https://b.example)"),
        ("[a](#here)", "[a](#here)"),
    ],
)
def test_links_of_the_readme_become_absolute(dist: ModuleType, text: str, absolute: str) -> None:
    assert dist.absolute_links(text, "https://h.example/o") == absolute.format(tag=f"v{__version__}")


def test_the_changelog_has_this_version(dist: ModuleType) -> None:
    assert [one for one in dist.problems({"PROJECT_URL": "https://h.example"}) if "has no section" in one] == []


def test_what_speaks_against_a_release_is_listed(dist: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"status": " M README.md", "tag": "v0"}
    monkeypatch.setattr(dist, "git", lambda *words: said.get(words[0], ""))
    monkeypatch.setattr(dist, "__version__", "9.9.9")
    found = " | ".join(dist.problems({}))
    assert dist.tell(dist.problems({})) == 1
    for words in ("has no section '## [9.9.9]", "changes that are not committed", "exists already", "PROJECT_URL"):
        assert words in found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / f"hopper-{KERNELS_VERSION}"
    folder.mkdir()
    kernels = [{"family": "fmha", "sources_sha256": "a" * 64}, {"family": "mla", "sources_sha256": "b" * 64}]
    (folder / "kernels.json").write_text(json.dumps({"kernels": kernels}))
    (folder / "checksums.txt").write_text(f"{'1' * 64}  fmha/a.cubin\n{'2' * 64}  kernels.json\n")
    return folder


def test_the_bill_of_materials_lists_every_file_and_tool(tree: Path) -> None:
    bill = bill_of_materials(tree)
    assert [(one["name"], one["hashes"][0]["content"]) for one in bill["components"]] == [
        ("fmha/a.cubin", "1" * 64),
        ("kernels.json", "2" * 64),
    ]
    assert "pkg:pypi/nvidia-cuda-nvcc@13.0.88" in [one["purl"] for one in bill["metadata"]["tools"]["components"]]


def test_the_provenance_ties_the_wheel_to_commit_sources_and_tools(tree: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "kernels.whl"
    wheel.write_bytes(b"wheel")
    said = provenance(tree, wheel, "c" * 40)
    definition = said["predicate"]["buildDefinition"]
    assert [one["name"] for one in said["subject"]] == ["kernels.whl", f"{tree.name}/checksums.txt"]
    assert definition["resolvedDependencies"][0]["digest"] == {"gitCommit": "c" * 40}
    assert definition["internalParameters"]["sources"][1] == {"family": "mla", "sha256": "b" * 64}


def test_two_statements_of_one_tree_are_equal(tree: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "kernels.whl"
    wheel.write_bytes(b"wheel")
    files = write_statements(tree, wheel, tmp_path, commit="")
    first = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in write_statements(tree, wheel, tmp_path, commit="")] == first
