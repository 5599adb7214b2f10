from __future__ import annotations

import errno
import logging
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime.artifacts.fetch import process_pool
from cubin_runtime.artifacts.fetch.process_pool import ProcessWorkerPool, WorkerError, _Worker
from cubin_runtime.artifacts.fetch.worker_pool import Outcome
from cubin_runtime.artifacts.fetch.worker_process import _portable
from cubin_runtime.artifacts.sources.failover import FetchPolicy
from cubin_runtime.artifacts.sources.source import FileRequest, RetryableError, parse_source
from cubin_runtime.artifacts.sources.source_list import WorkOrder
from cubin_runtime.config import Config
from cubin_runtime.errors import CorruptError, StoreError
from tests.artifacts.fleet import (
    COMMAND_LINE,
    SMALL_CREWS,
    children_of,
    is_running,
    start_fetcher,
    start_python,
    temporaries,
    wait_until,
    wrong_objects,
)
from tests.artifacts.releases import PATIENT_LIMITS, QUICK_POLICY, Release, make_release, visible_files
from tests.artifacts.serving import FaultyServer, hang, ok, ok_for, serving, status, wrong_bytes

FILES = {f"k{n:03}.bin": random.Random(n).randbytes(3000 + 10 * n) for n in range(60)}

AGAIN = "interrupted; what came is in the store: run it again to continue"


@pytest.fixture
def many(tmp_path: Path) -> Release:
    return make_release(tmp_path / "many", FILES)


@pytest.fixture
def server(many: Release, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(many.root) as running:
        yield running


@pytest.fixture
def small_pools(monkeypatch: pytest.MonkeyPatch) -> list[ProcessWorkerPool]:
    """Lets a fetch of a few files use two worker processes; the pools that were made."""
    made: list[ProcessWorkerPool] = []

    class Noted(ProcessWorkerPool):
        def __init__(self, order: WorkOrder, jobs: int, processes: int) -> None:
            super().__init__(order, jobs, processes)
            made.append(self)

    monkeypatch.setattr(process_pool, "OBJECTS_A_PROCESS", 8)
    monkeypatch.setattr(process_pool, "available_cores", lambda: 2)
    monkeypatch.setattr(process_pool, "ProcessWorkerPool", Noted)
    return made


def order(many: Release, store: Path, url: str) -> WorkOrder:
    config = Config(store=store, sources=(url,))
    return WorkOrder(config, PATIENT_LIMITS, QUICK_POLICY, (parse_source(url),), 1, logging.INFO)


def wanted(many: Release, name: str) -> FileRequest:
    return FileRequest(many.path(name), many.pin.path, many.digest(name), many.pin.max_file_bytes)


def take_for_ever(pool: ProcessWorkerPool, silent: _Worker) -> None:
    """Take outcomes as if ``silent`` had said nothing for longer than is allowed, however little time has passed."""
    while True:
        silent.heard -= process_pool.SILENT_SECONDS
        pool.take(0.1)


def test_two_worker_processes_fetch_every_object_once(
    many: Release, server: FaultyServer, store: Path, small_pools: list[ProcessWorkerPool]
) -> None:
    report = many.library(store, server.url).fetch(many.pin, jobs=4)
    assert [len(pool.process_ids) for pool in small_pools] == [2]
    assert (report.fetched, report.bytes, set(server.counts.values())) == (60, many.pin.bytes, {1})
    assert len(visible_files(store)) == 61


def test_workers_are_gone_when_a_fetch_is_done(
    many: Release, server: FaultyServer, store: Path, small_pools: list[ProcessWorkerPool]
) -> None:
    many.library(store, server.url).fetch(many.pin, jobs=4)
    assert not any(map(is_running, small_pools[0].process_ids))


def test_local_sources_are_read_by_workers_too(
    many: Release, store: Path, small_pools: list[ProcessWorkerPool]
) -> None:
    report = many.library(store, many.root).fetch(many.pin, jobs=4)
    assert (len(small_pools), report.by_source) == (1, {str(many.root): 60})


def test_workers_start_though_a_place_of_modules_is_no_text(
    many: Release, store: Path, small_pools: list[ProcessWorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/place")])
    many.library(store, many.root).fetch(many.pin, jobs=4)
    assert all(worker.ready for worker in small_pools[0]._workers)


def test_a_few_objects_need_no_worker_process(
    many: Release, server: FaultyServer, store: Path, small_pools: list[ProcessWorkerPool]
) -> None:
    many.library(store, server.url).fetch(many.pin, [many.path("k000.bin")], jobs=4)
    assert small_pools == []


def test_one_job_needs_no_worker_process(
    many: Release, server: FaultyServer, store: Path, small_pools: list[ProcessWorkerPool]
) -> None:
    many.library(store, server.url).fetch(many.pin, jobs=1)
    assert small_pools == []


def test_at_most_one_worker_a_core(
    many: Release,
    server: FaultyServer,
    store: Path,
    small_pools: list[ProcessWorkerPool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_pool, "available_cores", lambda: 3)
    many.library(store, server.url).fetch(many.pin, jobs=16)
    assert [len(pool.process_ids) for pool in small_pools] == [3]


def test_an_error_comes_from_a_worker_with_its_kind_and_text(
    many: Release, server: FaultyServer, store: Path, small_pools: list[ProcessWorkerPool]
) -> None:
    server.fault("k007.bin", wrong_bytes)
    with pytest.raises(CorruptError, match=r"k007\.bin is [0-9a-f]{64}, expected .* \(2 times\)"):
        many.library(store, server.url).fetch(many.pin, jobs=4)
    assert (len(visible_files(store)), wrong_objects(store)) == (60, [])


def test_a_store_that_fails_in_a_worker_ends_the_fetch(
    many: Release, server: FaultyServer, store: Path, small_pools: list[ProcessWorkerPool]
) -> None:
    digest = many.digest("k007.bin")
    (store / "sha256" / digest[:2] / digest).mkdir(parents=True)
    with pytest.raises(StoreError, match=digest):
        many.library(store, server.url).fetch(many.pin, jobs=4)


def test_an_unexpected_error_carries_the_place_where_it_was_raised(many: Release) -> None:
    try:
        raise KeyError("surprise")
    except KeyError as error:
        sent = pickle.loads(pickle.dumps(_portable(Outcome(wanted(many, "k000.bin"), error=error))))
    assert isinstance(sent.error, KeyError)
    assert 'raise KeyError("surprise")' in vars(sent.error)["__notes__"][0]


def test_an_error_that_cannot_be_pickled_still_says_what_it_was(many: Release) -> None:
    class Local(Exception):
        pass

    sent = pickle.loads(pickle.dumps(_portable(Outcome(wanted(many, "k000.bin"), error=Local("deep")))))
    assert str(sent.error) == "Local: deep"


def test_a_wait_that_a_server_asked_for_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RetryableError("busy", 3.5)))
    assert (str(error), error.retry_after) == ("busy", 3.5)


def test_what_workers_log_is_logged_by_the_parent(
    many: Release,
    server: FaultyServer,
    store: Path,
    small_pools: list[ProcessWorkerPool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.fault("k007.bin", status(500), ok)
    with caplog.at_level(logging.DEBUG, "cubin_runtime"):
        many.library(store, server.url).fetch(many.pin, jobs=4)
    assert any("k007.bin: status 500; trying again" in line for line in caplog.messages)


@pytest.mark.parametrize("executable", ["/bin/false", None])
def test_where_no_worker_can_start_threads_do_the_work_and_a_warning_says_so(
    many: Release,
    server: FaultyServer,
    store: Path,
    small_pools: list[ProcessWorkerPool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    executable: str | None,
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert many.library(store, server.url).fetch(many.pin, jobs=4).fetched == 60
    assert "fetching in one process" in caplog.text


def test_where_no_process_can_be_made_threads_do_the_work(
    many: Release,
    server: FaultyServer,
    store: Path,
    small_pools: list[ProcessWorkerPool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    assert many.library(store, server.url).fetch(many.pin, jobs=4).fetched == 60


def test_a_killed_worker_is_an_error_and_the_next_fetch_completes(
    many: Release, server: FaultyServer, store: Path
) -> None:
    server.fault(".bin", ok_for(6))
    fetcher = start_fetcher(many, store, server.url, workers=True)
    wait_until(lambda: sum(server.counts.values()) > 6)
    os.kill(children_of(fetcher.pid)[0], signal.SIGKILL)
    printed, errors = fetcher.communicate(timeout=100)
    assert printed.startswith("WorkerError 7 worker process"), printed + errors
    assert "was killed by signal 9" in printed
    server.fault(".bin", ok)
    assert many.library(store, server.url).fetch(many.pin).missing == 0
    assert (len(set(visible_files(store)) - set(temporaries(store))), wrong_objects(store)) == (61, [])


def test_a_worker_that_says_nothing_any_more_is_an_error(
    many: Release, server: FaultyServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "STOP_SECONDS", 0.2)
    pool = ProcessWorkerPool(order(many, store, server.url), 2, 2)
    try:
        pool.wait_until_ready()
        os.kill(pool.process_ids[0], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=f"{pool.process_ids[0]} of the fetch stopped responding"):
            take_for_ever(pool, pool._workers[0])
    finally:
        pool.stop()
    assert not any(map(is_running, pool.process_ids))


def test_workers_end_when_their_parent_is_killed(many: Release, server: FaultyServer, store: Path) -> None:
    server.fault(".bin", ok_for(6))
    fetcher = start_fetcher(many, store, server.url, workers=True)
    wait_until(lambda: sum(server.counts.values()) > 6)
    workers = children_of(fetcher.pid)
    fetcher.kill()
    fetcher.communicate()
    assert len(workers) == 2
    wait_until(lambda: not any(map(is_running, workers)))
    assert (temporaries(store), wrong_objects(store)) == ([], [])


@pytest.mark.parametrize("jobs", [1, 4])
def test_an_interrupt_says_so_ends_with_130_and_the_next_run_continues(
    many: Release, server: FaultyServer, store: Path, jobs: int
) -> None:
    server.fault(".bin", ok_for(8))
    words = ["fetch", "made-1.0", "--store", store, "--pins", many.pin_file, "--source", server.url, "--jobs", jobs]
    run = start_python(SMALL_CREWS + COMMAND_LINE, *words)
    wait_until(lambda: sum(server.counts.values()) > 8)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=90)  # less than the server hangs
    assert (run.returncode, errors) == (130, f"error: {AGAIN}\n")
    assert (temporaries(store), wrong_objects(store)) == ([], [])
    there = len(visible_files(store))
    server.fault(".bin", ok)
    report = many.library(store, server.url).fetch(many.pin)
    assert (report.present, report.fetched) == (there - 1, 61 - there)


def test_an_interrupt_does_not_wait_for_a_silent_server(many: Release, server: FaultyServer, store: Path) -> None:
    server.fault(".bin", hang)
    pool = ProcessWorkerPool(
        WorkOrder(
            Config(store=store, sources=(server.url,)),
            PATIENT_LIMITS,
            FetchPolicy(),
            (parse_source(server.url),),
            1,
            logging.INFO,
        ),
        2,
        2,
    )
    pool.give([wanted(many, "k000.bin"), wanted(many, "k001.bin")])
    pool.wait_until_ready()
    while not server.count(".bin"):
        pool.take(0.1)
    began = time.monotonic()
    pool.stop()
    assert time.monotonic() - began < 60  # the server hangs for 100
    assert not any(map(is_running, pool.process_ids))
