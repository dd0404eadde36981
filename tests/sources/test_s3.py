"""Adapters from an S3 server that runs here, and what it says when things go wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.sources.address import parse_address
from rota.sources.disk_cache import DiskCache
from rota.sources.object_store import ObjectStore, _opened
from rota.sources.source import ChangedError, SourceError, UnreachableError
from rota.sources.sources import Sources
from tests.sources.s3_server import SECRET, S3Front, S3Server, s3_front
from tests.sources.shelf import adapter_files
from tests.waiting import TIMEOUT_S

# For stores that never answer; all others may be slow on a busy machine.
SHORT_S = 0.2


def sources_in(folder: Path, timeout_s: float = TIMEOUT_S) -> Sources:
    return Sources(DiskCache(folder, 10**8), lambda scheme: ObjectStore(scheme, timeout_s, timeout_s))


def content(folder: Path, where: str, timeout_s: float = TIMEOUT_S) -> dict[str, bytes]:
    with sources_in(folder, timeout_s).folder_of(parse_address(where)) as found:
        return {path.name: path.read_bytes() for path in found.iterdir() if not path.name.startswith(".")}


def refusal(folder: Path, where: str, timeout_s: float = TIMEOUT_S) -> str:
    """Says nothing of the endpoint and of credentials, and leaves nothing on the disk."""
    with pytest.raises(SourceError) as caught:
        content(folder, where, timeout_s)
    said = str(caught.value)
    assert SECRET not in said
    assert "http:" not in said
    assert "127.0.0.1" not in said
    assert list(folder.rglob("*")) == []
    return said


def test_an_adapter_comes_from_a_bucket(s3: S3Server, tmp_path: Path):
    where = s3.put("team/legal", {**adapter_files(), "optimizer.pt": b"x" * 1000})
    s3.put("team/legal/checkpoint-1", adapter_files("old"))
    assert content(tmp_path, where) == adapter_files()


def test_only_a_stretch_is_read_for_an_outline(s3: S3Server):
    s3.put("ranges", {"adapter_model.safetensors": bytes(range(100))})
    store = ObjectStore("s3")
    (file,) = store.files("adapters/ranges")
    assert b"".join(store.read("adapters/ranges", file, 10, 20)) == bytes(range(10, 20))
    assert b"".join(store.read("adapters/ranges", file, 90)) == bytes(range(90, 100))


def test_what_is_uploaded_later_is_another_content(s3: S3Server, tmp_path: Path):
    where = parse_address(s3.put("renewed", adapter_files("one")))
    first = sources_in(tmp_path).exact(where)
    s3.put("renewed", adapter_files("two"))
    assert content(tmp_path, str(where)) == adapter_files("two")
    with pytest.raises(ChangedError, match="s3://adapters/renewed holds something else than when it was loaded"):
        content(tmp_path / "other", str(first))


def test_a_file_that_changes_after_it_was_listed_is_refused(s3: S3Server):
    s3.put("changing", adapter_files("one"))
    store = ObjectStore("s3")
    listed = store.files("adapters/changing")
    s3.put("changing", adapter_files("two"))
    with pytest.raises(ChangedError, match="changed while it was read"):
        list(store.read("adapters/changing", listed[1], 0))


@pytest.mark.usefixtures("s3")
def test_nothing_is_there(tmp_path: Path):
    assert refusal(tmp_path, "s3://adapters/nothing") == "There is nothing at s3://adapters/nothing."
    assert refusal(tmp_path, "s3://no-such-bucket/x") == "There is nothing at s3://no-such-bucket/x."


@pytest.mark.usefixtures("s3")
def test_a_store_that_nobody_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    assert refusal(tmp_path, "s3://adapters/legal") == "The store of s3://adapters/legal cannot be reached."


@pytest.mark.usefixtures("s3")
def test_a_store_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        said = refusal(tmp_path, "s3://adapters/legal", SHORT_S)
    assert said == "The store of s3://adapters/legal did not answer in time."


@pytest.mark.usefixtures("s3")
def test_a_store_without_tls_is_allowed_by_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    assert "has no TLS, which AWS_ALLOW_HTTP=true" in refusal(tmp_path, "s3://adapters/legal")


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (403, "The store refuses the server's credentials for s3://adapters/legal."),
        (501, "The store of s3://adapters/legal answers with the status 501."),
    ],
)
def test_a_store_that_refuses(status: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for url in refusing_store(status):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert refusal(tmp_path, "s3://adapters/legal") == sentence


def refusing_store(status: int) -> Iterator[str]:
    body = f"<Error><Message>{SECRET} at http://127.0.0.1</Message></Error>"
    answer = f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_all, args=(listener, answer), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _answer_all(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(10_000)
            connection.sendall(answer)


def test_a_bucket_is_opened_once_for_all_that_lies_in_it(s3: S3Server, monkeypatch: pytest.MonkeyPatch):
    s3.put("open/one", adapter_files("one"))
    s3.put("open/two", adapter_files("two"))
    ObjectStore("s3").files("adapters/open/one")
    before = _opened.cache_info().misses
    found = ObjectStore("s3").files("adapters/open/two")
    assert b"".join(ObjectStore("s3").read("adapters/open/two", found[1], 0)) == b"two" * 20
    assert _opened.cache_info().misses == before
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    ObjectStore("s3").files("adapters/open/two")
    assert _opened.cache_info().misses == before + 1, "other credentials are another store"


@pytest.mark.usefixtures("s3")
def test_an_unreachable_store_is_told_from_one_without_the_adapter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError):
        ObjectStore("s3").files("adapters/legal")


@pytest.fixture
def front(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Front]:
    with s3_front(s3.url) as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        yield front


def test_a_connection_that_breaks_off_is_taken_up_where_it_ended(s3: S3Server, front: S3Front, tmp_path: Path):
    files = {**adapter_files(), "adapter_model.safetensors": bytes(range(256)) * 8192}
    where = s3.put("broken", files)
    front.breaks = [100, 1 << 20]
    assert content(tmp_path, where) == files
    last = len(files["adapter_model.safetensors"]) - 1
    assert front.reads == ["bytes=0-7", f"bytes=0-{last}", f"bytes={1 << 20}-{last}"]


@pytest.mark.parametrize("more", [1, -1])
def test_a_store_that_lies_about_sizes_is_refused(s3: S3Server, front: S3Front, tmp_path: Path, more: int):
    where = s3.put("lies", adapter_files())
    front.adds_bytes = more
    sentence = f"s3://adapters/lies/adapter_config.json has 8 bytes; its source listed {8 + more}."
    assert refusal(tmp_path, where) == sentence


def test_a_store_that_falls_silent_while_it_is_read(s3: S3Server, front: S3Front):
    s3.put("silent", adapter_files())
    listed = ObjectStore("s3").files("adapters/silent")
    front.may_read.clear()
    with pytest.raises(UnreachableError, match=r"^The store of s3://adapters/silent did not answer in time\.$"):
        list(ObjectStore("s3", SHORT_S, SHORT_S).read("adapters/silent", listed[0], 0))


def test_a_store_that_always_breaks_off(s3: S3Server, front: S3Front, tmp_path: Path):
    where = s3.put("snapping", adapter_files())
    front.breaks = [0] * 100
    assert refusal(tmp_path, where) == "The connection to the store of s3://adapters/snapping breaks off."
