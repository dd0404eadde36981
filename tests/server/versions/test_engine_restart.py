"""Versions, routes and shadows outlive an engine that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.config import EngineConfig
from rota.core.lora_paths import LoraPath
from rota.llm.config import build_device, engine_config
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.runtime.service import BuildDevice, Service, ServicePhase
from rota.server.answers.respond import VERSION_HEADER
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import greedy_answer, load_with_peft, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.observe.scraped import Scrape
from tests.runtime.test_supervisor import FolderDevice
from tests.server.applications import made_app, running
from tests.server.endless import ENDLESS, endless_room
from tests.server.engines import pids_of, processes
from tests.server.letters import events_in
from tests.server.versions.serving import CONFIG, ask, put, send, versions, weights
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import until

ROUTE = "/v1/adapters/legal/route"
STREAMED = {"model": "legal@2", "prompt": "abc", "max_tokens": ENDLESS, "stream": True}


class Stage:
    """A server with an engine in its own process; "legal" is in a folder."""

    def __init__(self, client: httpx.Client, service: Service) -> None:
        self.client, self._service = client, service

    def kill(self) -> None:
        """Kill every engine, and wait until others serve."""
        before = pids_of(self._service)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert until(lambda: not {*before} & {*pids_of(self._service)} and self._is_ready())

    def _is_ready(self) -> bool:
        phases = {engine.phase for engine in self._service.state.engines}
        return phases == {ServicePhase.READY} and self.client.get("/readyz").status_code == 200

    def route(self, **body: Any) -> dict[str, Any]:
        shown: dict[str, Any] = self.client.put(ROUTE, json=body).raise_for_status().json()
        return shown

    def version(self, model: str = "legal", **fields: Any) -> str:
        return ask(self.client, model, **fields).raise_for_status().headers[VERSION_HEADER]

    def copies(self) -> float:
        return Scrape(self.client.get("/metrics").text)("rota_shadow_requests_total", outcome="length") or 0.0


@contextmanager
def staged(model: Path, first: Path, build: BuildDevice, config: EngineConfig | None = None) -> Iterator[Stage]:
    registry = Registry("tiny", str(model))
    service = processes(build, config)
    whole = EngineClient(service, [registry.add(LoraPath(name="legal", path=str(first)))])
    app = made_app(whole, Tokenizer(model), registry)
    with running(app) as url, httpx.Client(base_url=url) as client:
        whole.wait_until_ready()
        yield Stage(client, service)


@pytest.fixture
def stage(tmp_path) -> Iterator[Stage]:
    """Version 1 was there at the start, 2 comes from a folder, 3 in a body; a route has all of them."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    build = partial(FolderDevice, step_s=0.01, capacity=endless_room())
    with staged(write_byte_tokenizer(tmp_path / "model"), folders[0], build) as stage:
        put(stage.client, "legal", str(folders[1]), keep_old=True).raise_for_status()
        send(stage.client, "legal", weights(), config=CONFIG, mode="stage").raise_for_status()
        stage.route(targets={"legal@1": 0.5, "legal@2": 0.5}, rollback="legal@1", shadow="legal@3")
        yield stage


def test_all_versions_serve_again_under_their_numbers_and_kills_from_outside_roll_no_route_back(stage):
    before = stage.client.get(ROUTE).json()
    with stage.client.stream("POST", "/v1/completions", json=STREAMED) as stream:
        lines = stream.iter_lines()
        next(lines)
        stage.kill()
        last = events_in(lines)[-1]
    assert last["error"]["code"] == "engine_died"

    assert versions(stage.client, "legal") == {1: "kept", 2: "current", 3: "kept"}
    assert [stage.version(f"legal@{number}") for number in (1, 2, 3)] == ["1", "2", "3"]
    assert stage.client.get(ROUTE).json() == before
    assert {stage.version() for _ in range(4)} == {"1", "2"}
    assert until(lambda: stage.copies() > 0), "the shadow gets no copies"

    with stage.client.stream("POST", "/v1/completions", json=STREAMED) as stream:
        lines = stream.iter_lines()  # held, or its connection would be closed
        next(lines)
        stage.kill()
    assert stage.client.get(ROUTE).json()["rolled_back"] is None, "who kills an engine is no version"
    assert {stage.version() for _ in range(4)} == {"1", "2"}
    assert put(stage.client, "legal", None, version=1, keep_old=True).json()["current"] == 1
    assert stage.client.delete("/v1/adapters/legal").json() == {"name": "legal", "versions": [2, 3, 1], "is_gone": True}


def test_a_version_that_is_kept_and_lost_comes_back_with_its_folder(stage, tmp_path):
    (tmp_path / "one").rmdir()
    stage.kill()
    assert until(lambda: versions(stage.client, "legal")[1] == "lost")
    assert ask(stage.client, "legal@1").status_code == 400
    put(stage.client, "legal", str(tmp_path / "two")).raise_for_status()
    assert versions(stage.client, "legal") == {1: "lost", 2: "kept", 3: "kept", 4: "current"}

    (tmp_path / "one").mkdir()
    stage.kill()
    assert until(lambda: versions(stage.client, "legal")[1] == "kept")
    assert stage.version("legal@1") == "1"


@pytest.mark.long("an engine with torch starts twice")
def test_after_a_restart_each_version_answers_as_peft_does(tmp_path):
    prompt = (5, 9, 77, 130, 4)
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = {number: make_adapter(tmp_path / str(number), model, seed=number) for number in (1, 2, 3)}
    right = {str(number): greedy_answer(load_with_peft(path, model), prompt, 12) for number, path in paths.items()}
    options = {"model_path": str(folder), "device": "cpu", "dtype": "float32", "kv_blocks": 64}
    config = engine_config({**options, "max_running_requests": 4}, quiet=True)
    with staged(folder, paths[1], partial(build_device, config), config) as stage:
        put(stage.client, "legal", str(paths[2]), keep_old=True).raise_for_status()
        raw, peft_config = (paths[3] / name for name in ("adapter_model.safetensors", "adapter_config.json"))
        sent = send(stage.client, "legal", raw.read_bytes(), config=peft_config.read_text(), mode="stage")
        sent.raise_for_status()
        stage.route(targets={"legal@1": 0.5, "legal@3": 0.5})
        stage.kill()
        asked = {
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": 12,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for name in ("legal", "legal", "legal@1", "legal@2", "legal@3"):
            answer = ask(stage.client, name, **asked)
            assert answer.json()["choices"][0]["token_ids"] == right[answer.headers[VERSION_HEADER]]
