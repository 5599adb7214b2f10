from __future__ import annotations

import pytest

from kernels_src.build import build
from kernels_src.release import Release
from kernels_src.toolchain import Toolchain, ToolchainError, find_toolchain
from tests.kernels_src.host_scheduler import HostScheduler
from tests.kernels_src.stub_kernels import LAYOUT, SOURCE, stub, write_source


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    try:
        return find_toolchain()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def stub_release(toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """A release of one trivial kernel for two SMs, built once."""
    root = tmp_path_factory.mktemp("stub-release")
    write_source(root / "sources", SOURCE)
    variants = (stub(sm="90a"), stub(sm="80"))
    return build(
        root / "out",
        variants,
        {LAYOUT.name: LAYOUT},
        toolchain,
        sources=root / "sources",
        release="hopper-0.0.1",
    )


@pytest.fixture(scope="session")
def schedulers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, HostScheduler]:
    """The scheduler of paged decode, and that of MLA decode (True)."""
    folder = tmp_path_factory.mktemp("scheduler")
    return {mla: HostScheduler(mla, folder) for mla in (False, True)}


@pytest.fixture(scope="session")
def segments_scheduler(tmp_path_factory: pytest.TempPathFactory) -> HostScheduler:
    """The scheduler of batch-invariant paged decode."""
    return HostScheduler(False, tmp_path_factory.mktemp("segments-scheduler"), segments=True)
