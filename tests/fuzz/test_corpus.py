from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzz_inputs import CORPUS, changed, seeds_of
from tests.fuzz.fuzz_targets import TARGETS

ROOT = Path(__file__).parents[2]
CASES = [(target, file) for target in TARGETS for file in sorted((CORPUS / target).iterdir())]


@pytest.mark.parametrize(("target", "file"), CASES, ids=lambda value: getattr(value, "name", value))
def test_every_input_of_the_corpus_parses_or_is_refused_as_promised(target: str, file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TARGETS[target](file.read_bytes())


@pytest.mark.parametrize(
    ("target", "name", "word"),
    [
        ("manifest", "climbs", "has the component"),
        ("manifest", "absolute", "empty component"),
        ("manifest", "escape", "control character"),
        ("manifest", "crlf", "CRLF"),
        ("manifest", "truncated", "truncated"),
        ("header", "other-sm", "architecture refused"),
        ("header", "twice", "occurs twice"),
        ("elf", "many-sections", "sections"),
        ("elf", "parameter-without-bytes", "has no bytes"),
        ("zip", "climbs", "odd name"),
        ("zip", "bomb", "at most"),
        ("zip", "zip64-far", "damaged"),
        ("zip", "nameless-member", "not a readable zip"),
        ("call", "nested", "nested too deeply"),
        ("call", "long-header", "a header of"),
        ("call", "overlap", "expected it at"),
        ("call", "negative", "expected sizes"),
    ],
)
def test_a_trick_is_refused_by_its_own_sentence(target: str, name: str, word: str) -> None:
    assert word in TARGETS[target]((CORPUS / target / name).read_bytes())


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_corpus_holds_inputs_that_parse_and_inputs_that_do_not(target: str) -> None:
    words = {TARGETS[target](seed) for seed in seeds_of(target)}
    assert {word.startswith(("parsed", "read")) for word in words} == {True, False}


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_changed_inputs_stay_within_their_bound(data: st.DataObject) -> None:
    assert len(data.draw(changed("zip", [bytes(1 << 17)]))) <= 1 << 17


def run(*arguments: str, broken: str = "") -> subprocess.CompletedProcess[str]:
    """Run the fuzzer; ``broken`` is source that changes a target first."""
    source = f"import sys; sys.argv[0] = 'run.py'\nfrom tests.fuzz import run\n{broken}\n"
    command = [sys.executable, "-c", source + "raise SystemExit(run.main())", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_run_reports_seed_inputs_and_outcomes() -> None:
    done = run("--target", "manifest", "--seconds", "0.1", "--seed", "5")
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["target"], shown["seed"], shown["failure"]) == (0, "manifest", 5, None)
    assert shown["inputs"] >= 500


FRAGILE = """
from pathlib import Path
def fragile(data):
    assert b"/" not in data, "a slash"
    return "fine"
run.TARGETS["manifest"], run.seeds_of, run.CORPUS = fragile, lambda target: [b"plain"], Path({place!r})
"""


def test_an_input_that_breaks_a_target_is_shrunk_kept_and_named(tmp_path: Path) -> None:
    (tmp_path / "manifest").mkdir()
    done = run("--target", "manifest", "--seconds", "60", "--seed", "5", broken=FRAGILE.format(place=str(tmp_path)))
    (kept,) = (tmp_path / "manifest").glob("found-*")
    assert (done.returncode, str(kept) in done.stderr) == (1, True)
    assert kept.read_bytes().count(b"/") == 1


def test_an_input_that_costs_too_much_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "manifest").mkdir()
    broken = f"run.SLOW_SECONDS = 0.0; run.CORPUS = __import__('pathlib').Path({str(tmp_path)!r})"
    done = run("--target", "manifest", "--seconds", "5", "--seed", "5", broken=broken)
    assert (done.returncode, "bytes took" in done.stdout) == (1, True)
