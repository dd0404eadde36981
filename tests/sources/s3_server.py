"""An S3 server of moto's in a thread of this process, and a front before it that spoils answers as a test says."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

SECRET = "wJalrXUtnFEMI"


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where it listens, and a bucket in it."""

    url: str
    bucket: str = "adapters"

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def put(self, folder: str, files: Mapping[str, bytes]) -> str:
        """Upload files, and give their address."""
        import obstore

        options = {name.lower(): value for name, value in self.environment.items() if name != "AWS_ALLOW_HTTP"}
        store = obstore.store.S3Store(self.bucket, config=options, client_options={"allow_http": True})
        for name, content in files.items():
            obstore.put(store, f"{folder}/{name}", content)
        return f"s3://{self.bucket}/{folder}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        s3 = S3Server(f"http://{host}:{port}")
        httpx.put(f"{s3.url}/{s3.bucket}").raise_for_status()
        yield s3
    finally:
        server.stop()


# ── the front ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SKIPPED = ("content-length", "connection", "transfer-encoding", "date", "server")


@dataclass
class S3Front:
    """Every field is a fault; without any, clients see the server behind."""

    behind: str
    port: int = 0
    status: int | None = None
    adds_bytes: int = 0  # to the sizes in a listing
    breaks: list[int] = field(default_factory=list)  # bytes after which one download after the other breaks off
    after_listing: list[Callable[[], object]] = field(default_factory=list)  # is done once, behind the first listing
    reads: list[str] = field(default_factory=list)  # the ranges that were asked for
    may_list: threading.Event = field(default_factory=threading.Event)
    may_read: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def heal(self) -> None:
        """End every fault."""
        self.status, self.adds_bytes = None, 0
        self.breaks, self.after_listing, self.reads = [], [], []
        self.may_list.set()
        self.may_read.set()

    def spoiled(self, answer: httpx.Response, is_listing: bool) -> bytes:
        if not is_listing:
            return answer.content
        for change in self.after_listing[:1]:
            self.after_listing.clear()
            change()
        return re.sub(rb"<Size>(\d+)", lambda one: b"<Size>%d" % (int(one[1]) + self.adds_bytes), answer.content)


@contextmanager
def s3_front(behind: str) -> Iterator[S3Front]:
    front = S3Front(behind)
    front.heal()

    class Handler(_Handler):
        server_front = front

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        front.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield front
        finally:
            front.heal()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_front: S3Front

    def do_GET(self) -> None:
        front, is_listing = self.server_front, "list-type" in self.path
        (front.may_list if is_listing else front.may_read).wait()
        if not is_listing:
            front.reads.append(str(self.headers["range"]))
        answer = httpx.get(f"{front.behind}{self.path}", headers=dict(self.headers.items()))
        body = front.spoiled(answer, is_listing)
        self.send_response(front.status or answer.status_code)
        for name, value in answer.headers.items():
            if name not in SKIPPED:
                self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        with suppress(ConnectionError):  # a client that gives up hears no more
            self.end_headers()
            self.wfile.write(body[: front.breaks.pop(0)] if front.breaks and not is_listing else body)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests say what they want to hear."""
