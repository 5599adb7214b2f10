"""Which commands ``tools/gpu_run.sh`` runs for its words, on a made-up machine with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DECODE, MLA, PREFILL = (f"benchmarks/gpu_{name}.py" for name in ("decode", "mla", "prefill"))
PROFILES = {"benchmarks/gpu_profile.py", "benchmarks/gpu_prefill_profile.py"}
CASES = "tests.gpu.sanitizer_cases"
SANITIZERS = ("memcheck", "initcheck", "synccheck", "racecheck")


class Machine:
    """Its interpreter and sanitizer only write down what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.out, self.calls = folder / "out", folder / "calls"
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("nvidia-smi", "compute-sanitizer", "python"):
            program = self.programs / name
            program.write_text(f'#!/bin/sh\necho "$*" >> "{self.calls}"\necho 1 passed\n')
            program.chmod(0o755)

    def run(self, *words: str) -> int:
        env = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHON": str(self.programs / "python"),
            "OUT": str(self.out),
        }
        return subprocess.run([ROOT / "tools" / "gpu_run.sh", *words], env=env, capture_output=True).returncode

    def benchmarks(self, *, compiled: bool) -> list[str]:
        """The scripts in the order of their calls."""
        calls = [line.split() for line in self.calls.read_text().splitlines() if line.startswith("benchmarks/")]
        return [script for script, *options in calls if ("--compile" in options) is compiled]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_two_benchmarks_are_compiled_before_either_is_measured(machine: Machine) -> None:
    assert machine.run("decode", "mla") == 0
    assert sorted(machine.benchmarks(compiled=True)) == [DECODE, MLA]
    assert machine.benchmarks(compiled=False) == [DECODE, MLA]
    lines = [line for line in machine.calls.read_text().splitlines() if line.startswith("benchmarks/")]
    assert ["--compile" in line for line in lines] == [True, True, False, False]
    assert {path.name for path in machine.out.glob("compile_*")} == {"compile_decode.log", "compile_mla.log"}


def test_benchmarks_means_every_one_of_a_gpu(machine: Machine) -> None:
    assert machine.run("benchmarks") == 0
    scripts = {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("gpu_*.py")}
    assert set(machine.benchmarks(compiled=False)) == scripts - {"benchmarks/gpu_environment.py", *PROFILES}
    assert sorted(machine.benchmarks(compiled=True)) == [DECODE, MLA, PREFILL]


def test_that_of_context_attention_runs_alone(machine: Machine) -> None:
    assert machine.run("prefill") == 0
    assert machine.benchmarks(compiled=True) == machine.benchmarks(compiled=False) == [PREFILL]


def test_the_profiler_runs_when_asked_for(machine: Machine) -> None:
    assert machine.run("profile") == 0
    assert sorted(machine.benchmarks(compiled=False)) == sorted(PROFILES)
    assert machine.benchmarks(compiled=True) == []


def test_no_word_means_everything(machine: Machine) -> None:
    assert machine.run() == 0
    calls = machine.calls.read_text()
    assert "-m pytest" in calls
    assert [tool for tool in SANITIZERS if f"--tool {tool} " not in calls] == []
    assert MLA in machine.benchmarks(compiled=False)


def test_a_word_that_is_no_step_is_refused_before_anything_runs(machine: Machine) -> None:
    assert machine.run("decode", "moe") == 2
    assert not machine.calls.exists()


def test_the_tests_of_two_gpus_run_alone(machine: Machine) -> None:
    assert machine.run("multi_gpu") == 0
    (tests,) = [call for call in machine.calls.read_text().splitlines() if call.startswith("-m pytest")]
    assert tests.endswith("-m multi_gpu tests/gpu")
    assert machine.benchmarks(compiled=False) == []


def test_a_sanitizer_takes_families_of_kernels(machine: Machine) -> None:
    assert machine.run("memcheck", "racecheck:decode,context") == 0
    calls = sorted(call for call in machine.calls.read_text().splitlines() if call.startswith("--tool"))
    assert [call.split(" -m ")[1] for call in calls] == [CASES, f"{CASES} decode context"]
    assert [call.split()[1] for call in calls] == ["memcheck", "racecheck"]
    assert machine.run("racecheck:decode", "leakcheck:decode") == 2


def test_each_run_of_a_sanitizer_has_a_log_of_its_own(machine: Machine) -> None:
    assert machine.run("racecheck:decode,context", "racecheck:mla", "racecheck") == 0
    logs = {path.name for path in machine.out.glob("racecheck*.log")}
    assert logs == {"racecheck.log", "racecheck-mla.log", "racecheck-decode-context.log"}
    assert machine.run("racecheck:mla") == 0
    assert {path.name for path in machine.out.glob("racecheck*.log")} == {"racecheck-mla.log"}


def test_the_cases_of_the_sanitizers_find_what_they_import(machine: Machine) -> None:
    script = f'#!/bin/sh\nfor cases; do :; done\nexec "{sys.executable}" -c "import $cases"\n'
    (machine.programs / "compute-sanitizer").write_text(script)
    assert machine.run("memcheck") == 0
