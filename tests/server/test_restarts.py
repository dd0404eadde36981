"""What clients and operators see when the engine's process dies, hangs, or does not come back."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.lora_paths import LoraPath
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.runtime.service import Service, ServicePhase
from rota.runtime.timeouts import EngineTimeouts
from rota.text.tokenizer import Tokenizer
from tests.observe.scraped import Scrape
from tests.runtime.test_supervisor import FolderDevice
from tests.server.applications import made_app
from tests.server.engines import pids_of, processes
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until


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
