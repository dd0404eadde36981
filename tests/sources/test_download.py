"""Downloads: whole, resumed, and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rota.sources.download import MOST_VAIN, Download
from rota.sources.source import ChangedError, SourceError, UnreachableError
from tests.sources.shelf import Shelf, adapter_files

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
