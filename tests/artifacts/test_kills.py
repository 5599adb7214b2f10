"""kill -9 at random moments under four concurrent fetchers of one store.

``CUBIN_RUNTIME_KILLS`` says how many processes are killed (20), ``CUBIN_RUNTIME_SEED`` repeats a run,
``CUBIN_RUNTIME_KILLS_REPORT`` names a file for what was found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.artifacts.fleet import children_of, is_running, start_fetcher, temporaries, wait_until, wrong_objects
from tests.artifacts.releases import Release, make_release, visible_files
from tests.artifacts.serving import Action, FaultyServer, Handler, ok, serving

KILLS = int(os.environ.get("CUBIN_RUNTIME_KILLS", "20"))
SEED = int(os.environ.get("CUBIN_RUNTIME_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
FETCHERS = 4
KILLED_A_ROUND = 2
LONGEST_ROUND = 240.0
FILES = {f"k{n:03}.bin": random.Random(n).randbytes(random.Random(n).randrange(100, 60_000)) for n in range(150)}


@pytest.fixture
def many(tmp_path: Path) -> Release:
    return make_release(tmp_path / "many", FILES)


@pytest.fixture
def server(many: Release, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(many.root) as running:
        running.fault(".bin", in_two_halves)
        yield running


def in_two_halves(handler: Handler, body: bytes) -> None:
    """The whole body with a pause inside, so that a moment in the middle of a transfer is easily met."""
    handler.answer(200, body[: len(body) // 2], Content_Length=str(len(body)))
    time.sleep(0.01)
    handler.wfile.write(body[len(body) // 2 :])


@contextmanager
def watched(store: Path) -> Iterator[list[str]]:
    """Hashes all visible objects again and again; the names of wrong ones."""
    wrong: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            with suppress(FileNotFoundError):
                wrong.extend(wrong_objects(store))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield wrong
    finally:
        done.set()
        thread.join()


def kill_one(fetchers: list[subprocess.Popen[str]], chance: random.Random) -> bool:
    """Kill a fetcher or one of its workers; whether one was still running."""
    running = [fetcher for fetcher in fetchers if fetcher.poll() is None]
    if not running:
        return False
    victim = chance.choice(running).pid
    family = [victim, *children_of(victim)]
    with suppress(ProcessLookupError):
        os.kill(chance.choice(family), signal.SIGKILL)
    return True


def one_round(many: Release, server: FaultyServer, store: Path, chance: random.Random, seconds: float) -> int:
    """Start fetchers, kill some, wait for the rest; how many were killed."""
    workers = chance.random() < 0.5
    fetchers = [start_fetcher(many, store, server.url, workers=workers) for _ in range(FETCHERS)]
    families = {fetcher.pid for fetcher in fetchers}
    killed = 0
    with watched(store) as wrong:
        for _ in range(KILLED_A_ROUND):
            time.sleep(chance.uniform(0, seconds / KILLED_A_ROUND))
            families.update(child for fetcher in fetchers for child in children_of(fetcher.pid))
            killed += kill_one(fetchers, chance)
        outputs = [fetcher.communicate(timeout=LONGEST_ROUND) for fetcher in fetchers]
    codes = [fetcher.returncode for fetcher in fetchers]
    # killed itself, lost a worker and said so, or completed
    for code, (printed, errors) in zip(codes, outputs, strict=True):
        assert code in (0, -signal.SIGKILL) or (code == 7 and printed.startswith("WorkerError")), printed + errors
    assert sum(code != 0 for code in codes) <= killed, outputs
    assert (wrong, wrong_objects(store)) == ([], [])
    wait_until(lambda: not any(map(is_running, families)))
    return killed


@pytest.mark.timeout(600 + 60 * KILLS)
def test_kills_at_random_moments_never_leave_a_wrong_object_and_the_next_run_completes(
    many: Release, server: FaultyServer, tmp_path: Path
) -> None:
    print(f"\nseed {SEED}, {KILLS} kills (CUBIN_RUNTIME_SEED={SEED} repeats them)")
    chance = random.Random(SEED)
    began = time.monotonic()
    first = tmp_path / "undisturbed"
    fetchers = [start_fetcher(many, first, server.url, workers=True) for _ in range(FETCHERS)]
    assert [fetcher.wait(LONGEST_ROUND) for fetcher in fetchers] == [0] * FETCHERS
    for fetcher in fetchers:
        fetcher.communicate()
    seconds = time.monotonic() - began
    killed = rounds = 0
    while killed < KILLS:
        store = tmp_path / f"store{rounds}"
        killed += one_round(many, server, store, chance, seconds)
        report = many.library(store, server.url).fetch(many.pin, jobs=8)
        assert (report.chosen, report.missing) == (len(FILES), 0), f"seed {SEED}"
        objects = set(visible_files(store)) - set(temporaries(store))
        assert (len(objects), wrong_objects(store)) == (len(FILES) + 1, []), f"seed {SEED}"
        rounds += 1
        assert rounds < 4 * KILLS, "the kills come too late"
    spent = time.monotonic() - began
    print(f"{killed} processes killed in {rounds} rounds, {spent:.0f} s")
    if report_file := os.environ.get("CUBIN_RUNTIME_KILLS_REPORT"):
        found: dict[str, float | None] = {"seed": SEED, "kills": killed, "rounds": rounds, "fetchers": FETCHERS}
        found["seconds"] = round(spent, 1)
        found |= {"wrong_objects": 0, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
        Path(report_file).write_text(json.dumps(found, indent=2) + "\n")


def test_an_action_of_this_file_sends_the_whole_body(many: Release, server: FaultyServer, tmp_path: Path) -> None:
    actions: list[Action] = [in_two_halves, ok]
    for number, action in enumerate(actions):
        server.fault(".bin", action)
        many.library(tmp_path / str(number), server.url).fetch(many.pin, [many.path("k001.bin")])
        assert many.digest("k001.bin") in visible_files(tmp_path / str(number))
