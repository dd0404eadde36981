"""A name that gets new versions for ever takes no more memory than one that gets a few."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.lora_paths import LoraPath
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.models import serving_model
from tests.server.versions.serving import ask, put, send, versions
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import until

# More than the history of a name holds, and than any queue of recent things that a few updates fill.
FIRST, THEN = 30, 60


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Of a server with a real engine, in this process; its spool lies in the folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = write_byte_tokenizer(tmp_path / "tiny")
    path = make_adapter(tmp_path / "poet", make_tiny_model(folder, "smollm2"))
    with serving_model(folder, [LoraPath(name="poet", path=str(path))]) as client:
        yield client


def update(client: httpx.Client, folder: Path, times: int) -> None:
    """By folder and by body in turn, and every tenth version answers; at the end only the newest is there."""
    weights, config = (folder / name for name in ("adapter_model.safetensors", "adapter_config.json"))
    for number in range(times):
        if number % 2:
            told = put(client, "poet", str(folder))
        else:
            told = send(client, "poet", weights.read_bytes(), config=config.read_text())
        assert told.status_code == 200
        if number % 10 == 0:
            assert ask(client, "poet", temperature=0).status_code == 200
    assert until(lambda: list(versions(client, "poet").values()) == ["current"])


def census() -> Counter[str]:
    """Rota's objects by their class, and what each of their attributes holds in all."""
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if str(kind.__module__).startswith("rota."):
            found[kind.__qualname__] += 1
            for name, value in attributes(one):
                if isinstance(value, dict | list | set | frozenset | deque):
                    found[f"{kind.__qualname__}.{name}"] += len(value)
    return found


def attributes(one: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield name, getattr(one, name)


def test_hundreds_of_updates_leave_no_records_no_files_and_no_metrics(client, tmp_path):
    update(client, tmp_path / "poet", FIRST)
    before, lines = census(), len(client.get("/metrics").text.splitlines())
    update(client, tmp_path / "poet", THEN)
    after, lines_after = census(), len(client.get("/metrics").text.splitlines())

    grown = {name: (before[name], count) for name, count in after.items() if count > before[name] + THEN // 8}
    assert not grown, "as many records as versions"
    assert lines_after == lines
    assert len(list(tmp_path.glob("rota-spool-*/*"))) <= 1, "the newest version's"
