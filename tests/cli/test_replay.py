"""``replay``: recorded calls on a host without a GPU."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.cli import main
from cubin_runtime.cli.json_schema import schema_of
from cubin_runtime.debug.recorded.call import RecordedCall, RecordedTensor
from cubin_runtime.debug.recorded.call_file import write_call
from cubin_runtime.launch.driver import Driver
from cubin_runtime.tensor import TensorView
from tests.attention.recorded_calls import decode_call
from tests.cli.json_shape import misfits

Shown = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Driver.__init__
    monkeypatch.setattr(Driver, "__init__", lambda self, path=None: opened(self, "/nonexistent/libcuda.so.1"))


def written(folder: Path, call: RecordedCall, name: str = "call") -> str:
    write_call(call, folder / name)
    return str(folder / name)


def wrong_call() -> RecordedCall:
    call = decode_call()
    out = call.tensors["out"]
    return replace(call, tensors={**call.tensors, "out": replace(out, data=bytes(len(out.data)))})


def test_a_right_call_is_told(tmp_path: Path, capsys: Shown) -> None:
    assert main(["replay", written(tmp_path, decode_call())]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("call: paged_decode on made-up GPU\n")
    assert "  k_cache: bfloat16 [8, 16, 1, 32], strides [512, 32, 32, 1], 3 pages stored\n" in shown
    assert "  recorded out: error " in shown
    assert "not replayed: cannot open the CUDA driver library" in shown


def test_a_wrong_output_is_code_9(tmp_path: Path, capsys: Shown) -> None:
    right, wrong = written(tmp_path, decode_call(), "right"), written(tmp_path, wrong_call(), "wrong")
    assert main(["replay", right, wrong]) == 9
    assert "4 of 4 rows are off, the first at token 0, head 0: WRONG" in capsys.readouterr().out


def test_the_report_is_json(tmp_path: Path, capsys: Shown) -> None:
    assert main(["replay", written(tmp_path, decode_call()), "--json", "--reference-only"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert misfits(shown, schema_of("replay")) == []
    assert (shown["verb"], shown["not_run"]) == ("replay", "--reference-only")
    (call,) = shown["calls"]
    assert (call["operator"], call["ok"], call["same_bits"]) == ("paged_decode", True, None)
    assert call["recorded"][0]["name"] == "out"
    assert call["tensors"]["q"]["shape"] == [2, 2, 32]


def test_a_device_that_is_not_there_is_code_9(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "pins.toml").write_text("")
    assert main(["replay", written(tmp_path, decode_call()), "--device", "0"]) == 9
    assert "cannot open the CUDA driver library" in capsys.readouterr().err


def test_a_damaged_file_is_code_5(tmp_path: Path, capsys: Shown) -> None:
    file = written(tmp_path, decode_call())
    Path(file).write_bytes(Path(file).read_bytes()[:-1])
    assert main(["replay", file]) == 5
    assert "the sha256 of the elements differs" in capsys.readouterr().err


def test_a_missing_file_is_code_4(tmp_path: Path, capsys: Shown) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 4
    assert "expected a recorded call" in capsys.readouterr().err


def test_files_behind_a_damaged_one_are_told_too(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "damaged").write_bytes(b"12345678")
    files = [str(tmp_path / "damaged"), str(tmp_path / "missing"), written(tmp_path, decode_call())]
    assert main(["replay", *files]) == 5
    shown = capsys.readouterr()
    assert "  recorded out: error " in shown.out
    assert [line.split(" ")[1] for line in shown.err.splitlines()] == [f"{files[0]}:", files[1]]
    assert main(["replay", *files, "--json"]) == 5
    shown_json = json.loads(capsys.readouterr().out)
    assert misfits(shown_json, schema_of("replay")) == []
    assert ([one["code"] for one in shown_json["errors"]], len(shown_json["calls"])) == ([5, 4], 1)


def test_no_file_is_code_2() -> None:
    assert main(["replay"]) == 2


def test_no_more_than_one_call_is_held(tmp_path: Path) -> None:
    size = 8 << 20
    call = decode_call(operator="other")
    large = RecordedTensor(TensorView.contiguous(1 << 30, "uint8", (size,)), bytes(size))
    call = replace(call, tensors={**call.tensors, "large": large})
    files = [written(tmp_path, call, f"call{number}") for number in range(6)]
    tracemalloc.start()
    try:
        assert main(["replay", "--reference-only", "--json", *files]) == 0
        assert tracemalloc.get_traced_memory()[1] < 5 * size
    finally:
        tracemalloc.stop()
