"""Certificates and credentials for the tests of https."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest


def write_netrc(place: Path, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    file = place / "netrc"
    file.write_text("".join(f"machine {host} login me password for-{host}\n" for host in hosts))
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))


def make_tls(place: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A certificate for both names of loopback, made on the spot and trusted by requests."""
    key, certificate = place / "key.pem", place / "certificate.pem"
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += [
        "-keyout",
        str(key),
        "-out",
        str(certificate),
        "-days",
        "2",
        "-subj",
        "/CN=test",
        "-addext",
        names,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=100)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"openssl cannot make a certificate here: {error}")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
