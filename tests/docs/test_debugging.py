"""The blocks of docs/debugging.md, run on the stand-in driver; its tools are stand-ins too."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cubin_runtime import Config
from cubin_runtime.attention import ClampedInputError, Runtime, RuntimeStats, paged_decode, plan_paged_decode
from cubin_runtime.attention.tolerances import LSE_TOLERANCE, ROUNDING
from cubin_runtime.debug.recorded.recorder import DEFAULT_BYTES, DEFAULT_CALLS
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.launch.history import KEPT
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.attention_examples import Tensors
from tests.attention.stub_release import RELEASE_NAME, build_stub_release
from tests.docs.debugging_engine import Engine, engine_on

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "debugging.md").read_text()
WORDS = " ".join(TEXT.split())
SECTIONS = dict(zip(*(re.split(r"^## (.+)$", TEXT, flags=re.MULTILINE)[part::2] for part in (1, 2)), strict=True))
ENGINE = Path(__file__).with_name("debugging_engine.py")


def blocks(section: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(block, "docs/debugging.md", "exec"), names)


@pytest.fixture
def engine(standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.chdir(tmp_path)
    with engine_on(standin.path, tmp_path / "store") as made:
        yield made


def test_every_block_is_run_here() -> None:
    known = {name: (len(blocks(name, "python")), len(blocks(name, "sh"))) for name in SECTIONS}
    assert {name: found for name, found in known.items() if found != (0, 0)} == {
        "A wrong result": (2, 0),
        "Recording and replaying": (0, 1),
        "A fault on the device": (2, 1),
        "Statistics and NVTX": (1, 0),
    }
    assert TEXT.count("```") == 2 * sum(map(sum, known.values()))


def test_inputs_are_checked(engine: Engine) -> None:
    run(blocks("A wrong result", "python")[0], engine.names())
    engine.here.driver.copy_to_device(engine.tensors["seq_lens"].pointer, np.array([300], dtype=np.int32))
    with pytest.raises(ClampedInputError):
        run(blocks("A wrong result", "python")[0], engine.names())


def test_calls_are_recorded_and_compared(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks("A wrong result", "python")[1], engine.names())
    assert capsys.readouterr().out.startswith("right ")


class Program:
    """What sends launches in all ways, on kernels that do nothing."""

    def __init__(self, runtime: Runtime) -> None:
        tensors = Tensors()
        given = dict(
            zip(("q", "k_cache", "v_cache", "page_table", "seq_lens", "out"), tensors.positional, strict=False)
        )
        self.plan = plan_paged_decode(**given, max_seq_len=1024, runtime=runtime)
        self.bound = self.plan.bind(**given)
        self.given, self.runtime = given, runtime

    def step(self) -> None:
        self.plan.run(**self.given)
        self.bound.step()
        paged_decode(**self.given, max_seq_len=1024, runtime=self.runtime)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_stub_release(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def program(stubs: tuple[Path, Path], standin: StandIn, tmp_path: Path) -> Iterator[Program]:
    tree, pins = stubs
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    runtime = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME)
    standin.accept_kernels(PAGED_DECODE_TMA.size)
    runtime.driver.set_current(runtime.driver.primary_context(0))
    yield Program(runtime)
    runtime.driver.set_current(None)


def test_a_fault_is_told_with_the_launches_of_every_path(
    program: Program, standin: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        program.step()
    names = {"engine": program, "runtime": program.runtime}
    run(blocks("A fault on the device", "python")[0], names)
    assert capsys.readouterr().out == ""
    standin.fail("cuStreamSynchronize", 700)
    with pytest.raises(SystemExit):
        run(blocks("A fault on the device", "python")[0], names)
    first, heading, *launches = capsys.readouterr().out.splitlines()
    assert first.startswith("cuStreamSynchronize returned 700")
    assert "a fault of earlier asynchronous work" in first
    assert heading == "last launches, newest last:"
    assert len(launches) == 15  # five steps
    assert all(re.search(r"sha256 \w{12}\) grid .* stream 0x0 pointers: q=0x7f0000001000 ", line) for line in launches)


def test_the_launches_are_there_when_the_driver_is_not(
    program: Program, standin: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    program.step()
    standin.fault(700)
    run(blocks("A fault on the device", "python")[1], {"runtime": program.runtime})
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_it_counts_the_launches_that_are_kept() -> None:
    assert f"the last {KEPT} launches of the context" in WORDS


@pytest.mark.parametrize("section", ["Recording and replaying", "A fault on the device"])
def test_commands_run(section: str, standin: StandIn, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    cli = "from cubin_runtime.cli import main; raise SystemExit(main())"
    python = shlex.quote(sys.executable)
    serving = f"{python} {shlex.quote(str(ENGINE))} {shlex.quote(str(standin.path))} {shlex.quote(str(tmp_path / 's'))}"
    scripts = {
        "python": f"exec {serving}",
        "cubin-runtime": f'exec {python} -c {shlex.quote(cli)} "$@"',
        "compute-sanitizer": 'test "$1 $2" = "--tool memcheck" && shift 2 && exec "$@"',
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    (block,) = blocks(section, "sh")
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-euc", block], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"recorded out: error \S+, tolerance \S+$", done.stdout, re.MULTILINE)


def test_every_refusal_is_one_that_the_package_makes() -> None:
    fragments = re.findall(r"^\| `([^`]+)`", SECTIONS["A rejected launch"], re.MULTILINE)
    source = "".join(file.read_text() for file in ROOT.glob("cubin_runtime/**/*.py"))
    assert len(fragments) == 11
    assert [fragment for fragment in fragments if fragment not in source] == []


def test_statistics_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE", str(tmp_path))
    run(blocks("Statistics and NVTX", "python")[0], {})
    assert capsys.readouterr().out.startswith(f"{RuntimeStats.__name__}(launches=0")


def test_it_states_the_bounds_and_tolerances() -> None:
    assert f"its newest {DEFAULT_CALLS} files and {DEFAULT_BYTES >> 30} GiB" in WORDS

    def number(value: float) -> str:
        return f"{value:.1e}".replace("e-0", "e-")

    assert f"{number(ROUNDING['bfloat16'].probabilities)} for probabilities in bfloat16" in WORDS
    assert f"or {number(ROUNDING['float16'].probabilities)} in float16" in WORDS
    outputs = [number(ROUNDING[dtype].output) for dtype in ("bfloat16", "float16", "float8_e4m3fn")]
    assert "{}, {} or {} for an output in bfloat16, float16 or e4m3".format(*outputs) in WORDS
    assert f"{number(LSE_TOLERANCE)} for the log-sum-exp" in WORDS
