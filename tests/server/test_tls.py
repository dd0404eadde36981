"""HTTPS with a certificate that is checked at the start and replaced while the server runs."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from rota.core.config import ListenConfig
from rota.core.errors import ConfigError
from rota.observe.meters import Closure
from rota.server.door.certificate import Certificate, find_certificate
from tests.fakes import FakeDevice
from tests.server.doors import read_to_end, served
from tests.server.test_listen import listen_with
from tests.waiting import until

CERTIFICATES = Path(__file__).parent / "certificates"
GET = b"GET /hello HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """A certificate and its key, as flags take them."""
    install("first", tmp_path)
    return {"ssl_certfile": str(tmp_path / "tls.crt"), "ssl_keyfile": str(tmp_path / "tls.key")}


def install(name: str, folder: Path, key: str | None = None) -> None:
    """Put a certificate, and its key or another, in the place where a server looks for them."""
    for source, target in ((f"{name}.crt", "tls.crt"), (f"{key or name}.key", "tls.key")):
        shutil.copyfile(CERTIFICATES / source, folder / "new")
        (folder / "new").chmod(0o600)
        os.replace(folder / "new", folder / target)


def tls(raw: socket.socket, name: str) -> ssl.SSLSocket:
    return trusting(name).wrap_socket(raw, server_hostname="localhost")


def trusting(name: str) -> ssl.SSLContext:
    """What a client has that trusts one certificate alone."""
    return ssl.create_default_context(cafile=str(CERTIFICATES / f"{name}.crt"))


def ask(server, name: str) -> bytes:
    with server.connect() as raw, tls(raw, name) as connection:
        connection.sendall(GET)
        return read_to_end(connection)


def test_a_server_with_a_certificate_speaks_https(files):
    with served(**files) as server:
        assert server.door.scheme == "https"
        assert ask(server, "first").startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_speaks_no_tls_gets_nothing_and_others_go_on(files):
    with served(**files) as server:
        assert server.ask() == b""
        assert ask(server, "first").startswith(b"HTTP/1.1 200 OK")
        assert until(lambda: server.meters.open == 0)


def test_tls_older_than_1_2_is_refused(files):
    assert find_certificate(ListenConfig(**files)).context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_handshake_that_does_not_come_is_ended_and_counted(files):
    with served(head_timeout=0.3, **files) as server, server.connect() as connection:
        assert read_to_end(connection) == b""
        assert until(lambda: server.meters.closed[Closure.SLOW_HEAD] == 1)
        assert until(lambda: server.meters.open == 0)


def test_a_connection_without_a_handshake_gives_way_to_another(files):
    with served(max_connections=1, **files) as server, server.connect() as idle:
        assert until(lambda: server.meters.open == 1)

        assert ask(server, "first").startswith(b"HTTP/1.1 200 OK")
        assert read_to_end(idle) == b""


def test_files_that_change_are_read_again_and_open_connections_go_on(files, tmp_path):
    with served(**files) as server, server.connect() as raw, tls(raw, "first") as before:
        install("second", tmp_path)
        server.door.certificate.reload_if_changed()

        assert ask(server, "second").startswith(b"HTTP/1.1 200 OK")
        before.sendall(GET)
        assert read_to_end(before).startswith(b"HTTP/1.1 200 OK")


def test_a_server_looks_at_its_files_now_and_then(files, tmp_path, monkeypatch):
    monkeypatch.setattr("rota.server.door.certificate.POLL_S", 0.01)
    with served(**files) as server:
        before = server.door.certificate.context
        install("second", tmp_path)

        assert until(lambda: server.door.certificate.context is not before)
        assert until(lambda: is_trusted(server, "second"))


def is_trusted(server, name: str) -> bool:
    try:
        return ask(server, name).startswith(b"HTTP/1.1 200 OK")
    except ssl.SSLError:
        return False


def test_a_pair_that_does_not_fit_is_logged_once_and_the_former_one_stays(files, tmp_path, caplog):
    certificate = Certificate(files["ssl_certfile"], files["ssl_keyfile"])
    before = certificate.context
    install("first", tmp_path, key="second")
    with caplog.at_level(logging.WARNING, "rota.server"):
        certificate.reload_if_changed()
        certificate.reload_if_changed()

    assert certificate.context is before
    (record,) = caplog.records
    assert "does not belong to the certificate" in record.fields["why"]


def test_a_key_may_lie_in_the_file_of_its_certificate(tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes((CERTIFICATES / "first.crt").read_bytes() + (CERTIFICATES / "first.key").read_bytes())
    both.chmod(0o600)

    assert find_certificate(ListenConfig(ssl_certfile=str(both))) is not None


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "tls.crt").unlink(), "Cannot read .*tls.crt of --ssl-certfile: No such file"),
        (lambda folder: (folder / "tls.key").unlink(), "Cannot read .*tls.key of --ssl-keyfile: No such file"),
        (lambda folder: (folder / "tls.key").chmod(0o604), "Every user of this machine may read or write .*chmod o-rw"),
        (lambda folder: (folder / "tls.crt").write_text("no"), "do not hold a certificate and its private key"),
        (lambda folder: install("first", folder, key="second"), "does not belong to the certificate"),
        (lambda folder: install("first", folder, key="locked"), "has a password; take it off"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_said_at_the_start(files, tmp_path, spoil, words):
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=words):
        find_certificate(ListenConfig(**files))


def test_the_address_that_is_announced_is_https(files, tmp_path):
    heard = []

    def announce(url: str) -> None:
        health = httpx.get(f"{url}/health", verify=trusting("first")).json()
        heard.append((url.partition("//")[0], health))
        os.kill(os.getpid(), signal.SIGTERM)

    listen_with(FakeDevice, tmp_path, announce, **files)

    assert heard == [("https:", {"status": "ready"})]
