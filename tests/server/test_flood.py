"""A real process with few open files: idle connections of one address do not lock the others out."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.processes import started
from tests.server.endless import ENDLESS
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of, until

SCRIPT = """
import os, resource, sys
from rota.core.config import ServerConfig
from rota.observe.logs import set_up_logs
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.server.applications import made_app
from rota.server.listen import listen
from rota.server.door.door import hold_port
from rota.text.tokenizer import Tokenizer
from tests.server.endless import endless_device
from tests.server.engines import threads

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    set_up_logs("text", "info")
    service = EngineClient(threads(endless_device))
    registry = Registry("letters", sys.argv[1])
    access = Access(registry, KeyRing({digest_of("secret"): Key("acme")}))
    app = made_app(service, Tokenizer(sys.argv[1]), registry, access=access)

    def announce(url):
        if spare := int(sys.argv[2]):  # fewer files than the server was told of: others run out of them too
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + spare, 200))
        print(url, flush=True)

    config = ServerConfig(port=0)
    listen(hold_port(config.host, 0), app, service, config, announce)
"""
ASKED = {"prompt": "abc", "max_tokens": 5}


@contextmanager
def server(folder: Path, spare_files: int = 0) -> Iterator[tuple[str, Path]]:
    """The address of a server that may open 200 files, and the file of its log."""
    write_byte_tokenizer(folder)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    log = folder / "log"
    with log.open("w") as stderr:
        command = [sys.executable, "-c", SCRIPT, str(folder), str(spare_files)]
        with started(command, stderr=stderr, env=environment) as program:
            yield line_of(program, "http").strip(), log


@contextmanager
def flood(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Idle connections from 127.0.0.1, as many as are let in."""
    address = urlsplit(url)
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            with suppress(ConnectionError):
                where = (address.hostname, address.port)
                opened.append(stack.enter_context(socket.create_connection(where, TIMEOUT_S)))
        yield opened


def client(url: str) -> httpx.Client:
    """A client from another address, with a key; it takes a new connection for every request."""
    return httpx.Client(
        base_url=url,
        headers={"Authorization": "Bearer secret"},
        transport=httpx.HTTPTransport(local_address="127.0.0.2", limits=httpx.Limits(max_keepalive_connections=0)),
        timeout=TIMEOUT_S,
    )


def test_three_hundred_idle_connections_do_not_lock_others_out_and_the_log_says_so(tmp_path):
    with server(tmp_path) as (url, log), client(url) as other, flood(url, 300):
        for _ in range(20):
            assert other.post("/v1/completions", json=ASKED).status_code == 200
        numbers = other.get("/metrics").text

        assert until(lambda: "Connections were refused or closed." in log.read_text())
        line = next(line for line in log.read_text().splitlines() if "refused or closed" in line)
    assert re.search(r"WARNING .* made_room=\d+ .*limit=136 busiest=\"127\.0\.0\.1 \(\d+ open\)\"", line)
    assert re.search(r'^rota_connections_closed_total\{reason="made_room"\} \d{3}\.0$', numbers, re.MULTILINE)


def test_a_server_that_runs_out_of_files_says_so_to_new_clients_if_all_are_busy_and_closes_idle_connections(tmp_path):
    with server(tmp_path, spare_files=8) as (url, log), client(url) as other:
        with ExitStack() as stack:
            body = ASKED | {"max_tokens": ENDLESS, "stream": True}
            streams = [stack.enter_context(other.stream("POST", "/v1/completions", json=body)) for _ in range(16)]

            assert {stream.status_code for stream in streams} == {200, 503}
            refused = next(stream for stream in streams if stream.status_code == 503)
            assert b"too_many_connections" in refused.read()
            assert until(lambda: "refused_files=" in log.read_text())

        with flood(url, 60):
            for _ in range(20):
                assert other.post("/v1/completions", json=ASKED).status_code == 200
            assert "Error" not in log.read_text()
