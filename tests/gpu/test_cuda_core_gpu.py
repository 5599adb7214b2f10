"""cuda.core beside us on a device: its streams, and our cubins as its object code."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.attention import Runtime, TensorView, paged_decode, view_of
from cubin_runtime.launch.workspace import SemaphoreWorkspace
from tests.gpu.example_scripts import example_script

pytestmark = pytest.mark.gpu


def test_a_cubin_launched_by_cuda_core_gives_the_bits_of_a_plan(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    core = pytest.importorskip("cuda.core", reason="needs cuda-core")
    device = core.Device(0)
    device.set_current()
    example_script("cuda_core_object_code").run_both(runtime, device)
    assert "outputs equal" in capsys.readouterr().out


SHAPES = {
    "q": ("float16", (2, 8, 128)),
    "k_cache": ("float16", (4, 64, 2, 128)),
    "v_cache": ("float16", (4, 64, 2, 128)),
    "page_table": ("int32", (2, 2)),
    "seq_lens": ("int32", (2,)),
    "out": ("float16", (2, 8, 128)),
}


def test_tensors_buffers_and_streams_of_cuda_core_are_taken_as_torch_s_are(runtime: Runtime) -> None:
    core = pytest.importorskip("cuda.core", reason="needs cuda-core")
    np = pytest.importorskip("numpy")
    from cuda.core.utils import StridedMemoryView

    device = core.Device(0)
    device.set_current()
    stream, random = device.create_stream(), np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: random.standard_normal(shape).astype(dtype) for name, (dtype, shape) in SHAPES.items()
    }
    arrays |= {"page_table": np.array([[2, 0], [1, 3]], np.int32), "seq_lens": np.array([100, 7], np.int32)}
    buffers = {name: device.allocate(array.nbytes, stream=stream) for name, array in arrays.items()}
    scratch = {name: device.allocate(32 << 20, stream=stream) for name in ("semaphores", "scratch")}
    stream.sync()
    runtime.driver.fill(int(scratch["semaphores"].handle), 0, 32 << 20, 0)
    for name, array in arrays.items():
        runtime.driver.copy_to_device(int(buffers[name].handle), array)
    tensors = {
        name: StridedMemoryView.from_buffer(buffers[name], shape, dtype=np.dtype(dtype))
        for name, (dtype, shape) in SHAPES.items()
    }
    views = {name: TensorView.contiguous(int(buffers[name].handle), *form) for name, form in SHAPES.items()}
    assert {name: view_of(tensor, name) for name, tensor in tensors.items()} == views
    workspace = SemaphoreWorkspace.of(**scratch)
    given = {"max_seq_len": 128, "workspace": workspace, "runtime": runtime, "stream": stream}
    assert paged_decode(**tensors, **given) is tensors["out"]
    stream.sync()
    first = runtime.driver.read(views["out"].pointer, arrays["out"].nbytes)
    made = paged_decode(**(tensors | {"out": None}), **given)
    stream.sync()
    assert isinstance(made, StridedMemoryView)
    assert view_of(made, "made").spec == views["out"].spec
    assert runtime.driver.read(made.ptr, arrays["out"].nbytes) == first
    runtime.driver.fill(views["out"].pointer, 0, arrays["out"].nbytes, 0)
    paged_decode(**views, **given)
    stream.sync()
    assert runtime.driver.read(views["out"].pointer, arrays["out"].nbytes) == first != bytes(len(first))
