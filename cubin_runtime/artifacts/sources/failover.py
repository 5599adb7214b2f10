"""Read one object from the sources in order: retries of temporary failures, failover, dead sources."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

from ...config import Network
from ...errors import CorruptError, SourceError
from ...values import dataclass
from ..bounded_read import digest_of
from ..store.locks import GIVE_UP_SECONDS, LONGEST_WAIT_SECONDS, TOUCH_SECONDS
from .source import FileRequest, NotHereError, RetryableError, Source, TooMuchError

LARGE_BYTES = 8 << 20
HELD_BYTES = 96 << 20  # of all bodies together that the workers of one fetch have in memory
_log = logging.getLogger("cubin_runtime")


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Retries and delays, in seconds.

    ``attempts`` is for failures that may pass, with waits that double from ``first_delay`` to
    ``longest_delay`` and a random part; a server's ``Retry-After`` is kept up to ``longest_retry_after``,
    beyond it the source counts as failed. ``bad_digests`` wrong bodies end a source for a file;
    ``dead_after`` files in a row for which it answered and did not deliver, other than by not having them, end a
    source on the network for the whole fetch. A lock's
    holder shows progress every ``lock_touch``, and may show none for ``lock_give_up``; while nothing comes of it,
    it is waited for no longer than ``lock_longest_wait``.
    """

    attempts: int = 4
    first_delay: float = 0.5
    longest_delay: float = 15.0
    longest_retry_after: float = 60.0
    bad_digests: int = 2
    dead_after: int = 3
    lock_give_up: float = GIVE_UP_SECONDS
    lock_touch: float = TOUCH_SECONDS
    lock_longest_wait: float = LONGEST_WAIT_SECONDS

    @classmethod
    def of(cls, network: Network) -> FetchPolicy:
        """The configured values, or the defaults."""
        return cls() if network.retries is None else cls(attempts=network.retries + 1)

    def delay(self, attempt: int, retry_after: float | None) -> float | None:
        """The seconds to wait after failed attempt number ``attempt`` (from 0); None: do not try again."""
        if attempt + 1 >= self.attempts:
            return None
        if retry_after is not None:
            late = random.uniform(0.0, self.first_delay)  # clients with the same delay must not all retry at once
            return retry_after + late if retry_after <= self.longest_retry_after else None
        return min(self.first_delay * 2.0 ** min(attempt, 64), self.longest_delay) * random.uniform(0.75, 1.25)


class Progress:
    """Shared by the workers of one fetch: a stop signal, signs of life, and which sources are dead."""

    def __init__(self, policy: FetchPolicy, workers: int = 1) -> None:
        self._workers = workers
        self.stop = threading.Event()
        self.ticks = 0
        self._policy = policy
        self._failed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._large = threading.Lock()
        self._mine = threading.local()

    def tick(self) -> None:
        """Count progress; a lost count does no harm."""
        self.ticks += 1

    @property
    def small(self) -> int:
        """The most bytes that a worker asks for without waiting for its turn."""
        return min(LARGE_BYTES, HELD_BYTES // self._workers)

    @property
    def has_large(self) -> bool:
        """Return whether it is this worker's turn to have a large body in memory."""
        return getattr(self._mine, "large", False)

    def wait_for_large(self) -> None:
        """Wait until no other worker has a large body in memory; it is this one's turn until ``large_is_done``.

        Raises:
            SourceError: the fetch stops.
        """
        while not self._large.acquire(timeout=0.1):
            if self.stop.is_set():
                raise SourceError("stopped while another large file was fetched")
        self._mine.large = True

    def large_is_done(self) -> None:
        """The body that a worker had in memory, if it was large, is there no longer."""
        if self.has_large:
            self._mine.large = False
            self._large.release()

    def note(self, label: str, *, failed: bool) -> None:
        """Count a source's files in a row that failed."""
        with self._lock:
            self._failed[label] = self._failed[label] + 1 if failed else 0

    def is_dead(self, label: str) -> bool:
        """Return whether a source failed so often in a row that asking it again would only cost time."""
        return self._failed[label] >= self._policy.dead_after


def read_with_failover(
    request: FileRequest, sources: Sequence[Source], policy: FetchPolicy, progress: Progress
) -> tuple[bytes, str]:
    """The verified bytes and the label of the first source that had them.

    Of the workers that share ``progress`` one at a time has a body of over ``progress.small`` in memory, until it calls
    ``progress.large_is_done``.

    Raises:
        CorruptError: no source delivered, and at least one sent bytes with another digest.
        SourceError: no source delivered; the message gives each source's reason, in a line of its own.
    """
    reasons: list[str] = []
    corrupt = False
    for source in sources:
        if progress.is_dead(source.label):
            reasons.append(f"{source.label}: skipped after {policy.dead_after} failures in a row")
            continue
        failed = False
        try:
            return _from_one(source, request, policy, progress), source.label
        except NotHereError as error:
            reasons.append(str(error))
        except (CorruptError, SourceError) as error:
            failed = not source.local  # to ask a local one for every file costs nothing
            corrupt = corrupt or isinstance(error, CorruptError)
            reasons.append(str(error))
        finally:
            source.forget()  # the part of a body that broke off: nobody will ask this source for the rest
            progress.note(source.label, failed=failed)
    kind = CorruptError if corrupt else SourceError
    causes = [_without_path(reason, request) for reason in reasons] or ["no source is configured"]
    raise kind("\n  ".join([f"no source delivered {request.path}:", *causes]))


def _without_path(reason: str, request: FileRequest) -> str:
    """A source's reason with its own address alone: the message has the path already."""
    for path in (quote(request.path.text), request.path.text):
        reason = reason.replace(f"/{path}: ", ": ")
    return reason


def _read_one_large_at_a_time(source: Source, request: FileRequest, progress: Progress) -> bytes:
    """Sizes are unknown beforehand: a file that turns out to be large is asked for again when it is its turn."""
    if request.limit > progress.small and not progress.has_large:
        try:
            return source.read(replace(request, limit=progress.small))
        except TooMuchError:
            progress.wait_for_large()
    return source.read(request)


def _from_one(source: Source, request: FileRequest, policy: FetchPolicy, progress: Progress) -> bytes:
    """The bytes of one source; bytes with another digest are asked for again as often as the policy says.

    Raises:
        CorruptError: it sent bytes with another digest, and the right ones neither before nor after.
    """
    wrong: list[str] = []
    for attempt in range(policy.attempts):
        try:
            data = _read_one_large_at_a_time(source, request, progress)
        except RetryableError as error:
            delay = policy.delay(attempt, error.retry_after)
            if delay is None or progress.is_dead(source.label):
                if wrong:
                    break
                raise
            _log.debug("%s; trying again in %.1f s", error, delay)
            if progress.stop.wait(delay):
                raise SourceError(f"{source.label}: stopped") from None
            continue
        progress.tick()
        if request.sha256 is None or (actual := digest_of(data)) == request.sha256:
            return data
        del data
        wrong.append(actual)
        if len(wrong) >= policy.bad_digests:
            break
    if not wrong:
        raise RetryableError(f"{source.label}: {request.path} was not asked for, with {policy.attempts} attempts")
    times = "once" if len(wrong) == 1 else f"{len(wrong)} times"
    raise CorruptError(f"{source.label}: sha256 of {request.path} is {wrong[-1]}, expected {request.sha256} ({times})")
