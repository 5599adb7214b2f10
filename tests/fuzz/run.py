"""Fuzz the readers of untrusted bytes: ``.venv/bin/python -m tests.fuzz.run --seconds 30`` prints what it saw.

An input that breaks a target is shrunk, kept in ``corpus/TARGET/found-*`` and named; the exit code is then 1.
``--keep`` also keeps the first input of each new way to be refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

import hypothesis

from tests.fuzz.cli_targets import CLI_TARGETS
from tests.fuzz.fuzz_inputs import CORPUS, changed, seeds_of
from tests.fuzz.fuzz_targets import TARGETS

ROUND = 500
ROUND_OF_A_VERB = 50  # which takes a hundred times as long as a parser
SLOW_SECONDS = 5.0
MAX_KEPT_BYTES = 12 << 10


class Run:
    """One target, round after round, each from all inputs that showed something new so far."""

    def __init__(self, target: str, seed: int, keep: bool) -> None:
        self.target, self.seed, self.keep = target, seed, keep
        self.seeds = seeds_of(target)
        self.words = {TARGETS[target](data) for data in self.seeds}
        self.inputs = 0
        self.failing = b""
        self.fresh: list[bytes] = []

    def once(self, data: bytes) -> None:
        began = time.process_time()
        self.inputs += 1
        try:
            word = TARGETS[self.target](data)
            seconds = time.process_time() - began
            assert seconds < SLOW_SECONDS, f"{len(data)} bytes took {seconds:.1f} s"
        except Exception:
            self.failing = data
            raise
        if word not in self.words:
            self.words.add(word)
            self.fresh.append(data)

    def round(self, number: int) -> None:
        settings = hypothesis.settings(
            max_examples=ROUND_OF_A_VERB if self.target in CLI_TARGETS else ROUND,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        )
        test = hypothesis.given(changed(self.target, self.seeds))(self.once)
        hypothesis.seed(self.seed + number)(settings(test))()
        for data in self.fresh:
            self.seeds.append(data)
            if self.keep and len(data) <= MAX_KEPT_BYTES:
                save(self.target, "kept", data)
        self.fresh.clear()


def save(target: str, word: str, data: bytes) -> Path:
    """Put an input into the corpus."""
    file = CORPUS / target / f"{word}-{hashlib.sha256(data).hexdigest()[:12]}"
    file.write_bytes(data)
    return file


def fuzz_one(target: str, seconds: float, seed: int, keep: bool) -> int:
    began, number = time.monotonic(), 0
    run = Run(target, seed, keep)
    broken = None
    while broken is None and time.monotonic() - began < seconds:
        try:
            run.round(number)
        except Exception as error:
            broken = error
        number += 1
    found = {"target": target, "seed": seed, "seconds": round(time.monotonic() - began, 1), "inputs": run.inputs}
    print(json.dumps({**found, "outcomes": len(run.words), "failure": broken and repr(broken)}), flush=True)
    if broken is not None:
        print(f"{target}: {save(target, 'found', run.failing)} breaks it: {broken!r}", file=sys.stderr)
    return 1 if broken is not None else 0


def fuzz_all(targets: list[str], seconds: float, seed: int, jobs: int, keep: bool) -> tuple[int, list[str]]:
    """Each target in a process of its own, ``jobs`` at a time."""
    waiting, running, lines, worst = list(targets), [], [], 0
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            options = ["--target", name, "--seconds", str(seconds), "--seed", str(seed), *(["--keep"] if keep else [])]
            command = [sys.executable, "-m", "tests.fuzz.run", *options]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        child = running.pop(0)
        shown = child.communicate()[0]
        print(shown, end="", flush=True)
        lines += shown.splitlines()
        worst = worst or child.returncode
    return worst, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=float, default=30.0, help="for each target")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="keep the first input of each new outcome")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    if given.target and len(given.target) == 1 and given.json is None:
        return fuzz_one(given.target[0], given.seconds, given.seed, given.keep)
    worst, lines = fuzz_all(given.target or list(TARGETS), given.seconds, given.seed, given.jobs, given.keep)
    if given.json is not None:
        given.json.write_text(json.dumps([json.loads(line) for line in lines], indent=2) + "\n")
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
