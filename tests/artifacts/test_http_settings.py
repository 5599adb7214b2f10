"""What a configuration says of servers: time-outs, proxy, certificates and tokens."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from cubin_runtime.artifacts.sources.failover import FetchPolicy
from cubin_runtime.artifacts.sources.http import HttpSource
from cubin_runtime.artifacts.sources.http_pace import HttpLimits
from cubin_runtime.artifacts.sources.source import FileRequest, parse_source
from cubin_runtime.config import Network
from cubin_runtime.errors import SourceError
from tests.artifacts.releases import PATIENT_LIMITS, Release
from tests.artifacts.serving import FaultyServer, redirect, serving, slow
from tests.artifacts.tls import make_tls, write_netrc

NAME = "fmha/prefill.cubin"


def wanted(release: Release) -> FileRequest:
    return FileRequest(release.path(NAME), release.pin.path, release.digest(NAME), release.pin.max_file_bytes)


def over_tls(server: FaultyServer, network: Network) -> HttpSource:
    return HttpSource(parse_source(server.url.replace("http:", "https:")), PATIENT_LIMITS, network)


@pytest.mark.parametrize("in_file", [True, False])
def test_the_token_of_a_host_is_sent_over_https(
    release: Release, tls_server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_file: bool
) -> None:
    write_netrc(tmp_path, monkeypatch, "127.0.0.1")
    (tmp_path / "token").write_text("abc\n")
    token = f"@{tmp_path / 'token'}" if in_file else "abc"
    over_tls(tls_server, Network(tokens=(("127.0.0.1", token),))).read(wanted(release))
    assert tls_server.seen_headers[f"/{release.path(NAME)}"][0]["Authorization"] == "Bearer abc"


def test_a_token_follows_neither_to_another_host_nor_to_http(release: Release, tls_server: FaultyServer) -> None:
    network = Network(tokens=(("127.0.0.1", "abc"), ("localhost", "abc")))
    tls_server.fault(NAME, redirect(f"https://localhost:{tls_server.server_port}/{release.path('kernels.bin')}"))
    over_tls(tls_server, network).read(wanted(release))
    assert "Authorization" not in tls_server.seen_headers[f"/{release.path('kernels.bin')}"][0]


def test_a_token_is_not_sent_over_http(release: Release, server: FaultyServer) -> None:
    network = Network(tokens=(("127.0.0.1", "abc"),))
    HttpSource(parse_source(server.url), PATIENT_LIMITS, network).read(wanted(release))
    assert "Authorization" not in server.seen_headers[f"/{release.path(NAME)}"][0]


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read: No such file"), (b"\xff", "no ASCII"), (b"a\nb", "not printable")]
)
def test_a_token_that_is_none_is_told_without_it(
    release: Release, tls_server: FaultyServer, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    network = Network(tokens=(("127.0.0.1", f"@{tmp_path / 'token'}"),))
    with pytest.raises(SourceError, match=reason):
        over_tls(tls_server, network).read(wanted(release))


@pytest.mark.timeout(20)
def test_a_token_in_a_fifo_is_told_and_not_waited_for(
    release: Release, tls_server: FaultyServer, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "token")
    network = Network(tokens=(("127.0.0.1", f"@{tmp_path / 'token'}"),))
    with pytest.raises(SourceError, match="token cannot be read: no regular file"):
        over_tls(tls_server, network).read(wanted(release))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["ca_bundle", "client_cert"])
def test_certificates_in_a_fifo_are_told_and_not_waited_for(
    release: Release, tls_server: FaultyServer, tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / "pem")
    with pytest.raises(SourceError, match="pem is no regular file"):
        over_tls(tls_server, Network(**{name: tmp_path / "pem"})).read(wanted(release))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("named", [True, False])
def test_a_netrc_that_is_no_regular_file_counts_as_none(
    release: Release, tls_server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    os.mkfifo(tmp_path / ".netrc")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    if named:
        monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    over_tls(tls_server, Network()).read(wanted(release))
    assert "Authorization" not in tls_server.seen_headers[f"/{release.path(NAME)}"][0]


def test_a_configured_bundle_of_certificates_is_the_one_in_force(
    release: Release, tls_server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere/bundle.pem")
    network = Network(ca_bundle=tmp_path / "certificate.pem")
    assert over_tls(tls_server, network).read(wanted(release)) == release.files[NAME]


def test_a_server_that_wants_a_certificate_gets_it(
    release: Release, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_tls(tmp_path, monkeypatch)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tmp_path / "certificate.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with pytest.raises(SourceError):
        over_tls(server, Network()).read(wanted(release))
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "certificate.pem").read_bytes() + (tmp_path / "key.pem").read_bytes())
    assert over_tls(server, Network(client_cert=both)).read(wanted(release)) == release.files[NAME]


def test_a_configured_proxy_gets_the_whole_url(release: Release, server: FaultyServer) -> None:
    with serving(release.root) as proxy:
        network = Network(proxy=proxy.url)
        source = HttpSource(parse_source("http://release.invalid/"), PATIENT_LIMITS, network)
        assert source.read(wanted(release)) == release.files[NAME]
        assert proxy.targets == [f"http://release.invalid/{release.path(NAME)}"]


def test_a_configured_timeout_is_for_connection_headers_and_silence() -> None:
    limits = HttpLimits.of(Network(timeout=3.0))
    assert (limits.connect, limits.headers, limits.silence) == (3.0, 6.0, 3.0)
    assert HttpLimits.of(Network()) == HttpLimits()


@pytest.mark.parametrize("timeout", [4294967.3, 1e300])
def test_a_timeout_that_no_socket_takes_is_a_long_one(release: Release, server: FaultyServer, timeout: float) -> None:
    limits = HttpLimits.of(Network(timeout=timeout))
    server.fault(NAME, slow(0.1))
    assert HttpSource(parse_source(server.url), limits).read(wanted(release)) == release.files[NAME]


def test_configured_retries_are_attempts_after_the_first() -> None:
    assert FetchPolicy.of(Network(retries=0)).attempts == 1
    assert FetchPolicy.of(Network()) == FetchPolicy()
