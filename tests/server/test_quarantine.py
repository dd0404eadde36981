"""What clients and operators see of an adapter that engines die of, and how that is lifted."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rota.cli import main
from rota.core.adapter import Adapter
from rota.core.config import EngineConfig
from rota.core.lora_paths import LoraPath
from rota.core.messages import Message
from rota.runtime.blame import Blame, kept_beside
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.runtime.supervisor import SupervisedService
from rota.server.access.access import Access
from rota.server.access.key_file import read_keys
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.observe.scraped import Scrape
from tests.server.applications import made_app
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import until

KEYS = """
[keys.acme]
key = "acme"
adapters = ["acme-*"]
may_load = true
adapter_root = "acme"

[keys.boss]
key = "boss"
adapters = "all"
may_use_base = true
may_load = true
may_operate = true
"""


class Fatal(FakeDevice):
    """Dies of folders that have a file `fatal`."""

    def fetch(self, adapter: Adapter) -> Message:
        if Path(adapter.root or "/", adapter.path, "fatal").exists():
            time.sleep(0.5)  # until then the engine's message has left
            os.abort()
        return super().fetch(adapter)


class Stage:
    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url, root
        self.acme, self.boss = (httpx.Client(base_url=url, headers={"x-api-key": name}) for name in ("acme", "boss"))

    def load(self, name: str, is_fatal: bool) -> httpx.Response:
        folder = self.root / "acme" / name
        folder.mkdir(exist_ok=True)
        if is_fatal:
            (folder / "fatal").touch()
        return self.acme.put(f"/v1/adapters/{name}", json={"path": name})

    def ask(self, name: str, client: httpx.Client | None = None) -> httpx.Response:
        return (client or self.acme).post("/v1/completions", json={"model": name, "prompt": "abc", "max_tokens": 2})

    def code(self, answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["code"]


@contextmanager
def staged(folder: Path, first: str | None = None) -> Iterator[Stage]:
    root = folder / "root"
    (root / "acme").mkdir(parents=True, exist_ok=True)
    file = folder / "keys.toml"
    if not file.exists():
        file.write_text(KEYS)
        file.chmod(0o600)
    registry = Registry("letters", str(folder))
    blame = Blame(kept_beside(str(file)))
    adapters = [registry.add(LoraPath(name=first, path=str(root / first)))] if first else []
    service = EngineClient(SupervisedService(Fatal, EngineConfig(), blame=blame), adapters)
    access = Access(registry, read_keys([], str(file), str(root)), blame=blame)
    app = made_app(service, Tokenizer(write_byte_tokenizer(folder / "model")), registry, access=access)
    with running(app) as url:
        service.wait_until_ready()
        yield Stage(url, root)


def test_an_adapter_that_two_engines_died_of_is_quarantined_for_all_to_see(tmp_path, caplog):
    with caplog.at_level(logging.INFO), staged(tmp_path) as stage:
        assert stage.load("acme-good", is_fatal=False).status_code == 200
        assert stage.code(stage.load("acme-bad", is_fatal=True)) == (503, "engine_died")
        assert stage.code(stage.load("acme-bad", is_fatal=True)) == (503, "adapter_quarantined")
        assert stage.code(stage.load("acme-bad", is_fatal=True)) == (503, "adapter_quarantined")
        assert until(lambda: stage.ask("acme-good").status_code == 200), "the others are served"
        refused = stage.ask("acme-bad")
        assert stage.code(refused) == (503, "adapter_quarantined")
        assert "An operator may lift that." in refused.json()["error"]["message"]

        info = stage.boss.get("/server_info").json()
        [shown] = info["quarantine"]["adapters"]
        assert (shown["name"], shown["key"]) == ("acme-bad", "acme")
        assert Scrape(stage.boss.get("/metrics").text)("rota_adapters_quarantined") == 1
        assert stage.boss.get("/v1/quarantine").json() == info["quarantine"]
        assert stage.code(stage.acme.get("/v1/quarantine")) == (403, "forbidden")
        for kind in ("adapters", "keys"):
            assert stage.code(stage.acme.delete(f"/v1/quarantine/{kind}/acme-bad")) == (403, "forbidden")
            assert stage.boss.delete(f"/v1/quarantine/{kind}/never-seen").status_code == 404
    acts = [record.fields for record in caplog.records if record.name == "rota.audit"]
    [act] = [fields for fields in acts if fields["action"] == "quarantine"]
    assert (act["key"], act["adapter"], act["may_load"]) == ("acme", "acme-bad", True)
    assert "An adapter is quarantined." in caplog.messages


def test_a_key_of_two_such_adapters_loads_nothing_until_an_operator_says_so(tmp_path, capsys):
    with staged(tmp_path) as stage:
        assert stage.load("acme-good", is_fatal=False).status_code == 200
        for name in ("acme-one", "acme-one", "acme-two", "acme-two"):
            assert stage.load(name, is_fatal=True).status_code == 503
        assert stage.boss.get("/v1/quarantine").json()["keys"] == ["acme"]
        assert until(lambda: stage.ask("acme-good").status_code == 200)
        refused = stage.load("acme-good", is_fatal=False)
        assert stage.code(refused) == (403, "forbidden")
        assert "operator may give that right back" in refused.json()["error"]["message"]

        def run(*options: str, code: int = 0) -> str:
            with pytest.raises(SystemExit) as ended:
                main(["adapters", "quarantine", "--base-url", stage.url, "--api-key", "boss", *options])
            assert ended.value.code == code
            return str(capsys.readouterr().out)

        listed = run()
        assert "acme-one (key: acme), since " in listed
        assert "Key 'acme' may load nothing." in listed
        assert "may load adapters again" in run("--give-back", "acme")
        assert stage.load("acme-good", is_fatal=False).status_code == 200
        (stage.root / "acme" / "acme-one" / "fatal").unlink()
        assert stage.load("acme-one", is_fatal=False).status_code == 503
        for name in ("acme-one", "acme-two"):
            assert "may be loaded again" in run("--lift", name)
        assert stage.load("acme-one", is_fatal=False).status_code == 200
        assert stage.ask("acme-one").status_code == 200
        assert run() == "No adapter is quarantined.\n"
        run("--lift", "acme-one", code=1)


def test_a_quarantine_outlasts_the_server_and_keeps_no_server_from_its_start(tmp_path):
    folder = tmp_path / "root" / "first"
    folder.mkdir(parents=True)
    with staged(tmp_path, "first") as stage:
        assert until(lambda: stage.ask("first", stage.boss).status_code == 200)
    kept = {"name": "first", "owner": None, "path": str(folder), "since": 1.0, "reason": "an engine died."}
    (tmp_path / "keys.toml.quarantine.json").write_text(json.dumps({"adapters": [kept], "keys": {}}))
    (folder / "fatal").touch()
    with staged(tmp_path, "first") as stage:
        assert stage.code(stage.ask("first", stage.boss)) == (503, "adapter_quarantined")
        assert stage.load("acme-good", is_fatal=False).status_code == 200
        assert stage.ask("acme-good").status_code == 200


@pytest.mark.parametrize("text", ["", "[]", '{"adapters": 1}'])
def test_a_file_that_cannot_be_read_is_said_at_the_start(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(Exception, match="Cannot read the quarantined adapters"):
        Blame(path)
