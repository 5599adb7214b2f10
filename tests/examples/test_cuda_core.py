"""The example that hands a cubin to cuda.core, as far as that needs no GPU; tests/gpu has the rest."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core")

from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream

from cubin_runtime import Config
from cubin_runtime.artifacts.cubins.cubin import parse_cubin
from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.launch.driver import Driver
from cubin_runtime.launch.plan import LaunchAttributes, LaunchPlan
from cubin_runtime.launch.streams import stream_handle
from tests.attention.attention_examples import RELEASE_NAME
from tests.attention.stub_release import build_stub_release
from tests.gpu.example_scripts import example_script

example = example_script("cuda_core_object_code")
ITEM_BYTES = {"bfloat16": 2, "int32": 4}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    tree, pins = build_stub_release(tmp_path_factory.mktemp("stubs"))
    store = tmp_path_factory.mktemp("store")
    config = Config(store=store, sources=(str(tree),), pin_files=(pins,), offline=True)
    return Runtime(config, driver=Driver("/nonexistent/libcuda.so.1"), release=RELEASE_NAME)


@pytest.fixture
def launch(runtime: Runtime) -> LaunchPlan:
    views = {name: TensorView.contiguous(0x10000000, *form) for name, form in example.SHAPES.items()}
    return example.plan_decode(runtime, views, example.H200).launch_plans()[0]


def test_the_object_code_is_the_pinned_cubin(runtime: Runtime, launch: LaunchPlan) -> None:
    code = example.object_code(runtime.library, launch)
    assert (code.code_type, code.name) == ("cubin", launch.path.name)
    assert parse_cubin(code.code).kernels.keys() == {launch.symbol}


def test_damaged_bytes_do_not_get_there(runtime: Runtime, launch: LaunchPlan, tmp_path: Path) -> None:
    (tree,) = runtime.config.sources or ()
    file = tmp_path / launch.path.text
    file.parent.mkdir(parents=True)
    data = bytearray((Path(tree) / launch.path.text).read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for name in ("checksums.txt", "kernels.json"):
        other = Path(RELEASE_NAME) / name
        (tmp_path / other).write_bytes((Path(tree) / other).read_bytes())
    config = replace(runtime.config, store=tmp_path / "store", sources=(str(tmp_path),))
    lied = Runtime(config, driver=runtime.driver, release=RELEASE_NAME)
    with pytest.raises(CubinRuntimeError, match="sha256"):
        example.object_code(lied.library, launch)


def test_the_launch_needs_no_attributes(launch: LaunchPlan) -> None:
    assert launch.attributes == LaunchAttributes()


@pytest.mark.parametrize("name", example.SHAPES)
def test_its_tensors_are_filled(name: str) -> None:
    dtype, shape = example.SHAPES[name]
    assert len(example.content(name)) == prod(shape) * ITEM_BYTES[dtype]


def test_it_runs_without_a_gpu(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(runtime)
    shown = capsys.readouterr().out
    assert "bytes of parameters" in shown
    assert "not launched, as there is no GPU here" in shown


def test_it_is_short() -> None:
    assert len(Path(example.__file__).read_text().splitlines()) < 150


def test_streams_of_cuda_core_are_read() -> None:
    streams = (LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM)
    assert [stream_handle(stream) for stream in streams] == [0, 2]


def test_a_stream_that_cuda_core_was_given_is_read() -> None:
    try:
        stream = Stream.from_handle(0x5001)
    except Exception as error:
        pytest.skip(f"cuda.core makes no stream without a driver: {type(error).__name__}")
    assert stream_handle(stream) == 0x5001
