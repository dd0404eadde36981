"""The pictures of docs/images: the page in light, in the dark, on a phone, with five hundred adapters, and a replay.

`ROTA_PICTURES=docs/images make test-long ARGS=tests/dashboard/test_pictures.py` takes them anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest

from rota.core.policy_config import PolicyConfig
from rota.observe.journal import Journal
from rota.server.access.keys import Key
from rota.sim.cost import read_cost
from rota.sim.run import Simulation, adapter_name
from rota.workload.scenario import read_scenario
from tests.dashboard.looking import WAIT_MS, findings, wait_for_text
from tests.dashboard.stage import Stage, roomy
from tests.dashboard.test_crowd import CROWD

LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
TRAFFIC_S = 64.0  # until strip and charts are full
SCENARIO = Path(__file__).parents[2] / "benchmarks" / "scenarios" / "tail-ttft.toml"

pytestmark = pytest.mark.long("draws a minute of traffic for each picture")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return Path(os.environ.get("ROTA_PICTURES", tmp_path))


@contextmanager
def traffic(made: Stage, names: list[str], rate: float, keys: tuple[str, ...] = ("",)) -> Iterator[None]:
    """Requests by Zipf's law, the same each time: for as long as it takes to fill the charts, and during the block."""
    ended = Event()

    def send() -> None:
        dice = Random(7)
        weights = [1.0 / (rank + 1) for rank in range(len(names))]
        while not ended.wait(dice.expovariate(rate)):
            (name,) = dice.choices(names, weights)
            made.ask(name, dice.randrange(20, 120), dice.choice(keys))

    sender = Thread(target=send)
    sender.start()
    try:
        time.sleep(TRAFFIC_S)  # time is what is drawn
        yield
    finally:
        ended.set()
        sender.join()


def take(page: Any, path: Path, full: bool = True) -> None:
    """Draws what axe has nothing against, and what fits the screen."""
    page.evaluate("scrollTo(0, 0)")
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)
    page.screenshot(path=path, full_page=full)
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]
    assert findings(page) == []


def test_the_page_in_light_in_the_dark_and_on_a_phone(on_stage, browser, pictures, tmp_path):
    made = on_stage(model="SmolLM2-135M-Instruct", step_s=0.02, room=roomy(slots=3))
    names = ["SmolLM2-135M-Instruct", *(one.name for one in made.registry.adapters)]
    with (
        browser.new_page(viewport=LAPTOP, device_scale_factor=1.5, color_scheme="light") as page,
        browser.new_page(viewport=PHONE, device_scale_factor=2, color_scheme="light") as phone,
    ):
        for one in (page, phone):
            one.set_default_timeout(WAIT_MS)
            one.goto(f"{made.url}/dashboard")
            wait_for_text(one, "#status", "live")
        with traffic(made, names, rate=2.5):
            page.get_by_label("Prompt").fill("What is the moon?")
            page.get_by_label("without a chat template").check()
            page.get_by_label("Adapter or base model").fill("pirate")
            page.get_by_label("Another one beside it").fill("haiku")
            page.locator("#ask-form").get_by_role("button", name="Ask").click()
            wait_for_text(page, ".answer", "[a-z]{20}")
            take(page, pictures / "dashboard-light.png")
            page.emulate_media(color_scheme="dark")
            page.get_by_role("button", name="30 s").click()
            take(page, pictures / "dashboard-dark.png")
            phone.get_by_role("button", name="10 s").click()
            take(phone, pictures / "dashboard-phone.png", full=False)
            take(phone, tmp_path / "whole.png")


def test_the_page_with_five_hundred_adapters_on_two_replicas(on_stage, browser, pictures):
    keys = {
        "sesame": Key("ann", requests_per_minute=600),
        "secret": Key("bob", may_operate=False, requests_per_minute=20, max_running=4),
    }
    made = on_stage(names=CROWD, room=roomy(slots=8), step_s=0.03, keys=keys, replicas=2)
    # As far down as some of the adapters: the page is long.
    with browser.new_page(viewport={"width": 1280, "height": 1560}, color_scheme="light") as page:
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{made.url}/dashboard")
        page.get_by_label("Key").fill("sesame")
        page.get_by_role("button", name="Watch").click()
        wait_for_text(page, "#status", "live")
        with traffic(made, list(CROWD), rate=4.0, keys=("sesame", "sesame", "secret")):
            page.locator('#adapters th[data-column="waiting"] button').click()
            take(page, pictures / "dashboard-500.png", full=False)


def test_a_replay(on_stage, browser, pictures, tmp_path):
    """The tail of first tokens under `drain`, so that drains are seen."""
    policy = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=2.0)
    with (tmp_path / "tail-ttft.jsonl").open("wb") as file:
        written = Journal(file, adapter_name)
        Simulation(
            scenario=read_scenario(SCENARIO), costs=read_cost("a100-llama8b"), policy=policy, observers=[written]
        ).run()
        written.close()
    with browser.new_page(viewport=LAPTOP, device_scale_factor=1.5, color_scheme="light") as page:
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{on_stage().url}/dashboard")
        wait_for_text(page, "#status", "live")
        page.locator("#file").set_input_files(tmp_path / "tail-ttft.jsonl")
        page.locator("#scrub").fill("620")
        page.get_by_role("button", name="10 s").click()
        page.wait_for_timeout(400)
        page.get_by_role("button", name="Pause").click()
        take(page, pictures / "dashboard-replay.png")
