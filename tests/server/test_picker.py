from __future__ import annotations

import threading
from pathlib import Path

import httpx

from rota.core.config import ServerConfig
from tests.builders import capacity
from tests.fakes import FakeDevice
from tests.observe.picker import Pod, picked
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import REPLICAS
from tests.server.letters import CONTEXT, serving, speaks
from tests.waiting import until

NAMES = ("pirate", "poet", "parrot", "prince")


def device(slots: int) -> FakeDevice:
    return FakeDevice(next_token=speaks, capacity=capacity(max_sequence_tokens=CONTEXT, slots=slots, rows=4))


def pod_of(client: httpx.Client) -> Pod:
    return Pod.read(client.get("/metrics").raise_for_status().text)


def ask(client: httpx.Client, adapter: str, tokens: int = 3) -> None:
    body = {"model": adapter, "prompt": "abc", "max_tokens": tokens}
    client.post("/v1/completions", json=body).raise_for_status()


def settled(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_the_picker_prefers_the_pod_where_an_adapter_is_through_loads_and_evictions(tmp_path):
    slots = 2 if REPLICAS == 1 else 1
    with (
        serving(settled(tmp_path / "a"), device(slots), adapters=NAMES) as here,
        serving(settled(tmp_path / "b"), device(slots), adapters=NAMES) as there,
    ):

        def prefers(adapter: str) -> set[str]:
            return picked({"here": pod_of(here), "there": pod_of(there)}, adapter)

        assert prefers("pirate") == {"here", "there"}
        ask(here, "pirate")
        assert prefers("pirate") == {"here"}
        ask(there, "poet")
        assert prefers("poet") == {"there"}
        assert prefers("pirate") == {"here"}
        for name in ("poet", "parrot", "prince") * 2:
            ask(here, name)
        assert until(lambda: "pirate" not in pod_of(here).active or REPLICAS > 1)
        if REPLICAS == 1:  # two slots, and two later adapters in them
            assert pod_of(here).score("pirate") == 0.0
            assert prefers("pirate") == {"there"}, "there a slot is free"
        assert pod_of(here).score("prince") == 1.0


def test_in_rotation_the_list_is_of_those_in_a_slot_and_the_rest_wait(tmp_path):
    with serving(tmp_path, endless_device(slots=1, rows=4), adapters=NAMES) as client:
        threads = [threading.Thread(target=ask, args=(client, name, ENDLESS)) for name in NAMES[: 2 * REPLICAS]]
        for thread in threads:
            thread.start()
        seen: set[str] = set()

        def has_turned() -> bool:
            pod = pod_of(client)
            assert len(pod.active) <= pod.most_adapters == REPLICAS
            assert not pod.active & pod.queued
            if pod.running:
                seen.update(pod.active)
            return seen >= set(NAMES[: 2 * REPLICAS])

        assert until(has_turned), seen
        client.post("/abort_request", json={"abort_all": True}).raise_for_status()
        for thread in threads:
            thread.join()
        assert until(lambda: pod_of(client).waiting == 0)


def test_operators_can_do_without_the_names_of_the_picker(tmp_path):
    with serving(tmp_path, config=ServerConfig(picker_metrics=False)) as client:
        assert "vllm:" not in client.get("/metrics").text
