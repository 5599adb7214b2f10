"""What a runtime asks of a kernel when it loads it, by what the release says of the kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime import Config
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.attention import Runtime
from cubin_runtime.errors import AbiError
from cubin_runtime.launch.modules import LoadedKernel
from cubin_runtime.testing import GraphDriver, StandIn
from tests.artifacts.kernel_headers import header_of
from tests.golden.adapter import ABIS, native_rows
from tests.golden.cubins import cubin_of, write_release

ROW = native_rows()[0]
SM120_ROW = next(row for row in native_rows() if row["name"] == "portable_mla_decode_e4m3_latent512_sm120")
NATIVE, PUBLISHED = ABIS
PUBLISHED_SYMBOL = "fmhaSm100fKernel_one"
PUBLISHED_BYTES = 1280


def runtime_of(folder: Path, standin: StandIn, name: str, files: dict[str, bytes]) -> Runtime:
    (folder / "pins.toml").write_text(write_release(folder, name, ABIS[name], files))
    config = Config(
        store=folder / "store", sources=(str(folder / f"{name}.zip"),), pin_files=(folder / "pins.toml",), offline=True
    )
    return Runtime(config, driver=GraphDriver(standin.path), release=NATIVE, trtllm_release=PUBLISHED)


def load_native(
    folder: Path,
    standin: StandIn,
    sm: int = 90,
    threads: int = 1024,
    entry: Mapping[str, Any] = ROW,
    **said: Any,
) -> LoadedKernel:
    """Load a kernel whose cubin is for ``sm`` and ``threads``; its ``entry`` in the table is right but for ``said``."""
    row = {**entry, **said}
    standin.add_kernel(row["symbol"], (row["struct_bytes"],))
    table = b'{"schema": 1, "release": "", "kernels": [%s]}' % json.dumps(row).encode()
    cubin = cubin_of(row["symbol"], sm, row["struct_bytes"], threads)
    runtime = runtime_of(folder, standin, NATIVE, {"kernels.json": table, row["file"]: cubin})
    return runtime.load(runtime.native_release().kernels[0], runtime.driver.primary_context())


def load_trtllm_gen(
    folder: Path, standin: StandIn, sm: int = 100, threads: int = 1024, *, nonportable: bool = False, **said: str
) -> LoadedKernel:
    """The same for a published kernel, whose header says 64 where nothing is ``said``."""
    standin.pose_as(10, 0)
    standin.accept_kernels(PUBLISHED_BYTES)
    header = header_of(PUBLISHED_SYMBOL, **said)
    cubin = cubin_of(PUBLISHED_SYMBOL, sm, PUBLISHED_BYTES, threads)
    files = {HEADER_PATH: header, f"{PUBLISHED_SYMBOL}.cubin": cubin}
    runtime = runtime_of(folder, standin, PUBLISHED, files)
    (meta,) = runtime.trtllm_gen_release().finder.index
    return runtime.load_trtllm_gen(meta, runtime.driver.primary_context(), nonportable_cluster=nonportable)


def test_a_kernel_of_ours_that_is_as_its_table_says_is_loaded(tmp_path: Path, standin: StandIn) -> None:
    kernel = load_native(tmp_path, standin)
    assert str(kernel.architecture) == f"sm_{ROW['sm']}"
    assert kernel.shared_bytes == ROW["dynamic_shared_bytes"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threads": ROW["threads"] - 1}, f"a block of {ROW['threads']} threads; according to its ELF, at most"),
        ({"sm": 80}, "the cubin says sm_80., its metadata declares sm_90a"),
        ({"struct_fingerprint": "0" * 64}, "the release was recorded with .*, fingerprint 0000000000000000"),
        ({"dynamic_shared_bytes": 232449}, "needs 232449 bytes of dynamic shared memory per block"),
    ],
)
def test_a_kernel_of_ours_that_is_not_is_refused(
    tmp_path: Path, standin: StandIn, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(AbiError, match=words):
        load_native(tmp_path, standin, **changes)
    assert "cuModuleLoadData" not in standin.names()


@pytest.mark.parametrize("minor", [0, 1])
def test_a_kernel_for_sm120_is_loaded_on_sm120_and_sm121(tmp_path: Path, standin: StandIn, minor: int) -> None:
    standin.pose_as(12, minor)
    kernel = load_native(tmp_path, standin, sm=120, entry=SM120_ROW)
    assert (str(kernel.architecture), kernel.shared_bytes) == ("sm_120", SM120_ROW["dynamic_shared_bytes"])


@pytest.mark.parametrize(("major", "minor"), [(9, 0), (10, 0), (10, 3)])
def test_a_kernel_for_sm120_is_refused_elsewhere(tmp_path: Path, standin: StandIn, major: int, minor: int) -> None:
    standin.pose_as(major, minor)
    with pytest.raises(AbiError, match=rf"built for sm_120 .*, device 0 .* is {major}\.{minor}"):
        load_native(tmp_path, standin, sm=120, entry=SM120_ROW)
    assert "cuModuleLoadData" not in standin.names()


def test_a_kernel_for_sm120_that_needs_more_shared_memory_than_its_ctas_have_is_refused(
    tmp_path: Path, standin: StandIn
) -> None:
    standin.describe("RTX", (12, 0), 188, 100 << 10, 128 << 20, 16)
    with pytest.raises(AbiError, match="needs 101377 bytes of dynamic shared memory per block"):
        load_native(tmp_path, standin, sm=120, entry=SM120_ROW, dynamic_shared_bytes=(99 << 10) + 1)


@pytest.mark.parametrize("nonportable", [False, True])
def test_a_published_kernel_that_is_as_its_header_says_is_loaded(
    tmp_path: Path, standin: StandIn, nonportable: bool
) -> None:
    kernel = load_trtllm_gen(tmp_path, standin, nonportable=nonportable)
    assert (str(kernel.architecture), kernel.shared_bytes) == ("sm_100f", 64)
    assert kernel.nonportable_cluster is nonportable


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threads": 63}, "a block of 64 threads; according to its ELF, at most 63"),
        ({"sm": 103}, "the cubin says sm_103., its metadata declares sm_100f"),
        ({"mSharedMemBytes": "232449"}, "needs 232449 bytes of dynamic shared memory per block"),
    ],
)
def test_a_published_kernel_that_is_not_is_refused(
    tmp_path: Path, standin: StandIn, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(AbiError, match=words):
        load_trtllm_gen(tmp_path, standin, **changes)
    assert "cuModuleLoadData" not in standin.names()
