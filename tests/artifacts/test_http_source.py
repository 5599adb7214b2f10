from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import urllib3

from cubin_runtime.artifacts.sources.http import HttpSource
from cubin_runtime.artifacts.sources.http_pace import HttpLimits
from cubin_runtime.artifacts.sources.http_session import _WatchedFile
from cubin_runtime.artifacts.sources.source import FileRequest, NotHereError, RetryableError, TooMuchError, parse_source
from cubin_runtime.errors import SourceError
from tests.artifacts.releases import PATIENT_LIMITS, Release
from tests.artifacts.serving import (
    Action,
    FaultyServer,
    Handler,
    announced_oversize,
    drip,
    drip_chunk_extension,
    drip_chunk_size,
    drip_headers,
    drip_trailer,
    endless,
    endless_trailers,
    gzip_encoded,
    hang,
    hang_in_the_body,
    in_chunks,
    ok,
    redirect,
    reset,
    rest_in_chunks,
    resumable,
    status,
    truncated,
)
from tests.artifacts.tls import write_netrc

NAME = "fmha/prefill.cubin"
SECRET = "token=hidden"


# One limit each: which of several ends a request would depend on the machine's load.
SHORT_SILENCE = replace(PATIENT_LIMITS, silence=0.4)
SHORT_HEADERS = replace(PATIENT_LIMITS, headers=0.7)
SHORT_WINDOW = replace(PATIENT_LIMITS, window=0.3, least_rate=2000.0)


def source_of(url: str, limits: HttpLimits = PATIENT_LIMITS) -> HttpSource:
    return HttpSource(parse_source(url), limits)


def wanted(release: Release) -> FileRequest:
    return FileRequest(release.path(NAME), release.pin.path, None, len(release.files[NAME]))


def test_the_bytes_of_a_file_are_delivered(release: Release, server: FaultyServer) -> None:
    assert source_of(server.url).read(wanted(release)) == release.files[NAME]


def test_a_source_that_is_closed_has_no_connection_open(release: Release, server: FaultyServer) -> None:
    source = source_of(server.url)
    source.read(wanted(release))
    assert source._session is not None
    (connection,) = (host.connection for host in source._session._hosts.values())
    assert connection is not None
    assert connection.sock is not None
    source.close()
    assert connection.sock is None


def test_only_payload_counts_towards_the_least_rate() -> None:
    counted: list[int] = []
    pace = SimpleNamespace(check=lambda: None, count=counted.append)
    file = _WatchedFile(io.BytesIO(b"headers and payload"), pace)  # type: ignore[arg-type]
    file.readinto(bytearray(8))
    assert counted == []
    file.is_payload = True
    file.readinto(bytearray(11))
    file.readinto(bytearray(11))
    assert counted == [11]


def test_a_base_url_may_have_a_path_and_a_query(release: Release, server: FaultyServer) -> None:
    server.root = release.root.parent
    assert source_of(f"{server.url}/tree/?{SECRET}").read(wanted(release)) == release.files[NAME]
    assert server.targets == [f"/tree/{release.path(NAME)}?{SECRET}"]


def test_names_with_odd_characters_are_quoted(release: Release, server: FaultyServer) -> None:
    odd = release.path("fmha/a b?c#d%20ü.cubin")
    (server.root / odd.text).write_bytes(b"odd")
    assert source_of(server.url).read(replace(wanted(release), path=odd)) == b"odd"


def test_a_chunked_answer_is_put_together(release: Release, server: FaultyServer) -> None:
    server.fault(NAME, in_chunks)
    source = source_of(server.url)
    assert [source.read(wanted(release)) for _ in range(2)] == [release.files[NAME]] * 2


def test_identity_is_asked_for(release: Release, server: FaultyServer) -> None:
    source_of(server.url).read(wanted(release))
    assert [seen["Accept-Encoding"] for seen in server.seen_headers[f"/{release.path(NAME)}"]] == ["identity"]


@pytest.mark.parametrize(
    ("action", "limits", "reason"),
    [
        (hang, SHORT_SILENCE, "no data for 0.4 s"),
        (hang_in_the_body, SHORT_SILENCE, "no data for 0.4 s"),
        (drip_headers, SHORT_HEADERS, "no complete headers after 0.7 s"),
        (drip, SHORT_WINDOW, "bytes a second, expected 2000 or more"),
        (drip_chunk_size, SHORT_WINDOW, "bytes a second, expected 2000 or more"),
        (drip_chunk_extension, SHORT_WINDOW, "bytes a second, expected 2000 or more"),
        (drip_trailer, SHORT_WINDOW, "bytes a second, expected 2000 or more"),
        (endless_trailers, SHORT_WINDOW, "bytes a second, expected 2000 or more"),
    ],
)
def test_a_server_is_waited_for_no_longer_than_the_limit(
    release: Release, server: FaultyServer, action: Action, limits: HttpLimits, reason: str
) -> None:
    server.fault(NAME, action)
    with pytest.raises(RetryableError, match=reason) as caught:
        source_of(f"{server.url}?{SECRET}", limits).read(wanted(release))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("action", "kind", "reason"),
    [
        (status(404), NotHereError, "status 404"),
        (status(410), NotHereError, "status 410"),
        (status(401), SourceError, "status 401 .credentials come from netrc"),
        (status(403), SourceError, "status 403 .credentials come from netrc"),
        (status(206), SourceError, "status 206"),
        (status(304), SourceError, "status 304"),
        (status(500), RetryableError, "status 500"),
        (status(503), RetryableError, "status 503"),
        (status(429), RetryableError, "status 429"),
        (truncated, RetryableError, "truncated"),
        (reset, RetryableError, "reset"),
        (announced_oversize, TooMuchError, "announces 1099511627776 bytes"),
        (endless, TooMuchError, "sends more than 3900 bytes"),
        (gzip_encoded, SourceError, "Content-Encoding 'gzip'"),
        (redirect("ftp://host/file"), SourceError, "redirects to scheme 'ftp'"),
        (redirect("file:///etc/passwd"), SourceError, "redirects to scheme 'file'"),
        (redirect("http://user:pass@127.0.0.1/"), SourceError, "redirects to a URL with credentials"),
        (redirect("?again"), SourceError, "more than 5 redirects"),
        (status(302), SourceError, "without a Location"),
        (redirect("http://["), SourceError, "redirects to an invalid URL"),
        (redirect("http://[::1/x"), SourceError, "redirects to an invalid URL"),
        (redirect("http://[zz]/x"), SourceError, "redirects to an invalid URL"),
        (redirect("http://host:99999/x"), SourceError, "redirects to an invalid URL"),
        (redirect(f"http://{'x' * 70}.example/x"), SourceError, "invalid URL"),
        (status(200, Content_Length="9" * 5000), SourceError, "no valid Content-Length"),
        (status(200, Content_Length="-5"), SourceError, "no valid Content-Length"),
        (status(503, Retry_After="9" * 5000), RetryableError, "status 503"),
    ],
)
def test_each_fault_has_its_own_error(
    release: Release, server: FaultyServer, action: Action, kind: type[Exception], reason: str
) -> None:
    server.fault(NAME, action)
    with pytest.raises(kind, match=reason) as caught:
        source_of(f"{server.url}?{SECRET}").read(wanted(release))
    assert type(caught.value) is kind
    assert SECRET not in str(caught.value)


def test_a_server_that_is_not_there_is_an_error_that_may_pass(release: Release, server: FaultyServer) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(RetryableError, match="Connection refused"):
        source_of(f"{url}?{SECRET}").read(wanted(release))


def test_a_name_that_does_not_resolve_is_an_error_without_the_query(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RetryableError) as caught:
        source_of(f"http://no-such-host.invalid/root?{SECRET}").read(wanted(release))
    assert SECRET not in str(caught.value)
    assert "no-such-host.invalid/root" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        pytest.param(formatdate(time.time() - 100, usegmt=True), 0.0, id="a date that is over"),
        ("soon", None),
        ("-5", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(
    release: Release, server: FaultyServer, value: str, seconds: float | None
) -> None:
    server.fault(NAME, status(503, Retry_After=value))
    with pytest.raises(RetryableError) as caught:
        source_of(server.url).read(wanted(release))
    assert caught.value.retry_after == seconds


def test_redirects_are_followed_up_to_five(release: Release, server: FaultyServer) -> None:
    server.fault(NAME, *[redirect("?hop")] * 5, lambda handler, body: handler.answer(200, body))
    assert source_of(server.url).read(wanted(release)) == release.files[NAME]


def test_the_error_of_a_redirected_request_hides_the_query_of_the_target(
    release: Release, server: FaultyServer
) -> None:
    server.fault(NAME, redirect(f"/elsewhere?{SECRET}"))
    with pytest.raises(NotHereError, match="/elsewhere: status 404") as caught:
        source_of(server.url).read(wanted(release))
    assert SECRET not in str(caught.value)


def test_a_stopped_transfer_ends_between_two_reads(release: Release, server: FaultyServer) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(SourceError, match="stopped"):
        HttpSource(parse_source(server.url), PATIENT_LIMITS, stop=stop).read(wanted(release))


def test_cookies_of_a_server_are_not_sent_back(release: Release, server: FaultyServer) -> None:
    server.fault(NAME, lambda handler, body: handler.answer(200, body, Set_Cookie="id=1"))
    source = source_of(server.url)
    source.read(wanted(release))
    source.read(wanted(release))
    assert "Cookie" not in server.seen_headers[f"/{release.path(NAME)}"][1]


def test_credentials_are_never_sent_over_plain_http(
    release: Release, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_netrc(tmp_path, monkeypatch, "127.0.0.1")
    source_of(server.url).read(wanted(release))
    assert "Authorization" not in server.seen_headers[f"/{release.path(NAME)}"][0]


def test_credentials_of_the_host_are_sent_over_https(
    release: Release, tls_server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_netrc(tmp_path, monkeypatch, "127.0.0.1")
    source_of(tls_server.url.replace("http:", "https:")).read(wanted(release))
    sent = tls_server.seen_headers[f"/{release.path(NAME)}"][0]["Authorization"]
    assert sent == requests.auth._basic_auth_str("me", "for-127.0.0.1")


def test_credentials_never_follow_to_another_host(
    release: Release, tls_server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_netrc(tmp_path, monkeypatch, "127.0.0.1")
    tls_server.fault(NAME, redirect(f"https://localhost:{tls_server.server_port}/{release.path('kernels.bin')}"))
    source_of(tls_server.url.replace("http:", "https:")).read(wanted(release))
    assert "Authorization" in tls_server.seen_headers[f"/{release.path(NAME)}"][0]
    assert "Authorization" not in tls_server.seen_headers[f"/{release.path('kernels.bin')}"][0]


@pytest.mark.parametrize("entry", ["machine localhost login me password x", "default login me password x"])
def test_after_a_redirect_to_another_host_netrc_is_not_asked(
    release: Release, tls_server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    write_netrc(tmp_path, monkeypatch, "127.0.0.1")
    (tmp_path / "netrc").write_text(f"{(tmp_path / 'netrc').read_text()}{entry}\n")
    tls_server.fault(NAME, redirect(f"https://localhost:{tls_server.server_port}/{release.path('kernels.bin')}"))
    source_of(tls_server.url.replace("http:", "https:")).read(wanted(release))
    assert "Authorization" in tls_server.seen_headers[f"/{release.path(NAME)}"][0]
    assert "Authorization" not in tls_server.seen_headers[f"/{release.path('kernels.bin')}"][0]


def test_https_never_goes_on_as_http(release: Release, tls_server: FaultyServer) -> None:
    tls_server.fault(NAME, redirect(f"{tls_server.url}/{release.path(NAME)}"))
    with pytest.raises(SourceError, match="from https to http"):
        source_of(tls_server.url.replace("http:", "https:")).read(wanted(release))


def test_a_certificate_that_nobody_trusts_is_a_final_error(
    release: Release, tls_server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with pytest.raises(SourceError, match="TLS failed") as caught:
        source_of(tls_server.url.replace("http:", "https:")).read(wanted(release))
    assert type(caught.value) is SourceError


def test_bytes_that_come_are_signs_of_life(release: Release, server: FaultyServer) -> None:
    ticks: list[int] = []
    tick: Callable[[], None] = lambda: ticks.append(1)  # noqa: E731
    HttpSource(parse_source(server.url), PATIENT_LIMITS, tick=tick).read(wanted(release))
    assert ticks


def test_one_source_keeps_its_connection(
    release: Release, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    connect = urllib3.util.connection.create_connection

    def counted(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return connect(*arguments, **options)

    monkeypatch.setattr("urllib3.util.connection.create_connection", counted)
    source = source_of(server.url)
    for _ in range(5):
        source.read(wanted(release))
    assert len(opened) == 1


def test_a_connection_with_bytes_left_on_it_is_not_used_again(release: Release, server: FaultyServer) -> None:
    server.fault(NAME, status(500), ok)
    source = source_of(server.url)
    with pytest.raises(RetryableError):
        source.read(wanted(release))
    assert source.read(wanted(release)) == release.files[NAME]


def test_a_plain_proxy_of_the_environment_gets_the_whole_url(
    release: Release, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    source = source_of("http://release.invalid/?key=1")
    assert source.read(wanted(release)) == release.files[NAME]
    assert server.targets == [f"http://release.invalid/{release.path(NAME)}?key=1"]


def test_a_proxy_that_is_not_there_is_an_error_that_may_pass(
    release: Release, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    server.shutdown()
    server.server_close()
    with pytest.raises(RetryableError, match="Connection refused"):
        source_of("http://release.invalid/").read(wanted(release))


def refuse_to_tunnel(handler: Any) -> None:
    handler.answer(407, b"say please")


def test_a_proxy_that_refuses_is_named_with_its_status(
    release: Release, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "do_CONNECT", refuse_to_tunnel, raising=False)
    monkeypatch.setenv("https_proxy", server.url.replace("http://", f"http://user:{SECRET}@"))
    with pytest.raises(RetryableError) as caught:
        source_of("https://release.invalid/").read(wanted(release))
    assert f"through the proxy {server.url}: refused with status 407" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_proxy_that_drips_its_headers_is_waited_for_no_longer_than_a_server(
    release: Release, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "do_CONNECT", lambda handler: drip_headers(handler, b""), raising=False)
    monkeypatch.setenv("https_proxy", server.url)
    with pytest.raises(RetryableError, match=f"through the proxy {server.url}: no connection within 2 s"):
        source_of("https://release.invalid/", replace(PATIENT_LIMITS, connect=2.0, headers=0.7)).read(wanted(release))


@pytest.mark.parametrize(
    ("proxy", "reason"),
    [
        ("http://", "the URL of the proxy is not valid"),
        ("socks5://127.0.0.1:9", "the proxy cannot be used: Missing dependencies for SOCKS support"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_told(
    release: Release, monkeypatch: pytest.MonkeyPatch, proxy: str, reason: str
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(SourceError, match=reason):
        source_of("http://release.invalid/").read(wanted(release))


def test_a_bundle_of_certificates_that_is_not_there_is_named(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere/bundle.pem")
    with pytest.raises(SourceError, match=r"https://release.invalid/.*: .*/nowhere/bundle.pem"):
        source_of("https://release.invalid/").read(wanted(release))


# -- going on where a transfer broke off


MEBIBYTE = 1 << 20


@pytest.fixture
def large(release: Release) -> bytes:
    """The file is large now, its first part unlike its second."""
    data = b"".join(bytes([n]) * MEBIBYTE for n in range(4))
    release.file(NAME).write_bytes(data)
    return data


def read_twice(release: Release, server: FaultyServer, size: int) -> bytes:
    """What the second attempt gives after one that broke off."""
    source, asked = source_of(server.url), replace(wanted(release), limit=size)
    with pytest.raises(RetryableError):
        source.read(asked)
    return source.read(asked)


def ranges_asked(release: Release, server: FaultyServer) -> list[str | None]:
    return [seen.get("Range") for seen in server.seen_headers[f"/{release.path(NAME)}"]]


def test_a_large_body_that_broke_off_is_continued(release: Release, server: FaultyServer, large: bytes) -> None:
    server.fault(NAME, resumable(breaks_after=3 * MEBIBYTE), resumable())
    assert read_twice(release, server, len(large)) == large
    assert ranges_asked(release, server) == [None, f"bytes={3 * MEBIBYTE}-"]


def test_the_rest_of_a_body_may_come_in_chunks_and_counts_towards_the_least_rate(
    release: Release, server: FaultyServer, large: bytes
) -> None:
    server.fault(NAME, resumable(breaks_after=3 * MEBIBYTE), rest_in_chunks(0.05))
    ticks: list[None] = []
    limits = replace(PATIENT_LIMITS, window=0.2)
    source = HttpSource(parse_source(server.url), limits, tick=lambda: ticks.append(None))
    asked = replace(wanted(release), limit=len(large))
    with pytest.raises(RetryableError):
        source.read(asked)
    before = len(ticks)
    assert source.read(asked) == large
    assert len(ticks) > before + 10


def test_a_body_may_break_off_several_times(release: Release, server: FaultyServer, large: bytes) -> None:
    server.fault(NAME, resumable(breaks_after=MEBIBYTE), resumable(breaks_after=3 * MEBIBYTE), resumable())
    source, asked = source_of(server.url), replace(wanted(release), limit=len(large))
    for _ in range(2):
        with pytest.raises(RetryableError):
            source.read(asked)
    assert source.read(asked) == large
    assert ranges_asked(release, server)[1:] == [f"bytes={MEBIBYTE}-", f"bytes={3 * MEBIBYTE}-"]


@pytest.mark.parametrize("tag", ["", 'W/"1"'])
def test_without_a_validator_the_whole_body_is_asked_for(
    release: Release, server: FaultyServer, large: bytes, tag: str
) -> None:
    server.fault(NAME, resumable(breaks_after=3 * MEBIBYTE, tag=tag), resumable())
    assert read_twice(release, server, len(large)) == large
    assert ranges_asked(release, server) == [None, None]


def test_a_body_that_changed_meanwhile_is_taken_whole(release: Release, server: FaultyServer, large: bytes) -> None:
    server.fault(NAME, resumable(breaks_after=3 * MEBIBYTE), resumable(tag='"2"'))
    assert read_twice(release, server, len(large)) == large


def test_a_small_body_is_asked_for_as_a_whole(release: Release, server: FaultyServer, large: bytes) -> None:
    server.fault(NAME, resumable(breaks_after=MEBIBYTE - 1), resumable())
    assert read_twice(release, server, len(large)) == large
    assert ranges_asked(release, server) == [None, None]


def test_another_file_is_not_continued(release: Release, server: FaultyServer, large: bytes) -> None:
    server.fault(NAME, resumable(breaks_after=3 * MEBIBYTE))
    source = source_of(server.url)
    with pytest.raises(RetryableError):
        source.read(replace(wanted(release), limit=len(large)))
    other = replace(wanted(release), path=release.path("kernels.bin"))
    assert source.read(other) == release.files["kernels.bin"]


@pytest.mark.parametrize(
    "sends",
    [
        lambda first, size: f"bytes {first - 1}-{size - 1}/{size}",
        lambda first, size: f"bytes {first}-{size - 2}/{size}",
        lambda first, size: f"bytes {first}-{size - 1}/*",
        lambda first, size: "pages 1-2/3",
        lambda first, size: f"bytes {first}-{'9' * 5000}/{size}",
        lambda first, size: "",
    ],
)
def test_a_range_that_was_not_asked_for_is_refused(
    release: Release, server: FaultyServer, large: bytes, sends: Callable[[int, int], str]
) -> None:
    server.fault(NAME, resumable(breaks_after=3 * MEBIBYTE), resumable(sends=sends))
    with pytest.raises(SourceError, match="sent another range than requested"):
        read_twice(release, server, len(large))


def test_a_continued_body_keeps_to_the_limit(release: Release, server: FaultyServer, large: bytes) -> None:
    longer = resumable(sends=lambda first, size: f"bytes {first}-{2 * size - 1}/{2 * size}")
    server.fault(NAME, resumable(breaks_after=3 * MEBIBYTE), longer)
    with pytest.raises(TooMuchError, match=f"announces {2 * len(large)} bytes"):
        read_twice(release, server, len(large))


def test_a_range_that_cannot_be_had_begins_anew(release: Release, server: FaultyServer, large: bytes) -> None:
    server.fault(NAME, resumable(breaks_after=3 * MEBIBYTE), status(416), resumable())
    source, asked = source_of(server.url), replace(wanted(release), limit=len(large))
    for _ in range(2):
        with pytest.raises(RetryableError):
            source.read(asked)
    assert source.read(asked) == large
    assert ranges_asked(release, server)[2] is None
