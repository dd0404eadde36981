"""Adapters that came in bodies reach an engine that has another disk than the server."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rota.core.errors import FaultCode
from rota.core.events import AdapterRefused, AdapterRemoved
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter
from rota.runtime.spool import PIECE_BYTES, Arrivals, Spool, pieces_before
from tests.builders import add_adapter, submit

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * (PIECE_BYTES // 200)}


def uploaded(folder: Path) -> AddAdapter:
    """As the server tells of an adapter in its spool."""
    folder.mkdir()
    spool = Spool(folder)
    place = spool.new_folder()
    for name, content in FILES.items():
        (place / name).write_bytes(content)
    return add_adapter(7, path=str(place), root=str(spool.root))


def arrived(arrivals: Arrivals, message: AddAdapter) -> AddAdapter:
    for piece in pieces_before(message):
        assert arrivals.take(piece) is None
    placed = arrivals.take(message)
    assert isinstance(placed, AddAdapter)
    return placed


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


def test_an_upload_comes_in_pieces_and_lies_in_the_engines_own_spool(tmp_path: Path, there: Path):
    message = uploaded(tmp_path / "here")
    assert max(len(piece.content) for piece in pieces_before(message)) == PIECE_BYTES
    placed = arrived(Arrivals(there), message)
    folder, root = Path(placed.adapter.path), Path(placed.adapter.root or "")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert (folder.parent, root.parent) == (root, there)
    assert folder.name == Path(message.adapter.path).name
    assert placed == replace(message, adapter=replace(message.adapter, path=str(folder), root=str(root)))


GONE = [AdapterRemoved(AdapterId(7), 1.0), AdapterRefused(adapter_id=AdapterId(7), at=1.0, reason="It is odd.")]


@pytest.mark.parametrize("gone", GONE)
def test_its_files_go_with_it(tmp_path: Path, there: Path, gone):
    arrivals = Arrivals(there)
    placed = arrived(arrivals, uploaded(tmp_path / "here"))
    arrivals.observe([AdapterRemoved(AdapterId(6), 1.0)])
    assert Path(placed.adapter.path).exists()
    arrivals.observe([gone])
    assert not Path(placed.adapter.path).exists()
    arrivals.close()
    assert list(there.iterdir()) == []


def test_all_other_messages_pass_as_they_are(there: Path):
    arrivals = Arrivals(there)
    for message in (submit("a"), add_adapter(1), add_adapter(2, root="/adapters/acme")):
        assert list(pieces_before(message)) == []
        assert arrivals.take(message) == message
    assert list(there.iterdir()) == []


def test_a_disk_that_cannot_take_it_refuses_the_adapter_and_not_the_engine(tmp_path: Path, there: Path):
    there.rmdir()
    refused = arrived(Arrivals(there), uploaded(tmp_path / "here"))
    place = f"{there} on the engine's machine (No such file or directory)"
    assert refused.refusal.startswith(f"The adapter cannot be written to {place}. Look after that disk, or start ")
    assert refused.refusal_code is FaultCode.DISK_FAILED


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_is_told_as_what_may_pass_and_nothing_is_left(
    tmp_path: Path, there: Path, monkeypatch, number
):
    message, arrivals = uploaded(tmp_path / "here"), Arrivals(there)
    first, *pieces = pieces_before(message)
    arrivals.take(first)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        for piece in pieces:
            arrivals.take(piece)
    refused = arrivals.take(message)
    assert isinstance(refused, AddAdapter)
    assert refused.refusal_code is FaultCode.DISK_FULL
    assert refused.refusal.startswith(f"There is no room for the adapter in {there} on the engine's machine (")
    assert [path for path in there.rglob("*") if path.is_file()] == []
    arrivals.close()
    assert list(there.iterdir()) == []
