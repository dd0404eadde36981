"""The page in a real Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from rota.core.errors import EngineDiedError
from rota.core.policy_config import PolicyConfig
from rota.observe.journal import Journal
from rota.server.access.keys import Key
from rota.sim.cost import read_cost
from rota.sim.run import Simulation, adapter_name
from rota.workload.scenario import Client, Scenario
from tests.dashboard.looking import WAIT_MS, wait_for_text
from tests.dashboard.stage import breaks_at_forty, roomy
from tests.runtime.services import LONG
from tests.waiting import until


def figure(page, name: str) -> str:
    return page.locator(f'[data-figure="{name}"] .value').inner_text()


def colours_in(page, slot: int) -> int:
    """How many colours a lane of the strip shows."""
    return page.evaluate(
        """(slot) => {
          const canvas = document.querySelector(`[data-slot="${slot}"] canvas`);
          const pen = new OffscreenCanvas(canvas.width, 1).getContext("2d");
          pen.drawImage(canvas, 0, -canvas.height / 2);
          const { data } = pen.getImageData(0, 0, canvas.width, 1);
          const counts = new Map();
          for (let i = 0; i < data.length; i += 4) {
            const shade = [data[i], data[i + 1], data[i + 2], data[i + 3]].join();
            if (data[i + 3] === 255) counts.set(shade, (counts.get(shade) ?? 0) + 1);
          }
          return [...counts.values()].filter((count) => count > 2).length;
        }""",
        slot,
    )


def journal(path: Path, policy: PolicyConfig | None = None) -> Path:
    client = Client(requests=60, rate_per_s=6.0, prompt_tokens=(1, 200), output_tokens=(1, 200), adapters=5)
    scenario = Scenario(name="small", slots=2, clients=(client,))
    with path.open("wb") as file:
        written = Journal(file, adapter_name)
        Simulation(
            scenario=scenario, costs=read_cost("a100-llama8b"), policy=policy or PolicyConfig(), observers=[written]
        ).run()
        written.close()
    return path


def test_an_idle_server_explains_itself(on_stage, open_page):
    page = open_page(f"{on_stage().url}/dashboard")
    wait_for_text(page, "#status", "live")

    assert "There are no requests now" in page.locator("#idle").inner_text()
    assert '"model":"pirate"' in page.locator("#idle code").inner_text()
    assert page.locator("#adapters tbody tr").count() == 7
    assert page.locator(".lane").count() == 2


def test_it_moves_with_traffic_and_shows_the_rotation(on_stage, open_page):
    made = on_stage(step_s=0.01)
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#status", "live")
    for _ in range(3):
        made.ask_everybody(LONG)
    wait_for_text(page, '[data-figure="Parked"] .value', "[1-9]")
    wait_for_text(page, '[data-figure="Output"] .value', "[1-9]")
    wait_for_text(page, '[data-figure="First token"] .value', "ms|s")
    wait_for_text(page, ".lane .why", "its turn has come|a slot was empty|a resident was idle")
    page.get_by_role("button", name="10 s").click()
    wait_for_text(page, ".chart .legend-line", r"P99\s*\d")

    assert until(lambda: max(colours_in(page, slot) for slot in range(2)) >= 3)
    assert page.locator("#idle").is_hidden()
    assert "ago" in page.locator("#axis").inner_text()


@pytest.mark.parametrize(("pace", "note"), [(20.0, r"P99 · P50 \d"), (0.0, "nobody reads")])
def test_visible_stalls_are_shown_unless_nobody_reads(pace, note, on_stage, open_page):
    made = on_stage(policy=PolicyConfig(reader_pace=pace))
    page = open_page(f"{made.url}/dashboard")
    made.ask_everybody(tokens=20)
    wait_for_text(page, '[data-figure="Visible stall"] .note', note)
    wait_for_text(page, '[data-figure="First token"] .value', "ms|s")

    assert (figure(page, "Visible stall") == "–") is (not pace)


def test_who_waits_is_shown_with_the_reason(on_stage, open_page):
    made = on_stage(room=roomy(rows=2), step_s=0.02)
    page = open_page(f"{made.url}/dashboard")
    for _ in range(4):
        made.ask("letters", LONG)
    wait_for_text(page, '[data-adapter="0"] .why', "as many requests run as may run")
    wait_for_text(page, '[data-adapter="0"] td.waiting', "2")
    wait_for_text(page, '[data-adapter="0"] .longest', "s")


def test_a_drain_is_marked(on_stage, open_page):
    policy = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=0.05)
    made = on_stage(policy=policy, step_s=0.05, room=roomy(slots=1))
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#status", "live")
    made.ask("pirate", LONG)
    wait_for_text(page, '[data-slot="0"] .label', "pirate")
    made.ask("haiku", 20)
    wait_for_text(page, '[data-slot="0"] .label', "makes room for haiku")
    wait_for_text(page, '[data-adapter="1"] .where', "drains, slot 1")
    wait_for_text(page, '[data-slot="0"] .state', r"[1-9]\.\d+ s")
    page.get_by_role("button", name="10 s").click()
    box = page.locator('[data-slot="0"] canvas').bounding_box()

    def tip_at_the_right_edge() -> str:
        """What is told where the pointer comes from the left: only one that moves is told anything."""
        for from_right in (20, 6):
            page.mouse.move(box["x"] + box["width"] - from_right, box["y"] + 8)
        return page.locator("#tip").text_content()

    assert until(lambda: "draining for haiku" in tip_at_the_right_edge())


def test_an_adapter_is_loaded_and_unloaded_by_button(on_stage, open_page):
    made = on_stage(names=("pirate",))
    page = open_page(f"{made.url}/dashboard")
    page.get_by_label("Name").fill("sonnet")
    page.get_by_label("Folder on the server").fill("adapters/sonnet")
    page.get_by_role("button", name="Load adapter").click()
    wait_for_text(page, "#outcome", "sonnet is loaded")
    wait_for_text(page, "#adapters", "sonnet")
    unload = page.locator('[data-adapter="2"] .unload')
    unload.click()
    assert unload.inner_text() == "Sure?"
    assert [adapter.name for adapter in made.registry.adapters] == ["pirate", "sonnet"]
    unload.click()
    wait_for_text(page, "#outcome", "sonnet is unloaded")

    assert [adapter.name for adapter in made.registry.adapters] == ["pirate"]
    assert page.get_by_label("Folder on the server").input_value() == "adapters/sonnet"


def test_versions_and_the_split_of_their_traffic_are_shown(on_stage, open_page):
    made = on_stage(names=("pirate",))
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#status", "live")
    assert page.locator("#traffic").is_hidden()

    staged = {"path": "adapters/new", "mode": "stage"}
    httpx.put(f"{made.url}/v1/adapters/pirate", json=staged, timeout=WAIT_MS).raise_for_status()
    route = {"targets": {"pirate@1": 0.75, "pirate@2": 0.25}}
    httpx.put(f"{made.url}/v1/adapters/pirate/route", json=route, timeout=WAIT_MS).raise_for_status()
    for _ in range(4):
        made.ask("pirate")
    wait_for_text(page, '#traffic [data-key="pirate pirate@1"]', "^piratepirate@175 %3$")
    wait_for_text(page, '#traffic [data-key="pirate pirate@2"]', "^pirate@225 %1$")
    wait_for_text(page, '[data-adapter="1"] .name', "^pirate$")
    wait_for_text(page, '[data-adapter="2"] .name', "^pirate@2$")
    wait_for_text(page, '[data-adapter="2"] .where', "slot [12]|in memory")
    assert page.locator('[data-adapter="2"] .unload').count() == 0, "a version goes with its name"


def test_an_adapter_that_cannot_be_loaded_says_why(on_stage, browser):
    with browser.new_page() as page:  # the refusal is a 400, which the browser counts as an error of the page
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{on_stage(names=('pirate',)).url}/dashboard")
        page.get_by_label("Name").fill("sonnet")
        page.get_by_label("Folder on the server").fill("adapters/broken")
        page.get_by_role("button", name="Load adapter").click()
        wait_for_text(page, "#outcome", "adapters/broken is broken")


def test_with_keys_it_asks_for_one_and_keeps_it_in_the_tab(on_stage, browser):
    made = on_stage(keys={"sesame": Key("all", may_load=False)})
    with browser.new_page() as page:
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{made.url}/dashboard")
        page.get_by_label("Key").fill("wrong")
        page.get_by_role("button", name="Watch").click()
        wait_for_text(page, "#key-reason", "not known")
        page.get_by_label("Key").fill("sesame")
        page.get_by_role("button", name="Watch").click()
        wait_for_text(page, "#status", "live")

        assert page.locator("#key").is_hidden()
        assert page.locator("#load").is_hidden()  # this key may not load
        assert page.evaluate("[sessionStorage.length, Object.values(localStorage).join()]") == [1, ""]


def test_tenants_are_shown_and_what_their_clients_were_told(on_stage, browser):
    made = on_stage(keys={"sesame": Key("ann"), "secret": Key("bob", may_operate=False)}, step_s=0.02)
    with browser.new_page() as page:
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{made.url}/dashboard")
        page.get_by_label("Key").fill("sesame")
        page.get_by_role("button", name="Watch").click()
        wait_for_text(page, "#status", "live")
        assert page.locator("#tenants").is_hidden()
        wait_for_text(page, "#trouble-note", "^no restarts, ")
        for key in ("sesame", "secret", "secret"):
            made.ask("letters", LONG, key)
        wait_for_text(page, '#tenants [data-key="bob"] .running', "2")
        wait_for_text(page, '#tenants [data-key="ann"] .running', "1")
        wait_for_text(page, '#tenants [data-key="ann"] .rate', "[1-9]")
        made.ask("a secret name", 1, "secret")
        wait_for_text(page, '#errors [data-key="model_not_found"] .total', "1")
        wait_for_text(page, '#errors [data-key="model_not_found"] .sentence', "^No model or adapter of this name")

        assert "a secret name" not in page.content()


def test_one_choice_is_the_time_of_figures_tables_and_charts(on_stage, open_page):
    made = on_stage()
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#span-name", "^the last minute$")
    wait_for_text(page, ".chart-axis", "^1 min ago")
    page.get_by_role("button", name="last 5 minutes").click()
    wait_for_text(page, "#span-name", "^the last 5 minutes$")
    wait_for_text(page, ".chart-axis", "^5 min ago")
    made.ask("letters", 40)
    wait_for_text(page, '[data-figure="Output"] .value', "[1-9]|0\\.[1-9]")


STORY = """\
{"event":"asked","at":0.0,"request_id":"a","adapter_id":0,"adapter":"base","tenant":"ann"}
{"event":"asked","at":0.0,"request_id":"b","adapter_id":2,"adapter":"owl","tenant":"bob"}
{"event":"asked","at":0.0,"request_id":"c","adapter_id":2,"adapter":"owl","tenant":"bob"}
{"event":"admitted","at":1.0,"request_id":"a","cached_tokens":0}
{"event":"admitted","at":1.0,"request_id":"b","cached_tokens":0}
{"event":"produced","at":2.0,"request_ids":["a"],"tokens":[7],"step_s":0.01}
{"event":"engine_restarted","at":3.0,"reason":"It ran out of memory.","engine_id":0}
{"event":"finished","at":4.0,"request_id":"b","reason":"failed","fault":{"code":"engine_died","message":"It died."}}
{"event":"stood_still","at":14.0,"since":4.0,"requests":2,"reasons":[["a","why"]],"waits_for":"a read","engine_id":0}
{"event":"went_on","at":40.0,"still_s":36.0,"engine_id":0}
{"event":"finished","at":90.0,"request_id":"a","reason":"stop","fault":null}
"""


def test_a_replay_shows_tenants_errors_and_restarts_too(on_stage, open_page, tmp_path):
    page = open_page(f"{on_stage().url}/dashboard")
    wait_for_text(page, "#status", "live")
    (tmp_path / "story.jsonl").write_text(STORY)
    page.locator("#file").set_input_files(tmp_path / "story.jsonl")
    page.get_by_role("button", name="Pause").click()
    page.locator("#scrub").fill("20")
    wait_for_text(page, '#tenants [data-key="bob"]', "^bob101")  # one waits, none runs, one is parked
    page.locator("#scrub").fill("300")
    wait_for_text(page, "#notices li", "Engine 0 stands still. No step for 23 seconds, .* a read.$")
    page.locator("#scrub").fill("500")
    wait_for_text(page, "#restarts li:first-child", "Engine 0 was started again 42.0 s ago: It ran out of memory.")
    wait_for_text(page, '#errors [data-key="engine_died"]', "^engine died11.* agoIt died.$")
    page.locator("#scrub").fill("1000")
    wait_for_text(page, '#errors [data-key="engine_died"]', "^engine died01")
    page.get_by_role("button", name="last 5 minutes").click()
    wait_for_text(page, '#errors [data-key="engine_died"]', "^engine died11")


def test_a_pause_is_shown_until_it_ends(on_stage, open_page):
    made = on_stage()
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#status", "live")
    httpx.post(f"{made.url}/pause", params={"mode": "keep"}).raise_for_status()
    wait_for_text(page, "#status", "paused")
    assert "Generation is paused: answers stand still" in page.locator("#banner").inner_text()
    assert page.locator("#idle").is_hidden()
    httpx.post(f"{made.url}/resume").raise_for_status()
    wait_for_text(page, "#status", "live")


def test_an_engine_that_is_down_says_why(on_stage, open_page):
    made = on_stage()
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#status", "live")
    made.service.stop()
    wait_for_text(page, "#status", "engine down")
    with pytest.raises(EngineDiedError):
        made.service.wait_until_ready()

    assert "The engine is down. The engine was stopped." in page.locator("#banner").inner_text()


@pytest.mark.usefixtures("capsys")
def test_every_replica_has_its_lanes_and_one_that_is_down_is_named(on_stage, open_page):
    shown = on_stage(replicas=2, next_token=breaks_at_forty)
    page = open_page(f"{shown.url}/dashboard")
    shown.ask_everybody(tokens=20)
    wait_for_text(page, "#slots-note", "4 adapters run at a time on 2 replicas")
    numbers = page.locator(".slot-number").all_inner_texts()
    assert numbers == ["0·1", "0·2", "1·1", "1·2"]
    for engine in (0, 1):
        wait_for_text(page, f'.lane[data-engine="{engine}"] b', r"\w+")

    shown.ask("letters", tokens=100)
    wait_for_text(page, "#status", "1 of 2 live")
    wait_for_text(page, "#banner", r"^Replica [01] is down: The engine failed with .*: a kernel went wrong$")


def test_a_lost_server_is_looked_for_and_found_again(on_stage, browser):
    made = on_stage()
    with browser.new_page() as page:
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{made.url}/dashboard")
        wait_for_text(page, "#status", "live")
        page.context.set_offline(True)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        wait_for_text(page, "#status", "reconnecting")
        wait_for_text(page, "#banner", "trying again")
        page.context.set_offline(False)
        wait_for_text(page, "#status", "live")

        assert page.locator("#banner").is_hidden()


def test_a_dropped_journal_is_replayed_with_pause_speed_and_scrubber(on_stage, open_page, tmp_path):
    page = open_page(f"{on_stage().url}/dashboard")
    wait_for_text(page, "#status", "live")
    text = journal(tmp_path / "run.jsonl").read_text()
    page.evaluate(
        """(text) => {
          const carried = new DataTransfer();
          carried.items.add(new File([text], "run.jsonl"));
          dispatchEvent(new DragEvent("drop", { dataTransfer: carried, cancelable: true }));
        }""",
        text,
    )
    wait_for_text(page, "#status", "replay")
    page.locator("#speed").select_option("4")
    wait_for_text(page, "#moment", r"^([1-9]|\d{2,})\.\d / \d+")
    page.get_by_role("button", name="Pause").click()
    page.locator("#scrub").fill("0")
    wait_for_text(page, "#moment", r"^0\.0 / ")
    page.locator("#scrub").fill("500")
    wait_for_text(page, "#moment", r"^(?!0\.0 / )")

    assert int(figure(page, "Running")) + int(figure(page, "Parked")) > 0
    assert re.fullmatch(r"[\d.]+ m?s", figure(page, "First token"))
    assert re.fullmatch(r"[\d.]+ m?s", figure(page, "Visible stall"))
    assert figure(page, "KV in use") == "–"
    assert "adapter3" in page.locator("#adapters").inner_text()
    assert until(lambda: max(colours_in(page, slot) for slot in range(2)) >= 3)
    page.get_by_role("button", name="Back to live").click()
    wait_for_text(page, "#status", "live")


def test_a_replay_counts_as_the_simulator_did(on_stage, open_page, tmp_path):
    client = Client(requests=40, rate_per_s=8.0, prompt_tokens=(1, 200), output_tokens=(2, 100), adapters=5)
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file:
        written = Journal(file, adapter_name)
        scenario = Scenario(name="small", slots=2, clients=(client,))
        recorder = Simulation(scenario=scenario, costs=read_cost("a100-llama8b"), observers=[written]).run()
        written.close()
    truth = recorder.summary(adapter_name)
    page = open_page(f"{on_stage().url}/dashboard")
    counted = page.evaluate(
        """async (text) => {
          const { Journal } = await import("./dashboard/replay.js");
          const journal = new Journal(text);
          const frame = journal.frame(journal.end + 2);
          return [frame.ttft, frame.gap, frame.waiting + frame.running + frame.parked, frame.stall];
        }""",
        path.read_text(),
    )

    assert truth["duration_s"] < 55  # the figures are of the last minute: all of it
    assert counted[0] == pytest.approx({"p50": truth["ttft_s"]["median"], "p99": truth["ttft_s"]["p99"]})
    assert counted[1] == pytest.approx({"p50": truth["itl_s"]["median"], "p99": truth["itl_s"]["p99"]})
    assert counted[2] == 0
    assert counted[3] == pytest.approx({"p50": truth["stall_s"]["median"], "p99": truth["stall_s"]["p99"]})


def test_the_address_may_name_one_of_the_servers_journals(on_stage, open_page, tmp_path):
    journals = tmp_path / "journals"
    journals.mkdir()
    policy = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=0.3)
    journal(journals / "run.jsonl", policy)
    made = on_stage(journal_dir=journals)
    page = open_page(f"{made.url}/dashboard?journal=run.jsonl")
    wait_for_text(page, "#journal-name", "run.jsonl")
    page.locator("#speed").select_option("4")
    wait_for_text(page, "#adapters", "drains, slot")


def test_a_journal_of_another_server_is_refused(on_stage, open_page):
    # `open_page` sees to it that nobody goes there.
    page = open_page(f"{on_stage().url}/dashboard?journal=https://example.org/run.jsonl")
    wait_for_text(page, "#notice", "is on another server")

    assert page.locator("#player").is_hidden()


def test_what_is_no_journal_is_refused_with_its_line(on_stage, open_page, tmp_path):
    page = open_page(f"{on_stage().url}/dashboard")
    wait_for_text(page, "#status", "live")
    (tmp_path / "wrong.jsonl").write_text('{"event":"asked","at":1.0}\nhello\n')
    page.locator("#file").set_input_files(tmp_path / "wrong.jsonl")
    wait_for_text(page, "#notice", "wrong.jsonl: Line 2 is not an event of a journal")

    assert page.locator("#player").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_until_somebody_chooses(scheme, on_stage, open_page):
    page = open_page(f"{on_stage().url}/dashboard", color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(247, 246, 243)", "rgb(19, 20, 22)"

    assert page.evaluate(paper) == (light if scheme == "light" else dark)
    page.locator("#theme").click()
    assert page.evaluate(paper) == light
    page.locator("#theme").click()
    assert page.evaluate(paper) == dark
    page.reload()
    assert page.evaluate(paper) == dark


def test_nothing_is_wider_than_the_screen(on_stage, open_page):
    names = ("pirate", "an-adapter-with-a-name-that-goes-on-and-on-and-on-and-on-for-ever")
    made = on_stage(names=names, step_s=0.02)
    page = open_page(f"{made.url}/dashboard", viewport={"width": 390, "height": 844}, is_mobile=True)
    for adapter in made.registry.adapters:
        made.ask(adapter.name, LONG)
    wait_for_text(page, "#status", "live")
    wait_for_text(page, '[data-figure="Output"] .value', "[1-9]")

    for width in (390, 320, 768, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == width
