"""What clients and operators see when an engine dies, hangs or stays away, and of adapters that engines die of."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from rota.runtime.service import Service, ServicePhase
from rota.runtime.supervisor import SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from rota.server.access.access import Access
from rota.server.access.key_file import read_keys
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.observe.scraped import Scrape
from tests.runtime.test_supervisor import FolderDevice
from tests.server.applications import made_app, running
from tests.server.engines import pids_of, processes
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Stage:
    """A server whose adapter "pirate" lies in a folder, with an engine in its own process."""

    def __init__(self, client: httpx.Client, service: Service, folder: Path) -> None:
        self.client, self.folder = client, folder
        self._service = service

    def ask(self, model: str = "pirate") -> httpx.Response:
        body = {"model": model, "prompt": "abc", "max_tokens": 3}
        return self.client.post("/v1/completions", json=body)

    def scrape(self) -> Scrape:
        return Scrape(self.client.get("/metrics").text)

    def status(self, path: str) -> int:
        return self.client.get(path).status_code

    def end_engine(self, number: signal.Signals) -> None:
        """Send a signal to every replica, and wait until other engines serve."""
        before, restarts = pids_of(self._service), self.restarts()
        for pid in before:
            os.kill(pid, number)
        assert until(lambda: not {*before} & {*pids_of(self._service)} and self.are_ready())
        assert until(lambda: self.restarts() > restarts)

    def restarts(self) -> float:
        return self.scrape()("rota_engine_restarts_total", engine="0") or 0.0

    def are_ready(self) -> bool:
        phases = {engine.phase for engine in self._service.state.engines}
        return phases == {ServicePhase.READY} and self.status("/readyz") == 200

    def post(self, route: str, **fields: Any) -> httpx.Response:
        return self.client.post(route, json={"lora_name": "pirate", **fields})

    def names(self) -> list[str]:
        return [model["id"] for model in self.client.get("/v1/models").json()["data"]]


@contextmanager
def staged(tmp_path: Path, silence_s: float = TIMEOUT_S) -> Iterator[Stage]:
    folder = tmp_path / "pirate"
    folder.mkdir()
    registry = Registry("letters", str(tmp_path))
    adapter = registry.add(LoraPath(name="pirate", path=str(folder)))
    service = processes(FolderDevice, timeouts=EngineTimeouts(silence_s=silence_s, quick_deaths=100))
    whole = EngineClient(service, [adapter])
    app = made_app(whole, Tokenizer(write_byte_tokenizer(tmp_path / "model")), registry)
    with running(app) as url, httpx.Client(base_url=url) as client:
        whole.wait_until_ready()
        yield Stage(client, service, folder)


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


def lose_the_adapter(stage: Stage) -> None:
    stage.folder.mkdir(exist_ok=True)
    if "pirate" not in stage.names():
        stage.post("/v1/load_lora_adapter", lora_path=str(stage.folder)).raise_for_status()
    assert stage.ask().status_code == 200
    stage.folder.rmdir()
    stage.end_engine(signal.SIGKILL)
    assert until(lambda: stage.scrape()("rota_adapters_lost") == 1)


def test_a_stopped_engine_is_not_ready_and_comes_back(tmp_path):
    with staged(tmp_path, silence_s=6.0) as stage:
        assert stage.scrape()("rota_engine_up", engine="0") == 1
        first = stage.scrape()("rota_engine_process_start_time_seconds", engine="0")
        stage.end_engine(signal.SIGSTOP)

        assert stage.ask("letters").status_code == 200
        scrape = stage.scrape()
        assert scrape("rota_engine_restarts_total", engine="0") == 1
        assert scrape("rota_engine_up", engine="0") == 1
        assert scrape("rota_engine_process_start_time_seconds", engine="0") > first


def losses(stage: Stage) -> float:
    return stage.scrape()("rota_adapter_losses_total", engine="0") or 0.0


def test_a_lost_adapter_answers_with_the_reason_and_is_logged_and_counted_until_its_folder_is_back(stage, caplog):
    caplog.set_level(logging.WARNING, logger="rota")
    before = losses(stage)
    lose_the_adapter(stage)
    answer = stage.ask()

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("adapter_failed", "model")
    assert error["message"].startswith("Adapter 'pirate' could not be read: ")
    assert "is broken." in error["message"]
    assert stage.ask("letters").status_code == 200
    assert "pirate" in stage.names()
    assert (stage.scrape()("rota_adapters_loaded"), losses(stage)) == (0, before + 1)
    lines = {record.getMessage(): record.fields for record in caplog.records if hasattr(record, "fields")}
    assert lines["An adapter could not be read."]["adapter"] == "pirate"
    assert "is broken." in lines["An adapter could not be read."]["why"]
    assert "SIGKILL" in lines["The engine died and is started again."]["why"]

    stage.end_engine(signal.SIGKILL)
    assert until(lambda: losses(stage) == before + 2)
    assert (stage.ask().status_code, stage.scrape()("rota_adapters_lost")) == (400, 1)
    stage.folder.mkdir()
    stage.end_engine(signal.SIGKILL)
    assert until(lambda: stage.ask().status_code == 200)
    assert stage.scrape()("rota_adapters_lost") == 0


def test_a_lost_adapter_is_repaired_by_loading_it_again_and_gone_when_it_is_unloaded(stage):
    lose_the_adapter(stage)
    refused = stage.post("/v1/load_lora_adapter", lora_path=str(stage.folder))
    assert (refused.status_code, stage.ask().json()["error"]["code"]) == (400, "adapter_failed")

    stage.folder.mkdir()
    assert stage.post("/v1/load_lora_adapter", lora_path=str(stage.folder)).status_code == 200
    assert stage.ask().status_code == 200
    assert until(lambda: stage.scrape()("rota_adapters_lost") == 0)
    assert stage.scrape()("rota_adapters_loaded") == 1

    lose_the_adapter(stage)
    assert stage.post("/v1/unload_lora_adapter").status_code == 200
    assert (stage.ask().status_code, stage.names()) == (404, ["letters"])
    assert until(lambda: stage.scrape()("rota_adapters_lost") == 0)


# ── quarantine ────────────────────────────────────────────────────────────────────────────────────────────────────────

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


class FatalStage:
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
def staged_with(folder: Path, first: str | None = None) -> Iterator[FatalStage]:
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
        yield FatalStage(url, root)


def test_an_adapter_that_two_engines_died_of_is_quarantined_for_all_to_see(tmp_path, caplog):
    with caplog.at_level(logging.INFO), staged_with(tmp_path) as stage:
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


@pytest.mark.long("four engines die, one after the other")
def test_a_key_of_two_such_adapters_loads_nothing_until_an_operator_says_so(tmp_path, capsys):
    with staged_with(tmp_path) as stage:
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
    with staged_with(tmp_path, "first") as stage:
        assert until(lambda: stage.ask("first", stage.boss).status_code == 200)
    kept = {"name": "first", "owner": None, "path": str(folder), "since": 1.0, "reason": "an engine died."}
    (tmp_path / "keys.toml.quarantine.json").write_text(json.dumps({"adapters": [kept], "keys": {}}))
    (folder / "fatal").touch()
    with staged_with(tmp_path, "first") as stage:
        assert stage.code(stage.ask("first", stage.boss)) == (503, "adapter_quarantined")
        assert stage.load("acme-good", is_fatal=False).status_code == 200
        assert stage.ask("acme-good").status_code == 200


@pytest.mark.parametrize("text", ["", "[]", '{"adapters": 1}'])
def test_a_file_that_cannot_be_read_is_said_at_the_start(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(Exception, match="Cannot read the quarantined adapters"):
        Blame(path)
