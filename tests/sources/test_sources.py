"""Addresses become folders: once for many who ask, within a size, whole, resumed, and never of mixed contents."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rota.core.errors import AdapterError, DiskError, FaultCode
from rota.core.lora_paths import LoraPath
from rota.sources.address import Address, parse_address
from rota.sources.disk_cache import DiskCache
from rota.sources.download import MOST_VAIN, Download
from rota.sources.source import ChangedError, SourceError, SourceFile, UnreachableError
from rota.sources.sources import FIRST_BYTES, Locator, Sources
from tests.sources.shelf import Shelf, adapter_files

SIZE = sum(map(len, adapter_files().values()))


def address(name: str) -> Address:
    return parse_address(f"s3://bucket/{name}")


def make(folder: Path, *names: str, adapters: int = 10) -> tuple[Sources, Shelf]:
    shelf = Shelf({f"bucket/{name}": adapter_files(name) for name in names})
    return Sources(DiskCache(folder, adapters * SIZE), lambda _: shelf), shelf


def content(sources: Sources, where: Address, owner: str | None = None) -> dict[str, bytes]:
    with sources.folder_of(where, owner) as folder:
        return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_an_adapter_is_fetched_once(tmp_path: Path):
    sources, shelf = make(tmp_path, "one")
    assert content(sources, address("one")) == adapter_files("one")
    reads = list(shelf.reads)
    assert content(sources, address("one")) == adapter_files("one")
    assert shelf.reads == reads
    exact = sources.exact(address("one"))
    again, _ = make(tmp_path)
    assert content(again, exact) == adapter_files("one"), "a new process finds it, though the source is gone"


def test_many_who_ask_wait_for_one_download(tmp_path: Path):
    sources, shelf = make(tmp_path, "one")
    may_go, asked = threading.Event(), sources.exact(address("one"))
    shelf.files = _slow(shelf.files, may_go)  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(content, sources, asked) for _ in range(8)]
        may_go.set()
        assert all(one.result() == adapter_files("one") for one in found)
    assert len(shelf.reads) == 2, "each file once"


def _slow(verb, may_go):
    def late(place):
        may_go.wait()
        return verb(place)

    return late


def test_only_an_adapters_own_files_are_fetched(tmp_path: Path):
    sources, shelf = make(tmp_path, "one")
    shelf.places["bucket/one"] |= {"optimizer.pt": b"x" * 10**6, "README.md": b"read me"}
    assert content(sources, address("one")) == adapter_files("one")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"README.md": b""}, "s3://bucket/odd is no adapter: it has no adapter_config.json"),
        ({"adapter_config.json": b"{}"}, "has no adapter_model.safetensors"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b""}, "reads only safetensors"),
        ({**adapter_files(), "adapter_config.json": b" " * (2 << 20)}, "a config of more than 1 MiB"),
        ({**adapter_files(), "adapter_model.safetensors": b" " * (3 << 20)}, "takes 3 MiB, more than the 0 MiB"),
    ],
)
def test_a_place_without_an_adapter_is_refused_and_leaves_nothing(tmp_path: Path, files: dict[str, bytes], sentence):
    sources, shelf = make(tmp_path)
    shelf.places["bucket/odd"] = files
    with pytest.raises(SourceError, match=sentence):
        content(sources, address("odd"))
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_fails_leaves_no_files(tmp_path: Path):
    sources, shelf = make(tmp_path, "one")
    shelf.breaks = [0] * MOST_VAIN
    with pytest.raises(SourceError, match="broke off"):
        content(sources, address("one"))
    assert list(tmp_path.rglob("*")) == []
    assert content(sources, address("one")) == adapter_files("one"), "the next one succeeds"


def test_what_was_read_longest_ago_leaves_first(tmp_path: Path):
    sources, shelf = make(tmp_path, "one", "two", "six", adapters=2)
    content(sources, address("one"))
    content(sources, address("two"))
    content(sources, address("one"))
    content(sources, address("six"))
    shelf.reads.clear()
    content(sources, address("one"))
    content(sources, address("six"))
    assert shelf.reads == []
    content(sources, address("two"))
    assert len(shelf.reads) == 2


def test_nothing_leaves_for_what_is_refused(tmp_path: Path):
    sources, shelf = make(tmp_path, "one", "two", "six", adapters=2)
    content(sources, address("one"))
    content(sources, address("two"))
    with pytest.raises(AdapterError), sources.folder_of(address("six")):
        raise AdapterError("Its numbers are not finite.")
    shelf.reads.clear()
    content(sources, address("one"))
    content(sources, address("two"))
    assert shelf.reads == []


def test_the_newest_stays_though_there_is_no_room_beside_what_is_being_read(tmp_path: Path):
    sources, shelf = make(tmp_path, "one", "two", adapters=1)
    with sources.folder_of(address("one")):
        content(sources, address("two"))
        shelf.reads.clear()
        content(sources, address("two"))
        assert shelf.reads == []


def test_an_adapter_is_located_with_its_bytes_also_by_its_exact_address(tmp_path: Path):
    sources, _ = make(tmp_path, "one")
    locator = Locator(None, sources)
    found = locator.locate(LoraPath(name="a", path="s3://bucket/one"))
    assert found.size_bytes == sum(map(len, adapter_files("one").values()))
    assert locator.locate(LoraPath(name="a", path=found.path)) == found
    content(sources, parse_address(found.path))
    assert locator.locate(LoraPath(name="a", path=found.path)) == found, "it is in the cache by now"


def test_what_a_key_brings_takes_the_place_of_its_own_and_not_of_what_others_use(tmp_path: Path):
    sources, shelf = make(tmp_path, "bird", *(f"acme{n}" for n in range(8)), adapters=4)
    content(sources, address("bird"), "birds")
    for number in range(8):
        content(sources, address(f"acme{number}"), "acme")
    shelf.reads.clear()
    content(sources, address("bird"), "birds")
    content(sources, address("acme7"), "acme")
    assert shelf.reads == [], "both are still on disk"
    content(sources, address("acme0"), "acme")
    assert len(shelf.reads) == 2


def test_a_key_whose_adapter_would_drive_out_smaller_ones_of_others_is_refused(tmp_path: Path):
    sources, shelf = make(tmp_path, "bird", "owl", adapters=4)
    shelf.places["bucket/huge"] = {name: body * 3 for name, body in adapter_files("huge").items()}
    for name in ("bird", "owl"):
        content(sources, address(name), "birds")
    with pytest.raises(DiskError, match="'acme' would take more of the cache on disk than others"):
        content(sources, address("huge"), "acme")
    shelf.reads.clear()
    content(sources, address("bird"), "birds")
    assert shelf.reads == []
    assert content(sources, address("huge")), "the operator may"


def test_a_disk_that_is_nearly_full_is_not_filled_by_the_cache(tmp_path: Path, monkeypatch):
    sources, shelf = make(tmp_path, "one", "two", adapters=10)
    content(sources, address("one"), "acme")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=SIZE - 1))
    content(sources, address("two"), "birds")
    shelf.reads.clear()
    content(sources, address("one"), "acme")
    assert len(shelf.reads) == 2, "it has left"


def test_what_is_being_read_stays(tmp_path: Path):
    sources, _ = make(tmp_path, "one", "two", "six", adapters=1)
    with ExitStack() as stack:
        folder = stack.enter_context(sources.folder_of(address("one")))
        content(sources, address("two"))
        assert (folder / "adapter_config.json").exists()
    content(sources, address("six"))
    assert not folder.exists()


def test_an_exact_address_means_one_content(tmp_path: Path):
    sources, shelf = make(tmp_path, "one")
    first = sources.exact(address("one"))
    assert content(sources, first) == adapter_files("one")
    shelf.places["bucket/one"] = adapter_files("new")
    second = sources.exact(address("one"))
    assert content(sources, second) == adapter_files("new")
    assert content(sources, first) == adapter_files("one"), "the old version is still on disk"
    other = Sources(DiskCache(tmp_path / "other", 10 * SIZE), lambda _: shelf)
    with pytest.raises(ChangedError, match="holds something else than when it was loaded"):
        content(other, first)


def test_a_folder_that_was_damaged_is_fetched_again(tmp_path: Path):
    sources, _ = make(tmp_path, "one")
    with sources.folder_of(address("one")) as folder:
        weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"x" * weights.stat().st_size)
    again, shelf = make(tmp_path, "one")
    assert content(again, address("one")) == adapter_files("one")
    assert len(shelf.reads) == 2


def test_what_a_dead_process_has_left_goes_when_room_is_made(tmp_path: Path):
    sources, _ = make(tmp_path, "one")
    (tmp_path / "0123.part").mkdir()
    content(sources, address("one"))
    assert [path.suffix for path in tmp_path.iterdir()] == [""]


def test_a_store_that_is_away_at_the_start_is_done_without(tmp_path: Path):
    sources, shelf = make(tmp_path, "one")
    content(sources, address("one"))
    exact = sources.exact(address("one"))

    def is_away(_place: str) -> list[SourceFile]:
        raise UnreachableError("The store is away.")

    shelf.files = is_away  # type: ignore[method-assign]
    assert sources.exact_or_kept(address("one")) == exact
    with pytest.raises(UnreachableError):
        sources.exact_or_kept(address("two"))
    shelf.files = Shelf({}).files  # type: ignore[method-assign]
    with pytest.raises(SourceError, match="There is nothing"):
        sources.exact_or_kept(address("one"))


def test_errors_of_a_folder_name_its_address(tmp_path: Path):
    sources, _ = make(tmp_path, "one")
    with pytest.raises(AdapterError) as caught, sources.folder_of(address("one")) as folder:
        raise AdapterError(f"{folder}/adapter_config.json is odd.")
    assert str(caught.value) == "s3://bucket/one/adapter_config.json is odd."


def test_what_is_no_adapter_for_this_server_does_not_stay_on_the_disk(tmp_path: Path):
    sources, _ = make(tmp_path, "one")
    with pytest.raises(AdapterError), sources.folder_of(address("one")):
        raise AdapterError("Its rank is too large.")
    assert list(tmp_path.iterdir()) == []
    with sources.folder_of(address("one")) as folder:
        with pytest.raises(AdapterError), sources.folder_of(address("one")):
            raise AdapterError("Its rank is too large.")
        assert folder.exists(), "another still reads it"


NO_ROOM = "There is no room for the adapter in {} ({}). Free some of that disk"
FAILS = "The adapter cannot be written to {} ({}). Look after that disk"


@pytest.mark.parametrize(
    ("number", "said", "code"),
    [
        (errno.ENOSPC, NO_ROOM, FaultCode.DISK_FULL),
        (errno.EDQUOT, NO_ROOM, FaultCode.DISK_FULL),
        (errno.EIO, FAILS, FaultCode.DISK_FAILED),
        (errno.EROFS, FAILS, FaultCode.DISK_FAILED),
    ],
)
def test_a_disk_that_is_full_or_fails_is_told_with_what_helps(tmp_path: Path, monkeypatch, number, said, code):
    def fail(download: Download, folder: Path) -> None:
        into(download, folder)
        raise OSError(number, os.strerror(number))

    sources, _ = make(tmp_path, "one")
    into = Download.into
    with monkeypatch.context() as patched:
        patched.setattr(Download, "into", fail)
        with pytest.raises(DiskError) as caught:
            content(sources, address("one"))
    remedy = "start the server with --adapter-cache-dir on another"
    assert str(caught.value) == f"{said.format(tmp_path, os.strerror(number))}, or {remedy}."
    assert caught.value.code is code
    assert list(tmp_path.iterdir()) == []
    assert content(sources, address("one")) == adapter_files("one")


def test_an_outline_has_config_and_header_and_the_length_of_the_weights(tmp_path: Path):
    header = b'{"__metadata__": {}}' + b" " * (FIRST_BYTES + 12)
    weights = len(header).to_bytes(8, "little") + header + b"w" * 10**6
    sources, shelf = make(tmp_path, adapters=10**5)
    shelf.places["bucket/big"] = {**adapter_files(), "adapter_model.safetensors": weights}
    with sources.outline_of(address("big")) as folder:
        read = (folder / "adapter_model.safetensors").read_bytes()
        assert read[: 8 + len(header)] == weights[: 8 + len(header)]
        assert len(read) == len(weights)
        assert set(read[8 + len(header) :]) == {0}
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


# ── downloads ─────────────────────────────────────────────────────────────────────────────────────────────────────────

PLACE = "bucket/legal"


def shelf(**options: object) -> Shelf:
    return Shelf({PLACE: adapter_files()}, **options)


def download(source: Shelf, **changes: object) -> Download:
    return Download(source=source, place=PLACE, files=source.files(PLACE), pause=lambda _: None, **changes)


def test_every_file_comes_whole(tmp_path: Path):
    download(shelf(tells_digests=True)).into(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == adapter_files()


def test_a_connection_that_breaks_off_is_taken_up_where_it_ended(tmp_path: Path):
    source = shelf(breaks=[3, 4, 100, 25, 5])
    download(source).into(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == adapter_files()
    assert source.reads == [
        ("adapter_config.json", 0),
        ("adapter_config.json", 3),
        ("adapter_config.json", 7),
        ("adapter_model.safetensors", 0),
        ("adapter_model.safetensors", 25),
        ("adapter_model.safetensors", 30),
    ]


def test_what_a_former_process_has_left_is_not_fetched_again(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_bytes(adapter_files()["adapter_config.json"])
    (tmp_path / "adapter_model.safetensors").write_bytes(adapter_files()["adapter_model.safetensors"][:13])
    source = shelf()
    download(source).into(tmp_path)
    assert source.reads == [("adapter_model.safetensors", 13)]
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == adapter_files()["adapter_model.safetensors"]


def test_connections_that_bring_nothing_are_given_up(tmp_path: Path):
    source = shelf(breaks=[0] * 50)
    with pytest.raises(SourceError, match="broke off"):
        download(source).into(tmp_path)
    assert len(source.reads) == MOST_VAIN


def test_a_source_that_lies_about_a_size_is_refused(tmp_path: Path):
    source = shelf()
    files = source.files(PLACE)
    with pytest.raises(ChangedError, match="is longer than its source says: 5 bytes"):
        replace(download(source), files=[replace(file, size=5) for file in files]).into(tmp_path)


def test_a_file_that_ends_early_is_refused(tmp_path: Path):
    source = shelf()
    (config, weights) = source.files(PLACE)
    with pytest.raises(UnreachableError, match="ended after 60 of 1,000 bytes"):
        replace(download(source), files=[config, replace(weights, size=1000)]).into(tmp_path)


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path):
    source = shelf()
    late = download(source)
    source.places[PLACE] = adapter_files("two")
    with pytest.raises(ChangedError):
        late.into(tmp_path)


def test_content_that_is_not_what_was_said_is_refused(tmp_path: Path):
    source = shelf()
    files = [replace(file, sha256="0" * 64) for file in source.files(PLACE)]
    with pytest.raises(ChangedError, match="SHA-256"):
        replace(download(source), files=files).into(tmp_path)


def test_a_source_that_is_too_slow_is_given_up(tmp_path: Path):
    times = iter(range(0, 10_000, 20))
    with pytest.raises(UnreachableError, match="too slowly: less than"):
        download(shelf(), now=lambda: float(next(times))).into(tmp_path)
