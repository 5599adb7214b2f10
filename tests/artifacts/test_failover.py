"""One object from the sources in order: large bodies one at a time, and continued where they broke off."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.artifacts.fetch.worker_pool import ThreadWorkerPool
from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.sources import failover
from cubin_runtime.artifacts.sources.source import FileRequest, RetryableError, Source, TooMuchError
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.errors import CorruptError, SourceError
from tests.artifacts.releases import QUICK_POLICY, Release, make_release, sha256
from tests.artifacts.serving import resumable, serving

MEBIBYTE = 1 << 20
SMALL, LARGE = 100, 1000


class Counting:
    """A source of made-up bodies, and a store for them, that count how many large bodies are between them."""

    local = True
    label = "counting"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.bodies = {sha256(bytes([n]) * size): bytes([n]) * size for n, size in enumerate(sizes)}
        self.alive = self.most = 0
        self.stored: set[str] = set()
        self.guard = threading.Lock()

    def wanted(self) -> list[FileRequest]:
        folder = ArtifactPath("made")
        return [FileRequest(folder.child(digest), folder, digest, LARGE) for digest in self.bodies]

    def read(self, wanted: FileRequest) -> bytes:
        body = self.bodies[wanted.path.name]
        if len(body) > wanted.limit:
            raise TooMuchError("too much")
        if len(body) > SMALL:
            with self.guard:
                self.alive += 1
                self.most = max(self.most, self.alive)
        time.sleep(0.005)
        return body

    def put(self, digest: str, data: bytes) -> None:
        time.sleep(0.005)
        if len(data) > SMALL:
            with self.guard:
                self.alive -= 1
        self.stored.add(digest)

    def forget(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held open."""


@pytest.fixture(autouse=True)
def _small_is_100_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "LARGE_BYTES", SMALL)


def fetch_all(counting: Counting, jobs: int) -> list[Exception | None]:
    sources: list[Source] = [counting]
    pool = ThreadWorkerPool(counting, lambda progress: sources, QUICK_POLICY, jobs)  # type: ignore[arg-type]
    pool.give(counting.wanted())
    outcomes = []
    while len(outcomes) < len(counting.bodies):
        outcomes += pool.take(5.0)
    pool.stop()
    return [outcome.error for outcome in outcomes]


def test_one_large_body_at_a_time_is_in_memory_until_it_is_stored() -> None:
    counting = Counting([LARGE] * 10 + [SMALL] * 10)
    assert fetch_all(counting, 8) == [None] * 20
    assert (counting.most, counting.stored) == (1, set(counting.bodies))


def test_a_large_body_that_failed_gives_up_its_turn() -> None:
    counting = Counting([LARGE, LARGE])
    counting.bodies = dict(zip(counting.bodies, [b"x" * LARGE, *list(counting.bodies.values())[1:]], strict=True))
    errors = fetch_all(counting, 2)
    assert sorted(error is None for error in errors) == [False, True]


def test_a_fetch_that_stops_waits_for_no_turn() -> None:
    progress = failover.Progress(QUICK_POLICY)
    progress.wait_for_large()
    progress.stop.set()
    refused: list[str] = []

    def other() -> None:
        try:
            progress.wait_for_large()
        except SourceError as error:
            refused.append(str(error))

    worker = threading.Thread(target=other)
    worker.start()
    worker.join(100)
    assert refused == ["stopped while another large file was fetched"]


@pytest.fixture
def large(tmp_path: Path) -> Release:
    return make_release(tmp_path / "large", {"large.bin": b"".join(bytes([n]) * MEBIBYTE for n in range(4))})


def test_a_fetch_continues_a_large_file_that_broke_off(
    large: Release, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(large.root) as server:
        server.fault("large.bin", resumable(), resumable(breaks_after=3 * MEBIBYTE), resumable())
        assert large.library(store, server.url).fetch(large.pin).fetched == 1
        asked = [seen.get("Range") for seen in server.seen_headers[f"/{large.path('large.bin')}"]]
    assert asked == [None, None, f"bytes={3 * MEBIBYTE}-"]
    assert Store(store).has(large.digest("large.bin"))


class Scripted:
    """A source on the network that answers with these bodies or errors in turn."""

    local = False
    label = "scripted"

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)

    def read(self, wanted: FileRequest) -> bytes:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def forget(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held open."""


@pytest.mark.parametrize(
    ("attempts", "answers"),
    [
        (1, [b"wrong"]),
        (2, [RetryableError("reset"), b"wrong"]),
        (2, [b"wrong", RetryableError("reset")]),
        (4, [b"wrong", RetryableError("reset"), b"wrong"]),
    ],
)
def test_wrong_bytes_are_corruption_however_few_the_attempts(attempts: int, answers: list[bytes | Exception]) -> None:
    policy = replace(QUICK_POLICY, attempts=attempts)
    wanted = FileRequest(ArtifactPath("made/x"), ArtifactPath("made"), sha256(b"right"), SMALL)
    with pytest.raises(CorruptError, match="sha256 of made/x"):
        failover.read_with_failover(wanted, [Scripted(*answers)], policy, failover.Progress(policy))


def test_delays_stay_bounded_however_many_retries_were_configured() -> None:
    assert replace(QUICK_POLICY, attempts=5000).delay(4000, None) <= 1.25 * QUICK_POLICY.longest_delay
