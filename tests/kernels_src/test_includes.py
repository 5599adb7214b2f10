from __future__ import annotations

from pathlib import Path

import pytest

from kernels_src.compiling import BuildError
from kernels_src.includes import source_files, sources_sha256


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """kernel.cu includes x.cuh, which includes y.cuh; nobody includes z.cuh; Params.h is generated."""
    for folder in ("a", "common"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a/kernel.cu").write_text('#include <cuda.h>\n#include "../common/x.cuh"\n#include "Params.h"\n')
    (tmp_path / "common/x.cuh").write_text('#pragma once\n  #  include "y.cuh"\n')
    (tmp_path / "common/y.cuh").write_text('#pragma once\n#include "x.cuh"\n')
    (tmp_path / "common/z.cuh").write_text("#pragma once\n")
    return tmp_path


def test_includes_in_quotes_are_followed_and_others_are_not(sources: Path) -> None:
    found = [file.relative_to(sources).as_posix() for file in source_files(sources, "a/kernel.cu")]
    assert found == ["a/kernel.cu", "common/x.cuh", "common/y.cuh"]


def test_a_file_outside_the_sources_is_never_read(sources: Path) -> None:
    sources.parent.joinpath("outside.cuh").write_text("")
    (sources / "a/kernel.cu").write_text('#include "../../outside.cuh"\n')
    assert source_files(sources, "a/kernel.cu") == (sources / "a/kernel.cu",)


@pytest.mark.parametrize("changed", ["a/kernel.cu", "common/x.cuh", "common/y.cuh"])
def test_the_digest_follows_every_source(sources: Path, changed: str) -> None:
    before = sources_sha256(sources, "a/kernel.cu", {})
    (sources / changed).write_text((sources / changed).read_text() + "// more\n")
    assert sources_sha256(sources, "a/kernel.cu", {}) != before


def test_the_digest_ignores_files_that_are_not_included(sources: Path) -> None:
    before = sources_sha256(sources, "a/kernel.cu", {})
    (sources / "common/z.cuh").write_text("// more\n")
    assert sources_sha256(sources, "a/kernel.cu", {}) == before


def test_the_digest_follows_the_generated_header(sources: Path) -> None:
    one = sources_sha256(sources, "a/kernel.cu", {"Params.h": "struct Params {};"})
    other = sources_sha256(sources, "a/kernel.cu", {"Params.h": "struct Params { int a; };"})
    assert one != other


def test_the_digest_ignores_generated_headers_that_are_not_included(sources: Path) -> None:
    with_others = {"Params.h": "struct Params {};", "OtherParams.h": "struct OtherParams {};"}
    assert sources_sha256(sources, "a/kernel.cu", with_others) == sources_sha256(
        sources, "a/kernel.cu", {"Params.h": "struct Params {};"}
    )


@pytest.mark.parametrize("directive", ["#include HEADER", "#include <Params.h>", '#include "../../outside.cuh"'])
def test_an_include_that_the_digest_would_not_see_is_an_error(sources: Path, directive: str) -> None:
    sources.parent.joinpath("outside.cuh").write_text("")
    (sources / "common/y.cuh").write_text(f"{directive}\n")
    with pytest.raises(BuildError, match=r"common/y\.cuh: #include .*: expected a file below the sources"):
        sources_sha256(sources, "a/kernel.cu", {"Params.h": ""})


def test_a_source_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"a/kernel\.cu: .*No such file"):
        sources_sha256(tmp_path, "a/kernel.cu", {})
