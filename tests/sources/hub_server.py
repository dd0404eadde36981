"""A small Hub in a thread of this process: it speaks what `huggingface_hub` asks for, and fails as a test says."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_wJalrXUtnFEMI"
Files = Mapping[str, bytes]
FAULTS = ("gated", "breaks", "stops_after", "after_listing", "says_size", "says_commit", "ignores_ranges", "status")


@dataclass
class HubServer:
    """Repositories with their commits, what it was asked, and how it fails."""

    port: int = 0
    commits: dict[str, dict[str, Files]] = field(default_factory=dict)  # of a repository, by their id
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)  # path, range, authorization
    breaks: list[int] = field(default_factory=list)  # bytes after which one download after the other breaks off
    after_listing: list[Callable[[], object]] = field(default_factory=list)  # is done once, behind the first listing
    says_size: int | None = None
    says_commit: str | None = None
    ignores_ranges: bool = False
    status: int | None = None
    body: bytes = b""
    stops_after: int | None = None  # bytes of a download, until it may go on
    may_answer: threading.Event = field(default_factory=threading.Event)
    may_read: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, repository: str, files: Files, branch: str = "main") -> str:
        """Commit files to a branch, and give the id of the commit."""
        told = branch.encode() + b"".join(name.encode() + content for name, content in sorted(files.items()))
        commit = hashlib.sha1(told).hexdigest()
        self.commits.setdefault(repository, {})[commit] = files
        self.branches.setdefault(repository, {})[branch] = commit
        return commit

    def downloads(self) -> list[tuple[str, str | None]]:
        """The files that were asked for, each with its range."""
        return [(path.rpartition("/")[2], stretch) for path, stretch, _ in self.asked if "/resolve/" in path]

    def heal(self) -> None:
        """End every fault."""
        fresh = HubServer()
        for name in FAULTS:
            setattr(self, name, getattr(fresh, name))
        for gate in (self.may_answer, self.may_read, self.may_go_on):
            gate.set()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    hub = HubServer()
    hub.heal()

    class Handler(_Handler):
        server_hub = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.heal()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer

    def do_GET(self) -> None:
        hub, path = self.server_hub, urlsplit(self.path).path
        hub.asked.append((path, self.headers["range"], self.headers["authorization"]))
        hub.may_answer.wait()
        if hub.status is not None:
            return self._send(hub.status, hub.body)
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":  # where large files lie: signed addresses, and no token
            return self._send_file(self._blob(parts[1]), {})
        if parts[:2] == ["api", "models"]:
            return self._allowed("/".join(parts[2:4]), lambda name: self._info(name, parts[5:] or ["main"]))
        return self._allowed("/".join(parts[:2]), lambda name: self._resolve(name, parts[3], "/".join(parts[4:])))

    def _allowed(self, repository: str, then: Any) -> None:
        hub, token = self.server_hub, self.headers["authorization"]
        if token not in (None, f"Bearer {TOKEN}"):
            return self._refuse(401, None, "Invalid credentials in Authorization header")
        if repository in hub.gated:
            return self._refuse(403, "GatedRepo", "Access to this repository is restricted.")
        if repository not in hub.commits or (repository in hub.private and token is None):
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        then(repository)

    def _info(self, repository: str, revision: list[str]) -> None:
        hub, asked = self.server_hub, unquote("/".join(revision))
        commit = hub.branches[repository].get(asked, asked)
        if commit not in hub.commits[repository]:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {asked}")
        siblings = [_sibling(name, content, hub) for name, content in hub.commits[repository][commit].items()]
        body = {"id": repository, "sha": commit, "siblings": siblings, "tags": [], "private": False}
        for change in hub.after_listing[:1]:
            hub.after_listing.clear()
            change()
        self._send(200, json.dumps(body).encode())

    def _resolve(self, repository: str, commit: str, path: str) -> None:
        hub, found = self.server_hub, self.server_hub.commits[repository].get(commit, {})
        if path not in found:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        headers = {"x-repo-commit": hub.says_commit or commit, "etag": f'"{_oid(found[path])}"'}
        if not _is_large(path):
            return self._send_file(found[path], headers)
        sha256 = hashlib.sha256(found[path]).hexdigest()
        self._send(302, b"", {**headers, "location": f"http://localhost:{hub.port}/cdn/{sha256}?signature={TOKEN}"})

    def _blob(self, sha256: str) -> bytes:
        states = [files for commits in self.server_hub.commits.values() for files in commits.values()]
        contents = (content for files in states for content in files.values())
        return next(content for content in contents if hashlib.sha256(content).hexdigest() == sha256)

    def _send_file(self, content: bytes, headers: Mapping[str, str]) -> None:
        stretch = self.headers["range"]
        if stretch is None or self.server_hub.ignores_ranges:
            return self._send(200, content, headers)
        first, last = (int(one) for one in stretch.removeprefix("bytes=").split("-"))
        self._send(206, content[first : last + 1], {**headers, "content-range": f"bytes {first}-{last}/{len(content)}"})

    def _refuse(self, status: int, code: str | None, words: str) -> None:
        headers = {"x-error-message": words} | ({"x-error-code": code} if code else {})
        self._send(status, json.dumps({"error": f"{words} {TOKEN} at {self.server_hub.url}"}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # a client that gives up hears no more
            self.end_headers()
            self._write(body, is_download=status == 206)

    def _write(self, body: bytes, is_download: bool) -> None:
        hub = self.server_hub
        if not is_download:
            self.wfile.write(body)
            return
        hub.may_read.wait()
        body = body[: hub.breaks.pop(0)] if hub.breaks else body
        if hub.stops_after is not None and hub.stops_after < len(body):
            self.wfile.write(body[: hub.stops_after])
            body = body[hub.stops_after :]
            hub.may_go_on.wait()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests say what they want to hear."""


def _sibling(name: str, content: bytes, hub: HubServer) -> dict[str, Any]:
    size = len(content) if hub.says_size is None or not _is_large(name) else hub.says_size
    told: dict[str, Any] = {"rfilename": name, "size": size, "blobId": _oid(content)}
    if _is_large(name):
        told["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 132}
    return told


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _oid(content: bytes) -> str:
    """As git names a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
